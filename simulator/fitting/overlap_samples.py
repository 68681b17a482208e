"""Measured overlap modes in the form that the model reads: the parts of every sample, the rates of a profile, and
shapes with measured times.

A part that was not measured is derived: the product of a shard or slice has the share of the whole product that the
roofline gives it (waves of tiles, weights read again), or the time of a sample of the same layer with as many rows. The
collective of a slice is derived in the same way. Copies run at the rate of the cluster's links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from simulator.collectives.cost import CollectiveModel
from simulator.config.runtime import DTYPE_BYTES
from simulator.fitting.overlap_fit import RATES, TimedMode, fit_rates
from simulator.kernels.operators import Work, WorkKind
from simulator.kernels.roofline import Roofline
from simulator.overlap.modes import EXECUTED, GATHER, SCATTER, SLICES, OverlapRates, Parts, issue_s, rounds_of
from simulator.overlap.site_costs import LARGE_COPY_BYTES, OWN_MODES, Shape, SiteRates
from topology.profile.samples import OverlapSample
from topology.rates.groups import GroupShape

COLLECTIVE = {GATHER: "all_gather", SCATTER: "reduce_scatter"}
HOST_BOUND = 1.1  # a time below this multiple of the host's time says nothing of the device
# Names of rates in profiles of early versions.
OLDER_NAMES = {
    f"{kind}_beside".lstrip("_"): name
    for kind, name in {
        "": "product_slowdown",
        "fused": "fused_product_slowdown",
        "collective": "late_product_slowdown",
        "behind": "early_product_slowdown",
    }.items()
} | {"collective_slowed": "collective_slowdown"}
ISSUE = "issue "  # prefix of the names of `OverlapRates.issue` in a profile


def timed_modes(
    samples: Sequence[OverlapSample], roofline: Roofline, collectives: CollectiveModel
) -> list[tuple[OverlapSample, TimedMode]]:
    """Return every valid time of a mode that the executor runs, with the sample it belongs to."""
    valid = [sample for sample in samples if not sample.invalid]
    alone = {(s.rows, s.columns, s.depth, s.dtype): s.product_s for s in valid}
    found = []
    for sample in valid:
        parts = _parts(sample, roofline, collectives, alone)
        for mode in EXECUTED:
            if mode in sample.seconds:
                timed = TimedMode(operation=sample.operation, mode=mode, parts=parts, seconds=sample.seconds[mode])
                found.append((sample, timed))
    return found


def site_rates(
    samples: Sequence[OverlapSample], rates: Mapping[str, float], roofline: Roofline, collectives: CollectiveModel
) -> SiteRates:
    """Return the rates of a profile (fitted here if it has samples but no rates), and the measured device times of its
    shapes.
    """
    if not samples:
        return SiteRates()
    fitted = (
        rates_of(rates) if rates else fit_rates([timed for _, timed in timed_modes(samples, roofline, collectives)])
    )
    measured: dict[Shape, float] = {}
    for sample in samples:
        for mode in OWN_MODES:
            if sample.invalid or mode not in sample.seconds:
                continue
            products = len(sample.columns)
            issued_s = issue_s(mode, sample.operation, sample.ranks, fitted, products=products)
            host = sample.host_s.get(mode) or float(issued_s)
            if sample.seconds[mode] > HOST_BOUND * host:
                measured[shape_of(sample, mode)] = sample.seconds[mode]
    return SiteRates(rates=fitted, measured=measured, source="fitted")


def shape_of(sample: OverlapSample, mode: str) -> Shape:
    """Return the key of a measured shape, as plans look it up."""
    elements = sum(sample.columns) * sample.depth
    moved = round(_shard_bytes(sample) * sample.ranks)
    return sample.operation, mode, sample.ranks, sample.rows, moved, elements, len(sample.columns)


def rates_of(numbers: Mapping[str, float]) -> OverlapRates:
    """Return the rates that a profile states as plain numbers; those it does not state are the defaults."""
    numbers = {OLDER_NAMES.get(name, name): value for name, value in numbers.items()}
    issue = {name.removeprefix(ISSUE): value for name, value in numbers.items() if name.startswith(ISSUE)}
    return OverlapRates(**{name: numbers[name] for name in RATES if name in numbers}, issue=issue)


def rates_as_numbers(rates: OverlapRates) -> dict[str, float]:
    """Return rates as a profile keeps them, to four digits; the scatter of the fitted times allows no more."""
    named = {name: getattr(rates, name) for name in RATES}
    named |= {ISSUE + name: value for name, value in rates.issue.items()}
    return {name: float(f"{value:.4g}") for name, value in named.items()}


def _parts(
    sample: OverlapSample,
    roofline: Roofline,
    collectives: CollectiveModel,
    alone: Mapping[tuple[int, tuple[int, ...], int, str], float],
) -> Parts:
    ranks, pair = sample.ranks, GroupShape(ranks=2, ranks_per_node=2)
    shard, whole = _shard_bytes(sample), sample.product_s
    same = alone.get((sample.rows // ranks, sample.columns, sample.depth, sample.dtype), 0.0)
    model = _product_s(sample, sample.rows, 1, roofline)
    shard_model = _product_s(sample, sample.rows / ranks, 1, roofline)
    shard_s = sample.shard_product_s or same or whole * shard_model / model
    slice_model = _product_s(sample, sample.rows / ranks / SLICES, ranks, roofline)
    slice_s = sample.slice_product_s or shard_s * slice_model / shard_model
    together, both = GroupShape(ranks=ranks, ranks_per_node=ranks), np.array([shard * ranks, shard * ranks / SLICES])
    at_once, slice_of_it = collectives.time_s(COLLECTIVE[sample.operation], both, together)
    large = np.array([LARGE_COPY_BYTES])
    rate = float(collectives.time_s("send_recv", large, pair, algorithm="copy_engine")[0]) / LARGE_COPY_BYTES
    return Parts(
        ranks=ranks,
        shard_bytes=shard,
        shard_rows=sample.rows / ranks,
        product_s=whole,
        # A long product runs at the clocks that its power allows, even if a short one alone runs faster.
        shard_product_s=max(shard_s, whole / ranks),
        slice_product_s=max(slice_s, whole / SLICES),
        collective_s=sample.collective_s,
        slice_collective_s=sample.slice_collective_s or sample.collective_s * float(slice_of_it / at_once),
        copy_s=sample.copy_s or shard * rate,
        stream_s=shard / roofline.memory_bytes_per_s,
        products=len(sample.columns),
        rounds=float(rounds_of(sample.rows, sample.columns[0], roofline.gpu.sm_count)),
        first_s=sample.first_s or whole * sample.columns[0] / sum(sample.columns),
    )


def _shard_bytes(sample: OverlapSample) -> float:
    width = sample.depth if sample.operation == GATHER else sample.columns[0]
    return sample.rows / sample.ranks * width * float(DTYPE_BYTES.get(sample.dtype, 2))


def _product_s(sample: OverlapSample, rows: float, batch: float, roofline: Roofline) -> float:
    """Return the roofline's seconds for the sample's products with `rows` rows, `batch` of them in one launch."""
    total, element = 0.0, float(DTYPE_BYTES.get(sample.dtype, 2))
    for columns in sample.columns:
        moved = element * (rows * sample.depth + sample.depth * columns + rows * columns)
        work = Work(
            kind=WorkKind.MATMUL,
            name="matmul",
            flops=2.0 * batch * rows * columns * sample.depth,
            bytes=batch * moved,
            batch=batch,
            m=rows,
            n=float(columns),
            k=float(sample.depth),
        )
        total += float(np.asarray(roofline.seconds(work)).flat[0])
    return total
