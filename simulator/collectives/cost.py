"""What a collective costs on the machine: which algorithm runs, on how many SMs, for how long, and how sure we are.

Sizes are nccl-tests' size column: the input of an all-reduce, broadcast, all-to-all or send; the output of an
all-gather; the input of a reduce-scatter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator.collectives.algorithms import CUSTOM_ALGORITHMS, NCCL_ALGORITHMS, Options, evaluate
from simulator.collectives.channels import channel_count, held_sms
from simulator.collectives.communicator import Communicator, Fabric, communicator
from simulator.collectives.curves import Floats
from simulator.collectives.launch_mode import EAGER_ISSUE_S, LaunchMode, launched
from simulator.collectives.measured import SPREAD as SPREAD_MEASURED
from simulator.collectives.measured import MeasuredCollectives, Ratios
from simulator.collectives.pushed import COPY_SLOWDOWN, PUSHED, pushed_s
from simulator.collectives.traffic import port_share
from simulator.config.estimate import Interval
from topology.cluster import Cluster, Source
from topology.errors import BadInput, Infeasible
from topology.rates.groups import GroupRates, GroupShape, group_rates
from topology.rates.node_rates import node_rates

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
ALGORITHMS = NCCL_ALGORITHMS + CUSTOM_ALGORITHMS

# Relative half-width of the 80 % interval where no fit covers the machine: it contains 80 % of the points of published
# tables, every machine having the same weight (examples/validation/collectives.md, Ranges).
SPREAD_BEYOND_FIT = 0.31  # NVLink with more ranks than the fitted tables, or a generation without a table
SPREAD_NETWORK = 0.35
SPREAD_CUSTOM = 0.37  # kernels outside NCCL: one machine
SPREAD_FLAT = 0.28  # PCIe and xGMI: the worst machine's error; efficiencies come from the others' peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """One collective, costed. `channels` is NCCL's count; `sms` is `held_sms`, the SMs it takes from other kernels."""

    algorithm: str
    protocol: str
    channels: int
    sms: float
    time_s: Interval


def _crossings(op: str, nodes: int) -> float:
    """Return how often the longest chain of ranks crosses between nodes: up and down a tree, or around a ring."""
    if nodes <= 1:
        return 0.0
    return 1.0 if op == "send_recv" else min(float(nodes), 2.0 * math.ceil(math.log2(nodes)))


@dataclass(slots=True)
class CollectiveModel:
    """Times of collectives on one cluster, measured where there are samples.

    `crossing_s` is added for every crossing of a chain of ranks from one node to another; `network_factor` multiplies
    the modelled times of collectives between nodes. Both come from measured runs.
    """

    cluster: Cluster
    measured: MeasuredCollectives | None = None
    crossing_s: float = 0.0
    network_factor: float = 1.0
    _rates: dict[GroupShape, GroupRates] = field(default_factory=dict)
    _pairs: dict[GroupShape, float] = field(default_factory=dict)
    _communicators: dict[GroupShape, Communicator] = field(default_factory=dict)
    _ratios: Ratios = field(default_factory=dict)
    _times: dict[tuple[str, GroupShape, str | None], dict[float, float]] = field(default_factory=dict, init=False)
    _loads: dict[tuple[str, GroupShape], dict[float, tuple[float, float]]] = field(default_factory=dict, init=False)

    def rates(self, shape: GroupShape) -> GroupRates:
        if shape not in self._rates:
            self._rates[shape] = group_rates(self.cluster, shape)
        return self._rates[shape]

    def communicator(self, shape: GroupShape) -> Communicator:
        if shape not in self._communicators:
            self._communicators[shape] = communicator(self.cluster, shape)
        return self._communicators[shape]

    def time_s(
        self,
        op: str,
        nbytes: ArrayLike,
        shape: GroupShape,
        *,
        launch: LaunchMode = LaunchMode.QUEUED,
        int8: bool = False,
        algorithm: str | None = None,
    ) -> Floats:
        """Return seconds for `op` of `nbytes` in a group of `shape`, same shape as `nbytes`. Zero for a group of one.

        `int8` is a reduction of 1-byte integers, which NVLS cannot do. `algorithm` forces one of ALGORITHMS; where
        it cannot do `op` on this machine the time is infinite.
        """
        size, op = np.asarray(nbytes, dtype=np.float64), self.run_as(op, shape)
        if shape.ranks <= 1:
            return np.zeros_like(size)
        flat = np.atleast_1d(size).ravel()
        if self.measured is not None and algorithm is None and op not in PUSHED:
            device, _ = self._blended(self.measured, op, flat, shape, int8=int8)
        else:
            device = self._options(op, flat, shape, int8=int8, algorithm=algorithm).time_s
        return self._seconds(op, device, shape, launch).reshape(size.shape)

    def _seconds(self, op: str, device_s: Floats, shape: GroupShape, launch: LaunchMode) -> Floats:
        if shape.nodes > 1:
            device_s = self.network_factor * device_s + self.crossing_s * _crossings(op, shape.nodes)
        return np.asarray(self._launched(op, device_s, launch), dtype=np.float64)

    def times_s(self, op: str, sizes: Floats, shape: GroupShape, *, algorithm: str | None = None) -> Floats:
        """Return `time_s` of sizes in one row; each size is cached."""
        known = self._times.setdefault((op, shape, algorithm), {})
        asked = sizes.tolist()
        if missing := [nbytes for nbytes in dict.fromkeys(asked) if nbytes not in known]:
            found = self.time_s(op, missing, shape, algorithm=algorithm)
            known.update(zip(missing, found.tolist(), strict=True))
        return np.array([known[nbytes] for nbytes in asked])

    def choose(
        self,
        op: str,
        nbytes: float,
        shape: GroupShape,
        *,
        launch: LaunchMode = LaunchMode.QUEUED,
        int8: bool = False,
        algorithm: str | None = None,
    ) -> CollectiveCost:
        """Return how `op` of `nbytes` runs and what it costs. Raises Infeasible if `algorithm` cannot do it here."""
        return self.choose_many(op, [nbytes], shape, launch=launch, int8=int8, algorithm=algorithm)[0]

    def choose_many(
        self,
        op: str,
        nbytes: ArrayLike,
        shape: GroupShape,
        *,
        launch: LaunchMode = LaunchMode.QUEUED,
        int8: bool = False,
        algorithm: str | None = None,
    ) -> tuple[CollectiveCost, ...]:
        """Return `choose` for every size."""
        sizes, op = np.atleast_1d(np.asarray(nbytes, dtype=np.float64)).ravel(), self.run_as(op, shape)
        if shape.ranks <= 1:
            nothing = Interval(value=0.0, low=0.0, high=0.0, source=Source.DATASHEET)
            return tuple(
                CollectiveCost(algorithm="none", protocol="none", channels=0, sms=0, time_s=nothing) for _ in sizes
            )
        options = self._options(op, sizes, shape, int8=int8, algorithm=algorithm)
        device = options.time_s
        if not np.all(np.isfinite(device)):
            raise Infeasible(
                f"{op} cannot run by {algorithm or 'any algorithm'} on {shape.ranks} ranks of {shape.nodes} nodes",
                why="nothing joins them" if algorithm is None else "the op or the fabric does not allow it",
                remedy="add a network to the cluster" if algorithm is None else "leave the algorithm open",
            )
        comm = self.communicator(shape)
        spread, source = interval_width(comm, custom=algorithm in CUSTOM_ALGORITHMS or op in PUSHED)
        spreads = np.full_like(device, spread)
        sources = [source] * len(sizes)
        if self.measured is not None and algorithm is None and op not in PUSHED:
            device, known = self._blended(self.measured, op, sizes, shape, int8=int8)
            spreads = np.where(known, SPREAD_MEASURED, spreads)
            sources = [Source.MEASURED if k else source for k in known]
        total = self._launched(op, device, launch)
        costs = []
        for size, value, width, origin, pick in zip(sizes, total, spreads, sources, options.pick, strict=True):
            name, protocol = options.names[pick]
            channels = channel_count(comm, op, name, protocol, float(size))
            interval = Interval(
                value=float(value), low=float(value / (1 + width)), high=float(value * (1 + width)), source=origin
            )
            costs.append(CollectiveCost(algorithm=name, protocol=protocol, channels=channels, sms=0.0, time_s=interval))
        held = self._held(op, sizes, shape, options, int8=int8, algorithm=algorithm)
        return tuple(replace(cost, sms=float(sms)) for cost, sms in zip(costs, held, strict=True))

    def loads(self, op: str, sizes: Floats, shape: GroupShape) -> Floats:
        """Return (SMs that `op` holds, bytes that it sends through the port of a rank), shape (2, sizes), as
        `choose_many` runs it; sizes in one row, each of which is cached. Zero where the ranks are not connected.
        """
        op = self.run_as(op, shape)
        known = self._loads.setdefault((op, shape), {})
        asked = sizes.tolist()
        if missing := [nbytes for nbytes in dict.fromkeys(asked) if nbytes not in known]:
            some = np.array(missing)
            options = self._options(op, some, shape, int8=False, algorithm=None)
            if not np.isfinite(options.time_s[0]):
                return np.zeros((2, len(asked)))
            if self.measured is None or op in PUSHED:  # then these are also the times
                seconds = self._seconds(op, options.time_s, shape, LaunchMode.QUEUED).tolist()
                self._times.setdefault((op, shape, None), {}).update(zip(missing, seconds, strict=True))
            held = self._held(op, some, shape, options).tolist()
            shares = [port_share(op, options.names[pick][0], shape) for pick in options.pick]
            for nbytes, sms, share in zip(missing, held, shares, strict=True):
                known[nbytes] = sms, nbytes * share
        return np.array([known[nbytes] for nbytes in asked], dtype=np.float64).reshape(-1, 2).T

    def _launched(self, op: str, device_s: Floats, launch: LaunchMode) -> Floats:
        issue_s = self.measured.issue_s(op) if self.measured is not None else EAGER_ISSUE_S
        return launched(device_s, launch, issue_s=issue_s)

    def _blended(
        self, measured: MeasuredCollectives, op: str, sizes: Floats, shape: GroupShape, *, int8: bool
    ) -> tuple[Floats, NDArray[np.bool_]]:
        def model(name: str, at: Floats, group: GroupShape) -> Floats:
            return self._options(name, at, group, int8=int8, algorithm=None).time_s

        return measured.blend(op, sizes, shape, model, self._ratios)

    def run_as(self, op: str, shape: GroupShape) -> str:
        """Return what runs for `op`: of FSDP's exchanges by copy engines, NCCL's where NVLink does not join all
        ranks.
        """
        return PUSHED[op] if op in PUSHED and not self._pair_bytes_per_s(shape) else op

    def _pair_bytes_per_s(self, shape: GroupShape) -> float:
        """Return the NVLink rate of the slowest pair of ranks in a group, 0 where a pair has none."""
        if shape not in self._pairs:
            gpus = self.rates(shape).gpus if shape.nodes == 1 else ()
            rates, pairs = node_rates(self.cluster), combinations(gpus, 2)
            self._pairs[shape] = min((rates.nvlink(a, b)[0] for a, b in pairs), default=0.0)
        return self._pairs[shape]

    def _held(
        self,
        op: str,
        sizes: Floats,
        shape: GroupShape,
        options: Options,
        *,
        int8: bool = False,
        algorithm: str | None = None,
    ) -> Floats:
        """Return the SMs that kernels alongside lose."""
        if op in PUSHED:
            return np.full_like(sizes, COPY_SLOWDOWN * self.cluster.slowest_kind.sm_count)
        return held_sms(self.communicator(shape), op, sizes, options, int8=int8, algorithm=algorithm)

    def _options(self, op: str, sizes: Floats, shape: GroupShape, *, int8: bool, algorithm: str | None) -> Options:
        if op in PUSHED:
            seconds = pushed_s(sizes, ranks=shape.ranks, pair_bytes_per_s=self._pair_bytes_per_s(shape))
            return Options((("copy_engine", "Simple"),), seconds, np.zeros(len(sizes), dtype=np.intp))
        if op not in OPS:
            raise BadInput(f"unknown collective {op!r}", remedy=f"use one of {', '.join(OPS)}")
        if algorithm is not None and algorithm not in ALGORITHMS:
            raise BadInput(f"unknown algorithm {algorithm!r}", remedy=f"use one of {', '.join(ALGORITHMS)}")
        return evaluate(self.communicator(shape), op, sizes, int8=int8, algorithm=algorithm)


def interval_width(comm: Communicator, *, custom: bool = False) -> tuple[float, Source]:
    """Return the relative half-width of the 80 % interval, and the value's source."""
    if custom:
        return SPREAD_CUSTOM, Source.DATASHEET
    if comm.nodes > 1:
        return SPREAD_NETWORK, Source.DATASHEET
    if comm.fabric is not Fabric.NVLINK or comm.generation is None:
        return SPREAD_FLAT, Source.DATASHEET
    if comm.ranks > comm.generation.fitted_ranks or comm.compute_capability < 80:
        return SPREAD_BEYOND_FIT, Source.FITTED
    return comm.generation.spread, Source.FITTED
