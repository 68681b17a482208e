"""Collectives measured on this machine, and times between the measured sizes, groups and operations.

A straight line in log-log between two measured sizes is wrong where the protocol changes, since the time jumps. The
model knows these sizes, so the *ratio* measured / model is interpolated in log-log, which bends the model through the
samples. A time cannot decrease with size inside a region, so it is kept between its neighbours.

Outside the measured range the ratio at the nearer end fades by half for every factor of 64 in size, as latency says
nothing of bandwidth. Other group sizes and operations get half of the ratio for each step away, since part of an error
belongs to the machine (a slow host, a link at half rate) and part to the curve.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simulator.collectives.launch_mode import EAGER_ISSUE_S, LaunchMode, device_time_s
from topology.rates.groups import GroupShape

if TYPE_CHECKING:
    from topology.profile.profile import CollectiveSample

Floats = NDArray[np.float64]
Model = Callable[[str, Floats, GroupShape], Floats]
Ratios = dict[tuple[str, GroupShape], Floats]  # log(measured / model) by op and group

NOISE = 0.033  # two runs of one point differ by 3.3 % in the median (public tables)
# Beyond the measured range a correction is halved for every such factor in size. Source: assumed.
FADE = 64.0
DEVICE_ALONE = (LaunchMode.GRAPH, LaunchMode.QUEUED)
# Factor by which a size may lie below the smallest or above the largest sample and count as measured. Source: assumed.
REACH_BYTES = 4.0


@dataclass(frozen=True, slots=True)
class _Series:
    """Samples of one (op, ranks, nodes), sizes ascending."""

    sizes: Floats
    times: Floats


# Relative half-width of the 80 % interval of an interpolated value. Source: assumed, a few times the noise of one
# point.
SPREAD = 0.08


@dataclass(slots=True)
class MeasuredCollectives:
    """Samples by op and group."""

    samples: tuple[CollectiveSample, ...]
    _series: dict[tuple[str, int, int], _Series] = field(default_factory=dict)
    _issue_s: dict[str, float] = field(default_factory=dict)

    def __init__(self, samples: Iterable[CollectiveSample]) -> None:
        self.samples = tuple(samples)
        grouped: dict[tuple[str, int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._issue_s = _issue_times(self.samples)
        for sample in self.samples:
            device = device_time_s(sample.time_s, LaunchMode(sample.launch), issue_s=self.issue_s(sample.op))
            if device is not None:
                grouped[sample.op, sample.ranks, sample.nodes][sample.nbytes].append(device)
        self._series = {
            key: _Series(
                np.array(sorted(by_size), dtype=np.float64),
                np.array([float(np.median(by_size[size])) for size in sorted(by_size)]),
            )
            for key, by_size in grouped.items()
        }

    def issue_s(self, op: str) -> float:
        """Return the host's time to issue an eager call of `op`, as far as the samples show it."""
        return self._issue_s.get(op, EAGER_ISSUE_S)

    def blend(
        self, op: str, sizes: Floats, shape: GroupShape, model: Model, ratios: Ratios | None = None
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Return (seconds, mask of those from samples of this op and group).

        `ratios` caches measured over modelled times of `model`.
        """
        ratios = {} if ratios is None else ratios
        base = model(op, sizes, shape)
        own = self._series.get((op, shape.ranks, shape.nodes))
        if own is not None:
            times = np.clip(
                base * np.exp(self._interpolate(op, own, sizes, shape, model, ratios)), *_neighbours(own, sizes)
            )
            reach = (sizes >= own.sizes[0] / REACH_BYTES) & (sizes <= own.sizes[-1] * REACH_BYTES)
            return np.asarray(times), reach
        correction = np.zeros_like(sizes)
        weight = 0.0
        for (other_op, ranks, nodes), series in self._series.items():
            if nodes != shape.nodes or (ranks != shape.ranks and shape.nodes > 1):
                continue
            steps = abs(math.log2(ranks / shape.ranks)) + (other_op != op)
            other = GroupShape(ranks=ranks, ranks_per_node=-(-ranks // nodes))
            share = 0.5**steps
            correction += share * share * self._interpolate(other_op, series, sizes, other, model, ratios)
            weight += share
        if weight:
            correction /= weight
        return np.asarray(base * np.exp(correction)), np.zeros(sizes.shape, dtype=bool)

    @staticmethod
    def _interpolate(
        op: str, series: _Series, sizes: Floats, shape: GroupShape, model: Model, ratios: Ratios
    ) -> Floats:
        """Return log(measured / model) at `sizes`, linear in log size, fading beyond the ends."""
        key = (op, shape)
        if key not in ratios:
            logs = np.log(series.times / model(op, series.sizes, shape))
            power = float(np.mean(logs**2))
            # Differences within the noise are not corrected.
            ratios[key] = logs * power / (power + NOISE**2)
        inside = np.interp(np.log(np.maximum(sizes, 1.0)), np.log(series.sizes), ratios[key])
        beyond = np.maximum(np.maximum(series.sizes[0] / np.maximum(sizes, 1.0), sizes / series.sizes[-1]), 1.0)
        return np.asarray(inside * 0.5 ** (np.log(beyond) / np.log(FADE)), dtype=np.float64)


def _issue_times(samples: tuple[CollectiveSample, ...]) -> dict[str, float]:
    """Return the host's time per eager call, by op: the time of eager calls where the device's time is well below it.

    Only sizes measured both eagerly and without the host separate the two.
    """
    alone = {(s.op, s.ranks, s.nodes, s.nbytes): s.time_s for s in samples if s.launch in DEVICE_ALONE}
    hosts: dict[str, list[float]] = defaultdict(list)
    for s in samples:
        device = alone.get((s.op, s.ranks, s.nodes, s.nbytes))
        if s.launch == LaunchMode.EAGER and device is not None and s.time_s > 1.3 * device:
            hosts[s.op].append(s.time_s)
    return {op: float(np.median(times)) for op, times in hosts.items()}


def _neighbours(series: _Series, sizes: Floats) -> tuple[Floats, Floats]:
    """Return the least and greatest time between measured neighbours (no limit beyond the ends)."""
    at = np.searchsorted(series.sizes, sizes, side="right")
    below = np.where(at > 0, series.times[np.maximum(at - 1, 0)], 0.0)
    above = np.where(at < len(series.sizes), series.times[np.minimum(at, len(series.times) - 1)], np.inf)
    exact = (at > 0) & (series.sizes[np.maximum(at - 1, 0)] == sizes)
    above = np.where(exact, below, above)
    return np.minimum(below, above), np.maximum(below, above)
