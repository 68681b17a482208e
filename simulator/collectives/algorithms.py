"""Which algorithm and protocol runs a collective, and for how long on the device.

Physics and choice are separate. `simulator.collectives.times` says how long a given algorithm and protocol takes; which
one runs is NCCL's decision, so inside a node, and between tree and ring over several, we ask NCCL's own formulas
(`nccl_model`), mistakes included: where NCCL changes protocol too early, both tables and predictions show a jump.
All-to-all and send/recv, which NCCL does not tune, and the rest over several nodes, where its predictions are far off,
are costed as the fastest candidate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simulator.collectives import nccl_model
from simulator.collectives.communicator import Communicator, Fabric, on_fitted_links, on_slower_ports
from simulator.collectives.curves import Floats
from simulator.collectives.nccl_model import NcclMachine
from simulator.collectives.times import custom_s, multi_node_s, peer_to_peer_s, single_node_s

NCCL_ALGORITHMS = ("ring", "tree", "nvls", "nvls_tree", "pat")
CUSTOM_ALGORITHMS = ("one_shot", "two_shot", "copy_engine")


@dataclass(frozen=True, slots=True)
class Options:
    """One (op, shape) costed at sizes: device seconds, and which (algorithm, protocol) runs."""

    names: tuple[tuple[str, str], ...]
    time_s: Floats
    pick: NDArray[np.intp]


def evaluate(comm: Communicator, op: str, sizes: Floats, *, int8: bool, algorithm: str | None) -> Options:
    """Cost `op` at every size: as NCCL chooses on one NVLink node, else as the fastest candidate."""
    if algorithm in CUSTOM_ALGORITHMS:
        return _fastest({(algorithm, "Simple"): custom_s(comm, op, algorithm, sizes)})
    if op in {"all_to_all", "send_recv"}:
        possible = algorithm in {None, "ring"}
        times = peer_to_peer_s(comm, op, sizes) if possible else np.full_like(sizes, np.inf)
        return _fastest({("p2p", "Simple"): times})
    if comm.nodes > 1:
        candidates = multi_node_s(comm, op, sizes)
        if algorithm is None and op == "all_reduce" and ("tree", "Simple") in candidates:
            return _tree_or_ring_on_any_slower_ports(comm, sizes)
    elif comm.fabric is Fabric.NVLINK and algorithm is None:
        chosen = _as_nccl_chooses(comm, op, sizes, int8=int8)
        if (fitted := on_fitted_links(comm)) is None:
            return chosen
        # With link rates other than the fitted ones, NCCL's choice may be slower on faster links.
        known = _as_nccl_chooses(fitted, op, sizes, int8=int8)
        return _better(chosen, known, faster=fitted.link_bytes_per_s < comm.link_bytes_per_s)
    else:
        pairs = [("ring", p) for p in nccl_model.PROTOCOLS] + [("tree", "LL"), ("nvls", "Simple")]
        candidates = {(a, p): single_node_s(comm, op, a, p, sizes, int8=int8) for a, p in pairs}
    if algorithm is not None:
        candidates = {name: times for name, times in candidates.items() if name[0] == algorithm}
        candidates = candidates or {(algorithm, "Simple"): np.full_like(sizes, np.inf)}
    return _fastest(candidates)


def _fastest(candidates: dict[tuple[str, str], Floats]) -> Options:
    table = np.stack(list(candidates.values()))
    return Options(tuple(candidates), np.asarray(table.min(axis=0)), np.argmin(table, axis=0))


def _better(options: Options, others: Options, *, faster: bool) -> Options:
    """Return the faster of two choices at every size; the slower one unless `faster`."""
    first = (options.time_s <= others.time_s) == faster
    pick = np.where(first, options.pick, others.pick + len(options.names))
    return Options((*options.names, *others.names), np.where(first, options.time_s, others.time_s), pick)


def _as_nccl_chooses(comm: Communicator, op: str, sizes: Floats, *, int8: bool) -> Options:
    """Cost what NCCL's formulas pick. A pair without a curve is costed as the ring in Simple."""
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
    return Options(names, _no_more_than_behind(times, piece), pick)


def _tree_or_ring(comm: Communicator, sizes: Floats) -> Options:
    """Cost an all-reduce between nodes without NVLS: NCCL's formulas change from tree to ring for large messages,
    although on a few nodes the tree sends less. For small messages the faster of the low-latency protocols runs.

    Our costs of the two need not meet where NCCL changes, so no message takes longer than parts that the tree sends.
    """
    starts, chosen, lines = nccl_model.switches(comm.nccl, "all_reduce", allow_nvls=False)
    ring = np.array([line.algorithm == "ring" for line in lines])
    piece = np.searchsorted(starts, sizes, side="right") - 1
    at = np.concatenate([sizes, starts])
    candidates = multi_node_s(comm, "all_reduce", at)
    rings = ring[np.concatenate([chosen[piece], chosen])]
    trees = np.flatnonzero(~ring[chosen])
    if len(trees) and trees[-1] + 1 < len(starts):
        parts = np.maximum(np.ceil(at / starts[trees[-1] + 1]), 1.0)
        in_parts = parts * multi_node_s(comm, "all_reduce", at / parts)["tree", "Simple"]
        candidates["ring", "Simple"] = np.minimum(candidates["ring", "Simple"], in_parts)
    candidates["ring", "Simple"] = np.where(rings, candidates["ring", "Simple"], np.inf)
    candidates["tree", "Simple"] = np.where(rings, np.inf, candidates["tree", "Simple"])
    fastest = _fastest(candidates)
    return replace(fastest, time_s=_no_more_than_behind(fastest.time_s, piece), pick=fastest.pick[: len(sizes)])


def _tree_or_ring_on_any_slower_ports(comm: Communicator, sizes: Floats) -> Options:
    """Cost an all-reduce between nodes without NVLS so that no faster network makes it slower.

    On faster ports NCCL may change from tree to ring at smaller sizes, where the tree over slower ports is still faster
    (examples/validation/monotone.md); then the time over slower ports is the bound. Where NCCL runs the faster of the
    two no bound is needed, since neither is slower over faster ports.
    """
    options = _tree_or_ring(comm, sizes)
    late = options.time_s > np.min(list(multi_node_s(comm, "all_reduce", sizes).values()), axis=0) * (1 + 1e-9)
    for nccl, tree_until, ring_until in _machines_that_switch_otherwise(comm.nccl) if late.any() else ():
        until = {("tree", "Simple"): ring_until, ("ring", "Simple"): math.inf}  # in parts, by a tree over those ports
        other = np.array([until.get(name, max(tree_until, ring_until)) for name in options.names])[options.pick]
        if (here := late & (sizes < other)).any():
            slower = _tree_or_ring(on_slower_ports(comm, nccl.nic / comm.nccl.nic), sizes[here])
            options.time_s[here] = np.minimum(options.time_s[here], slower.time_s)
    return options


@lru_cache(maxsize=256)
def _machines_that_switch_otherwise(nccl: NcclMachine) -> tuple[tuple[NcclMachine, float, float], ...]:
    """Return the machines with slower networks on which NCCL changes between tree and ring at other sizes than on every
    faster one; each with the sizes at which it stops using the tree and the ring.
    """
    machines = [replace(nccl, nic=rate) for rate in (*nccl_model.network_rates(nccl), nccl.nic)]
    fastest = {nccl_model.ring_graph(slower): slower for slower in machines}  # of machines with the same channels
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
    """Return the times of messages, changed so that they never decrease with size; `piece` is the index of NCCL's
    choice for each message.

    `times` ends with the time of each piece's first size. The curves of two algorithms need not meet where NCCL changes
    from one to the other. More bytes never take less time, so no message takes longer than the first of a later piece.
    """
    count = len(piece)
    behind = np.minimum.accumulate(times[count:][::-1])[::-1]
    return np.asarray(np.minimum(times[:count], np.append(behind[1:], np.inf)[piece]))
