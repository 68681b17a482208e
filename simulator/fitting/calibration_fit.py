"""Make the `Calibration` of a profile; a program does this once, where it reads its inputs.

Only samples of the software that the profile's head names are used. A profile of other GPUs than the cluster's is not
used.

By how much a collective and a concurrent kernel slow each other down is fitted to pairs measured alone and together. A
kernel loses SMs and memory bandwidth; the factor differs between large products, small ones and copies, and little
between collectives. A collective loses bandwidth and waits: NCCL's kernel gets SMs only when blocks of the running
product end, which takes a share of that product's time for every message size. So

    kernel alongside     = slowdown(kernel) * kernel alone
    collective alongside = share * collective alone + wait * kernel alone

with `share` for products and for copies and one `wait` for products; copies end too soon to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy  # submodules are imported when first used

from simulator.calibration.calibration import Calibration, Contention
from simulator.calibration.measured_operators import MeasuredOperators
from simulator.collectives.cost import CollectiveModel
from simulator.collectives.measured import MeasuredCollectives
from simulator.fitting.calibrations import doubts_of, same_gpu
from simulator.fitting.kernel_fit import burst_over_sustained, measured_operators
from simulator.fitting.overlap_fit import fit_rates, mean_error
from simulator.fitting.overlap_samples import rates_as_numbers, site_rates, timed_modes
from simulator.fitting.runtime_fit import fit_runtimes
from simulator.fitting.step_samples import StandaloneTimes
from simulator.kernels.efficiency import efficiency
from simulator.kernels.roofline import Roofline
from simulator.overlap.modes import EXECUTED
from simulator.overlap.site_costs import SiteRates
from topology import codec
from topology.catalog.gpus import gpu_kind
from topology.cluster import Cluster, GpuKind
from topology.errors import BadCluster
from topology.profile.profile import Profile
from topology.profile.samples import ContentionSample, OperatorSample
from topology.profile.store import current_samples


def calibrated(profile: Profile | None, cluster: Cluster) -> Calibration | None:
    """Return the calibration of `cluster` from `profile`; None without a profile, or if it is of other GPUs.

    Fitting the runtimes that ran single layers takes a second or two.
    """
    kind = cluster.slowest_kind
    if profile is None or not same_gpu(profile, kind):
        return None
    found = current_samples(profile)
    operators = measured_operators(found.operators, kind)
    gpu = Calibration(
        gpu=kind,
        operators=operators,
        contention=fit_contention(found.contention),
        burst=_burst(found.operators, operators, kind),
        gpu_measured=profile.calibrated,
        profile=codec.fingerprint(profile),
        current=not doubts_of(profile, cluster),
    )
    collectives = _collectives(profile)
    overlap = SiteRates()
    one_node = [sample for sample in found.overlap if sample.ranks <= cluster.gpus_per_node]
    if one_node:
        roofline = Roofline(gpu=kind, measured=operators)
        overlap = site_rates(one_node, profile.overlap_rates, roofline, CollectiveModel(cluster, collectives))
    return replace(gpu, runtimes=fit_runtimes(found, cluster, gpu), collectives=collectives, overlap=overlap)


def _burst(samples: Sequence[OperatorSample], operators: MeasuredOperators, kind: GpuKind) -> float:
    """Return the measured time of products on a rested GPU over that in a step of nothing but products, in which they
    take longer than by themselves; that of the architecture if neither was measured.
    """
    by_themselves = burst_over_sustained(samples, operators.matmuls)
    if by_themselves is None:
        return Roofline(gpu=kind).rested
    return by_themselves * efficiency(kind.architecture).sustained


def _collectives(profile: Profile) -> MeasuredCollectives | None:
    measured = MeasuredCollectives(profile.collectives)
    return measured if measured.samples else None


def standalone_times(profile: Profile, kind: GpuKind) -> StandaloneTimes | None:
    """Return the measured times of operators that run alone on GPUs of `kind`; None without any."""
    if not profile.calibrated or not same_gpu(profile, kind):
        return None
    operators = measured_operators(current_samples(profile).operators, kind)
    return StandaloneTimes(exact=operators.exact, matmuls=operators.matmuls, attention=operators.attention)


# --- overlap modes --------------------------------------------------------------------------------------------------


def with_rates(profile: Profile, cluster: Cluster) -> Profile:
    """Return `profile` with rates fitted to its overlap samples, if these are of one software; unchanged without
    samples.
    """
    timed = [mode for _, mode in timed_modes(current_samples(profile).overlap, *_machine(profile, cluster))]
    if not timed:
        return profile
    return replace(profile, overlap_rates=rates_as_numbers(fit_rates(timed)))


def rate_errors(profile: Profile, cluster: Cluster) -> dict[str, tuple[float, int]]:
    """Return (mean of |predicted / measured - 1|, number of times) for each mode and for `all`, with the profile's
    rates.
    """
    samples, machine = current_samples(profile).overlap, _machine(profile, cluster)
    same = same_gpu(profile, cluster.slowest_kind)
    rates = (site_rates(samples, profile.overlap_rates, *machine) if same else SiteRates()).rates
    timed = [mode for _, mode in timed_modes(samples, *machine)]
    groups = {mode: [one for one in timed if one.mode == mode] for mode in EXECUTED} | {"all": timed}
    return {name: (mean_error(group, rates), len(group)) for name, group in groups.items() if group}


def _machine(profile: Profile, cluster: Cluster) -> tuple[Roofline, CollectiveModel]:
    kind = cluster.slowest_kind
    if not same_gpu(profile, kind):
        return Roofline(gpu=kind), CollectiveModel(cluster)
    roofline = Roofline(gpu=kind, measured=measured_operators(current_samples(profile).operators, kind))
    return roofline, CollectiveModel(cluster, _collectives(profile))


# --- how good the fits are ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """The leave-one-out error of a curve: the mean absolute error on samples left out in turn."""

    what: str
    samples: int
    mean_abs: float


def fit_errors(profile: Profile) -> list[FitError]:
    """Return the leave-one-out errors of every curve through a profile's samples; empty for an unknown GPU."""
    try:
        kind = gpu_kind(profile.gpu)
    except BadCluster:
        return []
    found = measured_operators(current_samples(profile).operators, kind)
    errors = [
        FitError(what=f"matmul {dtype} {direction}", samples=len(rest.residuals), mean_abs=rest.error)
        for dtype, curve in found.matmuls.items()
        for direction, rest in curve.rest.items()
    ]
    errors += [
        FitError(
            what=f"attention {dtype} width {width} {direction}",
            samples=len(curve.rest.residuals),
            mean_abs=curve.rest.error,
        )
        for (dtype, width, direction), curve in found.attention.items()
    ]
    moves = {id(curve): curve for curve in found.moves.values()}
    if moves:
        mean = float(np.mean([curve.error for curve in moves.values()]))
        errors.append(FitError(what="kernels that move memory", samples=len(moves), mean_abs=mean))
    for kernel, curve in found.packing.items():
        errors.append(FitError(what=kernel, samples=len(curve.points), mean_abs=curve.error))
    pairs = current_samples(profile).contention
    together = left_out_errors(pairs)
    if together is not None:
        for what, mean in zip(
            ("kernels alongside collectives", "collectives alongside kernels"), together, strict=True
        ):
            errors.append(FitError(what=what, samples=len(pairs), mean_abs=mean))
    return errors


def fit_contention(samples: Sequence[ContentionSample]) -> dict[str, Contention]:
    """Return by how much compute and each collective slow each other down in a step.

    Pairs are weighted by the time of their compute, since large products take most of a step.
    """
    found = {}
    pairs = valid(samples)
    for op in dict.fromkeys(s.op for s in pairs):
        mine = [s for s in pairs if s.op == op]
        weight = np.array([s.compute_alone_s for s in mine])
        compute = np.array([max(s.compute_beside_s / s.compute_alone_s, 1.0) for s in mine])
        collective = np.array([max(s.collective_beside_s / s.collective_alone_s, 1.0) for s in mine])
        found[op] = Contention(
            compute=float(np.exp(np.average(np.log(compute), weights=weight))),
            collective=float(np.exp(np.average(np.log(collective), weights=weight))),
            samples=len(mine),
        )
    return found


def valid(samples: Sequence[ContentionSample]) -> list[ContentionSample]:
    return [s for s in samples if not s.invalid and s.compute_alone_s > 0 and s.collective_alone_s > 0]


def left_out_errors(samples: Sequence[ContentionSample]) -> tuple[float, float] | None:
    """Return the mean errors of concurrent (kernel, collective) times, each pair predicted from all others.

    None with too few pairs to leave one out.
    """
    pairs = valid(samples)
    kernels, collectives = [], []
    for index, pair in enumerate(pairs):
        others = pairs[:index] + pairs[index + 1 :]
        alike = [s for s in others if s.compute == pair.compute and s.shape == pair.shape]
        model = fit_collective(others, pair.compute)
        if not alike or model is None:
            continue
        slowdown = float(np.exp(np.mean([np.log(s.compute_beside_s / s.compute_alone_s) for s in alike])))
        kernels.append(abs(slowdown * pair.compute_alone_s / pair.compute_beside_s - 1))
        share, wait = model
        predicted_s = share * pair.collective_alone_s + wait * pair.compute_alone_s
        collectives.append(abs(predicted_s / pair.collective_beside_s - 1))
    return (float(np.mean(kernels)), float(np.mean(collectives))) if kernels else None


def fit_collective(samples: Sequence[ContentionSample], compute: str) -> tuple[float, float] | None:
    """Return (share, wait) of collectives next to one kind of compute, by least squares of relative errors."""
    mine = [s for s in samples if s.compute == compute]
    if not mine:
        return None
    together = np.array([s.collective_beside_s for s in mine])
    alone = np.array([s.collective_alone_s for s in mine]) / together
    if compute != "matmul" or len(mine) < 3:
        return float(np.sum(alone) / np.sum(alone**2)), 0.0
    kernel = np.array([s.compute_alone_s for s in mine]) / together
    (share, wait), _ = scipy.optimize.nnls(np.stack([alone, kernel], axis=1), np.ones(len(mine)))
    return float(share), float(wait)
