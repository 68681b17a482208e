"""Host times of layers and steps, fitted to all runs of narrow layers at once.

A run whose layers are so narrow that the device waits for the host takes the host's time: launches, layers that are
sharded, divided or recomputed, and the step's own work. These add up, so a run is a row with the number of times each
cost occurs, and the costs are fitted to all rows together. Few calibrations have a run for every cost. A cost without a
run has the value of the runtime's description, scaled by the speed of this host: hosts are faster or slower as a whole
(examples/profiles/hosts.md), and every run shows by how much. So costs are fitted by least squares of logarithms around
the description. A run is weighted by the spread of its steps, a cost by its spread over hosts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # submodules are imported when first used
from numpy.typing import NDArray

from simulator.runtimes.parts import HostSpec
from topology.profile.samples import LAYER_CUT, LAYER_PLAIN, HostSample

Floats = NDArray[np.float64]
Costs = dict[str, float]

# Costs that are fitted, as fields of HostSpec. All kinds of launch have one cost.
LAUNCHES = ("launch_s", "backward_launch_s", "dtensor_launch_s")
SINGLE = (
    "fsdp_layer_s",
    "ddp_layer_s",
    "tp_layer_s",
    "cp_layer_s",
    "moe_layer_s",
    "ep_layer_s",
    "fsdp_tp_layer_s",
    "pp_pass_s",
    "checkpoint_s",
    "fsdp_again_s",
    "selective_s",
    "rest_s",
    "fsdp_rest_s",
    "ddp_rest_s",
    "tp_rest_s",
    "cp_rest_s",
)
# Included in launches and in what parallelism adds, so these fields are set to zero.
CONTAINED = ("collective_s", "forward_layer_s", "backward_layer_s")
# Standard deviations of logarithms. RUN_NOISE and STEP_SHARE: of a run's median step around any description, a constant
# plus a share of the spread of its steps; that spread is not only chance, since the same layer takes 4 to 9 % more or
# less in another process of one host. HOST_SPREAD: of hosts as a whole. LAUNCH_SPREAD and COST_SPREAD: of launches and
# of other costs beyond that; launches follow the host's speed closely, what parallelism adds differs by a factor of 2
# to 5 between hosts (examples/profiles/hosts.md).
RUN_NOISE = 0.03
STEP_SHARE = 0.4
HOST_SPREAD = 0.5
LAUNCH_SPREAD = 0.15
COST_SPREAD = 0.4
LEAST_S = 0.1e-3  # stands for any smaller described cost, since zero has no logarithm
# Error of any cost in addition to its spread, since a described cost near zero says little (assumed).
UNSURE_S = 0.35e-3
LEVEL = 3.0  # multiple of the described costs at which every narrow run waits for its host


# Processor seconds of `executor.calibrate.host_alone` on the processor of hosts.md's table (torch 2.13; between runs of
# `host_cost.py`, whose layer takes 1398 us in that table), and the time of GPU hosts over it, from the same table.
REFERENCE_S = {LAYER_PLAIN: 0.53e-3, LAYER_CUT: 7.1e-3}
GPU_HOSTS = 1.3
# Standard deviation of the logarithm of costs found on the CPU alone around those of layers on a GPU. Source: assumed;
# for torchtitan's tensor parallelism the CPU alone gave 7.8 ms where whole models take 8 to 9 (hosts.md).
ALONE_SPREAD = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAlone:
    """Measurements on the CPU alone, as times over those of the described hosts: of this host (`speed`), and of
    DTensor's dispatch of a divided layer (`dtensors`) in the installed torch.
    """

    speed: float
    dtensors: float

    def costs(self, described: HostSpec) -> Costs:
        """Return the described costs that depend on DTensor's dispatch, scaled to this host."""
        fields = () if described.plain_tensors else OF_DTENSORS
        return {name: self.dtensors * getattr(described, name) for name in fields}


OF_DTENSORS = ("tp_layer_s", "fsdp_tp_layer_s")


def host_alone(samples: Sequence[HostSample]) -> HostAlone | None:
    """Return the ratios from samples of layers on the CPU alone; None without samples."""
    seen = {one.name: one.seconds for one in samples}
    if not all(seen.get(name) for name in REFERENCE_S):
        return None
    cut, usual = seen[LAYER_CUT] - seen[LAYER_PLAIN], REFERENCE_S[LAYER_CUT] - REFERENCE_S[LAYER_PLAIN]
    speed = seen[LAYER_PLAIN] / REFERENCE_S[LAYER_PLAIN]
    return HostAlone(speed=speed / GPU_HOSTS, dtensors=max(cut, seen[LAYER_PLAIN]) / usual / GPU_HOSTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRuns:
    """Narrow runs of one runtime: their seconds, the spread of their steps as (90th - 10th percentile) / median, the
    costs that can occur in each, and `predict(runs, fields)`, which returns the seconds of some runs, each for fields
    of HostSpec of its own.
    """

    described: HostSpec
    seconds: Floats
    spreads: Floats
    occurring: Sequence[frozenset[str]]
    predict: Callable[[Sequence[int], Sequence[dict[str, float]]], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFit:
    """`speed` is the time of this host over that of described hosts. `costs` are fields of HostSpec by runtime."""

    speed: float
    costs: list[Costs]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Seconds of runs as linear functions of costs: `fixed`, plus `counts` times the costs in `names`. `usual` has
    their described values. `alone` is the logarithm of a cost measured on the CPU alone over its described value, NaN
    where not measured.
    """

    names: tuple[str, ...]
    alone: Floats
    spreads: Floats
    usual: Floats
    fixed: Floats
    counts: Floats
    seconds: Floats
    noise: Floats

    def predicted(self, logs: Floats) -> Floats:
        """Return the seconds of the runs with costs of `usual` times the exponentials of `logs`."""
        return np.asarray(self.fixed + self.counts @ (self.usual * np.exp(logs)))


def usual_costs(described: HostSpec) -> Costs:
    """Return the described costs that a fit may change; the cost of a launch is called `launch_s`."""
    found = {name: getattr(described, name) for name in ("launch_s", *SINGLE)}
    if described.selective_s is None:
        del found["selective_s"]
    return {name: max(value, 0.0 if name == "launch_s" else LEAST_S) for name, value in found.items()}


def spread_of(name: str, described: HostSpec) -> float:
    """Return the spread of the logarithm of a described cost, beyond that of the host as a whole."""
    if name == "launch_s":
        return LAUNCH_SPREAD
    return math.hypot(COST_SPREAD, math.log1p(UNSURE_S / max(getattr(described, name) or 0.0, LEAST_S)))


def as_host_fields(costs: Mapping[str, float]) -> Costs:
    """Return the costs as fields of HostSpec, set for every kind of launch."""
    single = {name: value for name, value in costs.items() if name != "launch_s"}
    return dict.fromkeys(CONTAINED, 0.0) | dict.fromkeys(LAUNCHES, costs["launch_s"]) | single


def fit_hosts(groups: Sequence[HostRuns], alone: HostAlone | None = None) -> HostFit:
    """Return the costs of every group's runtime and the speed of their common host. Measurements on its CPU, `alone`,
    replace the descriptions around which costs and speed are fitted.
    """
    if not groups:
        return HostFit(speed=1.0 if alone is None else alone.speed, costs=[])
    usual_speed, speed_spread = (0.0, HOST_SPREAD) if alone is None else (math.log(alone.speed), ALONE_SPREAD)
    rows = [_taken_apart(group, alone) for group in groups]
    ends = np.cumsum([1, *(len(one.names) for one in rows)])

    def split(answer: Floats) -> list[Floats]:
        return [answer[start:end] for start, end in itertools.pairwise(ends)]

    def missed(answer: Floats) -> Floats:
        found = [(answer[:1] - usual_speed) / speed_spread]
        for one, logs in zip(rows, split(answer), strict=True):
            found.append(np.log(one.predicted(logs) / one.seconds) / one.noise)
            found.append((logs - np.where(np.isnan(one.alone), answer[0], one.alone)) / one.spreads)
        return np.concatenate(found)

    answer = scipy.optimize.least_squares(missed, np.full(int(ends[-1]), usual_speed), loss="soft_l1").x
    costs = [
        as_host_fields(dict(zip(one.names, (one.usual * np.exp(logs)).tolist(), strict=True)))
        for one, logs in zip(rows, split(answer), strict=True)
    ]
    return HostFit(speed=float(np.exp(answer[0])), costs=costs)


def _taken_apart(group: HostRuns, alone: HostAlone | None) -> _Rows:
    """Return runs as linear functions of costs; raising each cost in turn shows how often it occurs."""
    usual = usual_costs(group.described)
    high = {name: LEVEL * value for name, value in usual.items()}
    base = as_host_fields(high)
    raised = [as_host_fields(high | {name: high[name] + usual[name]}) for name in usual]
    occurring = np.array([[name in found for name in usual] for found in group.occurring])
    runs, places = occurring.nonzero()
    every = range(len(group.seconds))
    found = group.predict([*every, *runs.tolist()], [base] * len(every) + [raised[place] for place in places])
    at = found[: len(every)]
    matrix = np.zeros(occurring.shape)
    matrix[runs, places] = (found[len(every) :] - at[runs]) / np.array(list(usual.values()))[places]
    fixed = np.maximum(at - matrix @ np.array(list(high.values())), 1e-6)
    shown = {} if alone is None else alone.costs(group.described)
    return _Rows(
        names=tuple(usual),
        alone=np.log([max(shown[name], LEAST_S) / usual[name] if name in shown else np.nan for name in usual]),
        spreads=np.array([ALONE_SPREAD if name in shown else spread_of(name, group.described) for name in usual]),
        usual=np.array(list(usual.values())),
        fixed=fixed,
        counts=matrix,
        seconds=group.seconds,
        noise=np.hypot(RUN_NOISE, STEP_SHARE * group.spreads),
    )
