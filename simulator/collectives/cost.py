"""What a collective costs on the machine: which algorithm runs, on how many SMs, for how long, and how sure we are.

Physics and choice are separate. `collective_curves` says how long a given algorithm and protocol takes; which one runs
is NCCL's decision, so inside a node, and between tree and ring over several, we ask NCCL's own formulas (`nccl_model`),
with their mistakes: a protocol left too early shows as a jump in the tables and in the prediction. All-to-all and
send/recv, which NCCL does not tune, and the rest over several nodes, where its predictions are far off, are costed by
what is fastest.

Sizes are nccl-tests' size column: the input of an all-reduce, broadcast, all-to-all or send; the output of an
all-gather; the input of a reduce-scatter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator.collectives import nccl_model
from simulator.collectives.channels import channel_count
from simulator.collectives.communicator import Communicator, Fabric, communicator, on_fitted_links, on_slower_ports
from simulator.collectives.curves import Floats
from simulator.collectives.launch_mode import EAGER_ISSUE_S, LaunchMode, launched
from simulator.collectives.measured import SPREAD as SPREAD_MEASURED
from simulator.collectives.measured import MeasuredCollectives, Ratios
from simulator.collectives.nccl_model import NcclMachine
from simulator.collectives.times import custom_s, multi_node_s, peer_to_peer_s, single_node_s
from simulator.collectives.traffic import port_share
from simulator.config.estimate import Interval
from topology.cluster import Cluster, Source
from topology.errors import BadInput, Infeasible
from topology.rates.groups import GroupRates, GroupShape, group_rates

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
NCCL_ALGORITHMS = ("ring", "tree", "nvls", "nvls_tree", "pat")
CUSTOM_ALGORITHMS = ("one_shot", "two_shot", "copy_engine")
ALGORITHMS = NCCL_ALGORITHMS + CUSTOM_ALGORITHMS


# Half-width of the 80 % interval, relative, where no fit covers the machine: what holds 80 % of the points of published
# tables, each machine counted once (examples/validation/collectives.md, Ranges).
SPREAD_BEYOND_FIT = 0.31  # NVLink with more ranks than the tables fitted, or a generation without a table
SPREAD_NETWORK = 0.35
SPREAD_CUSTOM = 0.37  # kernels outside NCCL: one machine
SPREAD_FLAT = 0.28  # PCIe and xGMI: of the worst machine, since efficiencies were read off the others' peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """One collective, costed. `channels` is NCCL's count; `sms` what it takes from other kernels (`held_sms`)."""

    algorithm: str
    protocol: str
    channels: int
    sms: float
    time_s: Interval


@dataclass(frozen=True, slots=True)
class _Options:
    """One (op, shape) costed at sizes: device seconds, and which (algorithm, protocol) runs."""

    names: tuple[tuple[str, str], ...]
    time_s: Floats
    pick: NDArray[np.intp]


def _crossings(op: str, nodes: int) -> float:
    """Return how often the longest chain of an operation crosses between nodes: a tree's both ways, else a ring's."""
    if nodes <= 1:
        return 0.0
    return 1.0 if op == "send_recv" else min(float(nodes), 2.0 * math.ceil(math.log2(nodes)))


@dataclass(slots=True)
class CollectiveModel:
    """Times of collectives on one cluster; measured samples, where there are any, go before the model.

    `crossing_s`: what runs showed beyond that for every time that a chain of ranks crosses from one node to another;
    `network_factor`: how many times as long as modelled what runs between nodes takes.
    """

    cluster: Cluster
    measured: MeasuredCollectives | None = None
    crossing_s: float = 0.0
    network_factor: float = 1.0
    _rates: dict[GroupShape, GroupRates] = field(default_factory=dict)
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
        size = np.asarray(nbytes, dtype=np.float64)
        if shape.ranks <= 1:
            return np.zeros_like(size)
        flat = np.atleast_1d(size).ravel()
        if self.measured is not None and algorithm is None:
            device, _ = self._blended(self.measured, op, flat, shape, int8=int8)
        else:
            device = self._options(op, flat, shape, int8=int8, algorithm=algorithm).time_s
        if shape.nodes > 1:
            device = self.network_factor * device + self.crossing_s * _crossings(op, shape.nodes)
        return np.asarray(self._launched(op, device, launch), dtype=np.float64).reshape(size.shape)

    def times_s(self, op: str, sizes: Floats, shape: GroupShape, *, algorithm: str | None = None) -> Floats:
        """Return `time_s` of sizes in one row, each of which is found once."""
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
        sizes = np.atleast_1d(np.asarray(nbytes, dtype=np.float64)).ravel()
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
        spread, source = interval_width(comm, custom=algorithm in CUSTOM_ALGORITHMS)
        spreads = np.full_like(device, spread)
        sources = [source] * len(sizes)
        if self.measured is not None and algorithm is None:
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
        held = held_sms(comm, op, sizes, options, int8=int8, algorithm=algorithm)
        return tuple(replace(cost, sms=float(sms)) for cost, sms in zip(costs, held, strict=True))

    def loads(self, op: str, sizes: Floats, shape: GroupShape) -> Floats:
        """Return (SMs that `op` holds, bytes that it sends through the port of a rank), shape (2, sizes), as
        `choose_many` runs it; sizes in one row, each of which is found once. Nothing where nothing joins the ranks.
        """
        known = self._loads.setdefault((op, shape), {})
        asked = sizes.tolist()
        if missing := [nbytes for nbytes in dict.fromkeys(asked) if nbytes not in known]:
            if not np.isfinite(self.times_s(op, np.array(missing[:1]), shape)[0]):
                return np.zeros((2, len(asked)))
            some, comm = np.array(missing), self.communicator(shape)
            options = self._options(op, some, shape, int8=False, algorithm=None)
            held = held_sms(comm, op, some, options).tolist()
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

    def _options(self, op: str, sizes: Floats, shape: GroupShape, *, int8: bool, algorithm: str | None) -> _Options:
        if op not in OPS:
            raise BadInput(f"unknown collective {op!r}", remedy=f"use one of {', '.join(OPS)}")
        if algorithm is not None and algorithm not in ALGORITHMS:
            raise BadInput(f"unknown algorithm {algorithm!r}", remedy=f"use one of {', '.join(ALGORITHMS)}")
        return _evaluate(self.communicator(shape), op, sizes, int8=int8, algorithm=algorithm)


def held_sms(
    comm: Communicator,
    op: str,
    sizes: Floats,
    options: _Options,
    *,
    int8: bool = False,
    algorithm: str | None = None,
) -> Floats:
    """Return the SMs that a collective takes from other kernels while it lasts: one for each channel, and no more
    SM seconds than over slower links.

    NCCL doubles its channels where links pass a rate (`nccl_model._duplicate`), and then holds twice the SMs for hardly
    less time. Who wants the SMs can say `NCCL_MAX_CTAS`, so faster links cost kernels no more than slower ones.
    """
    held = _channels(comm, op, sizes, options)
    if op in {"all_to_all", "send_recv"}:
        return held
    held = _on_any_slower_ports(held, comm, op, sizes, options, int8=int8, algorithm=algorithm)
    if (fitted := on_fitted_links(comm)) is not None:
        there = _evaluate(fitted, op, sizes, int8=int8, algorithm=algorithm)
        known = _channels(fitted, op, sizes, there)
        known = _on_any_slower_ports(known, fitted, op, sizes, there, int8=int8, algorithm=algorithm)
        faster = fitted.link_bytes_per_s < comm.link_bytes_per_s
        held = (np.fmin if faster else np.fmax)(held, _for_as_long(known, there, options))
    return held


def _on_any_slower_ports(
    held: Floats, comm: Communicator, op: str, sizes: Floats, options: _Options, *, int8: bool, algorithm: str | None
) -> Floats:
    """Return the SMs, but for no more SM seconds than over a slower network."""
    for nccl in _machines_with_fewer_channels(comm.nccl):
        slower = on_slower_ports(comm, nccl.nic / comm.nccl.nic)
        there = _evaluate(slower, op, sizes, int8=int8, algorithm=algorithm)
        held = np.fmin(held, _for_as_long(_channels(slower, op, sizes, there), there, options))
    return held


def _for_as_long(held: Floats, there: _Options, here: _Options) -> Floats:
    """Return the SMs that take as many SM seconds in the times of `here` as `held` ones in those of `there`."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(held * there.time_s / here.time_s)


def _channels(comm: Communicator, op: str, sizes: Floats, options: _Options) -> Floats:
    """Return the SMs of each size: one a channel, none for copy engines."""
    names = [options.names[pick] for pick in options.pick]
    counts = [
        0 if name == "copy_engine" else channel_count(comm, op, name, protocol, float(size))
        for size, (name, protocol) in zip(sizes, names, strict=True)
    ]
    return np.array(counts, dtype=np.float64)


@lru_cache(maxsize=256)
def _machines_with_fewer_channels(nccl: NcclMachine) -> tuple[NcclMachine, ...]:
    """Return the machines with slower networks on which NCCL finds fewer ring channels than on any that is faster."""
    fewest, found = nccl_model.ring_graph(nccl).channels, []
    for rate in reversed(nccl_model.network_rates(nccl)):
        slower = replace(nccl, nic=rate)
        if (channels := nccl_model.ring_graph(slower).channels) < fewest:
            fewest = channels
            found.append(slower)
    return tuple(found)


def interval_width(comm: Communicator, *, custom: bool = False) -> tuple[float, Source]:
    """Return the relative half-width of the 80 % interval and what the value rests on."""
    if custom:
        return SPREAD_CUSTOM, Source.DATASHEET
    if comm.nodes > 1:
        return SPREAD_NETWORK, Source.DATASHEET
    if comm.fabric is not Fabric.NVLINK or comm.generation is None:
        return SPREAD_FLAT, Source.DATASHEET
    if comm.ranks > comm.generation.fitted_ranks or comm.compute_capability < 80:
        return SPREAD_BEYOND_FIT, Source.FITTED
    return comm.generation.spread, Source.FITTED


def _evaluate(comm: Communicator, op: str, sizes: Floats, *, int8: bool, algorithm: str | None) -> _Options:
    """Cost `op` at every size: by NCCL's choice on one NVLink node, else by the fastest candidate."""
    if algorithm in CUSTOM_ALGORITHMS:
        return _fastest({(algorithm, "Simple"): custom_s(comm, op, algorithm, sizes)})
    if op in {"all_to_all", "send_recv"}:
        possible = algorithm in {None, "ring"}
        times = peer_to_peer_s(comm, op, sizes) if possible else np.full_like(sizes, np.inf)
        return _fastest({("p2p", "Simple"): times})
    if comm.nodes > 1:
        candidates = multi_node_s(comm, op, sizes)
        if algorithm is None and op == "all_reduce" and ("ring", "Simple") in candidates and len(candidates) > 1:
            return _tree_or_ring_on_any_slower_ports(comm, sizes)
    elif comm.fabric is Fabric.NVLINK and algorithm is None:
        chosen = _as_nccl_chooses(comm, op, sizes, int8=int8)
        if (fitted := on_fitted_links(comm)) is None:
            return chosen
        # What NCCL chooses on other links than these may be slower on faster ones.
        known = _as_nccl_chooses(fitted, op, sizes, int8=int8)
        return _better(chosen, known, faster=fitted.link_bytes_per_s < comm.link_bytes_per_s)
    else:
        pairs = [("ring", p) for p in nccl_model.PROTOCOLS] + [("tree", "LL"), ("nvls", "Simple")]
        candidates = {(a, p): single_node_s(comm, op, a, p, sizes, int8=int8) for a, p in pairs}
    if algorithm is not None:
        candidates = {name: times for name, times in candidates.items() if name[0] == algorithm}
        candidates = candidates or {(algorithm, "Simple"): np.full_like(sizes, np.inf)}
    return _fastest(candidates)


def _fastest(candidates: dict[tuple[str, str], Floats]) -> _Options:
    table = np.stack(list(candidates.values()))
    return _Options(tuple(candidates), np.asarray(table.min(axis=0)), np.argmin(table, axis=0))


def _better(options: _Options, others: _Options, *, faster: bool) -> _Options:
    """Return the faster of two choices at every size, or the slower."""
    first = (options.time_s <= others.time_s) == faster
    pick = np.where(first, options.pick, others.pick + len(options.names))
    return _Options((*options.names, *others.names), np.where(first, options.time_s, others.time_s), pick)


def _as_nccl_chooses(comm: Communicator, op: str, sizes: Floats, *, int8: bool) -> _Options:
    """Cost what NCCL's formulas pick. A pair our curves do not cover is costed as the ring in Simple."""
    starts, chosen, lines = nccl_model.switches(comm.nccl, op, allow_nvls=not int8)
    names = tuple((line.algorithm, line.protocol) for line in lines)
    piece = np.searchsorted(starts, sizes, side="right") - 1
    pick = chosen[piece]
    at, rows = np.concatenate([sizes, starts]), np.concatenate([pick, chosen])
    times = np.empty_like(at)
    for row in set(rows.tolist()):
        here = rows == row
        algorithm, protocol = names[row]
        found = single_node_s(comm, op, algorithm, protocol, at[here], int8=int8)
        if not np.all(np.isfinite(found)):
            found = single_node_s(comm, op, "ring", "Simple", at[here], int8=int8)
        times[here] = found
    return _Options(names, _no_more_than_behind(times, piece), pick)


def _tree_or_ring(comm: Communicator, sizes: Floats) -> _Options:
    """Cost an all-reduce between nodes without NVLS: NCCL's formulas leave the tree for the ring where bandwidth
    counts, though on a few nodes the tree sends less. Low latency protocols cost the same either way here.
    """
    starts, chosen, lines = nccl_model.switches(comm.nccl, "all_reduce", allow_nvls=False)
    ring = np.array([line.algorithm == "ring" for line in lines])
    piece = np.searchsorted(starts, sizes, side="right") - 1
    candidates = multi_node_s(comm, "all_reduce", np.concatenate([sizes, starts]))
    rings = ring[np.concatenate([chosen[piece], chosen])]
    bulk = np.where(rings, candidates["ring", "Simple"], candidates["tree", "Simple"])
    small = candidates["tree", "LL"]
    pick = np.where(small <= bulk, 0, np.where(rings, 1, 2))[: len(sizes)]
    times = _no_more_than_behind(np.minimum(small, bulk), piece)
    return _Options((("tree", "LL"), ("ring", "Simple"), ("tree", "Simple")), times, pick)


def _tree_or_ring_on_any_slower_ports(comm: Communicator, sizes: Floats) -> _Options:
    """Cost an all-reduce between nodes without NVLS so that no faster network makes it slower.

    On faster ports NCCL may leave the tree for the ring at smaller sizes, where the tree over slower ports is faster
    (examples/validation/monotone.md): that is then the bound. Where the faster of the two runs there is nothing to
    bound, since neither is slower over faster ports.
    """
    options = _tree_or_ring(comm, sizes)
    late = options.time_s > np.min(list(multi_node_s(comm, "all_reduce", sizes).values()), axis=0) * (1 + 1e-9)
    for nccl, tree_until, ring_until in _machines_that_switch_otherwise(comm.nccl) if late.any() else ():
        other = np.array([max(tree_until, ring_until), tree_until, ring_until])[options.pick]
        if (here := late & (sizes < other)).any():
            slower = _tree_or_ring(on_slower_ports(comm, nccl.nic / comm.nccl.nic), sizes[here])
            options.time_s[here] = np.minimum(options.time_s[here], slower.time_s)
    return options


@lru_cache(maxsize=256)
def _machines_that_switch_otherwise(nccl: NcclMachine) -> tuple[tuple[NcclMachine, float, float], ...]:
    """Return the machines with slower networks on which NCCL leaves the tree or the ring at other sizes than on any
    that is faster, each with the sizes from which on it does not run the tree, and the ring.
    """
    machines = [replace(nccl, nic=rate) for rate in (*nccl_model.network_rates(nccl), nccl.nic)]
    fastest = {nccl_model.ring_graph(slower): slower for slower in machines}  # of those with the same channels
    known, found = set[tuple[tuple[float, bool], ...]](), []
    for slower in sorted(fastest.values(), key=lambda one: -one.nic):
        starts, chosen, lines = nccl_model.switches(slower, "all_reduce", allow_nvls=False)
        rings = [lines[row].algorithm == "ring" for row in chosen]
        changes = [at for at in range(len(rings)) if at == 0 or rings[at] != rings[at - 1]]
        switched = tuple((float(starts[at]), rings[at]) for at in changes)
        if switched not in known:
            known.add(switched)
            last, ring = switched[-1]
            found.append((slower, *((last, math.inf) if ring else (math.inf, last))))
    return tuple(found[1:])


def _no_more_than_behind(times: Floats, piece: NDArray[np.intp]) -> Floats:
    """Return the times of messages, which lie in the pieces `piece` of NCCL's choices, made never to fall with the
    size.

    `times` ends with those of every piece's first size. The curves of two algorithms need not meet where NCCL changes
    from one to the other; more bytes never take less time, so no message takes longer than the first ones behind it.
    """
    count = len(piece)
    behind = np.minimum.accumulate(times[count:][::-1])[::-1]
    return np.asarray(np.minimum(times[:count], np.append(behind[1:], np.inf)[piece]))
