"""How many channels NCCL gives a collective, and how many SMs these take from other kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from simulator.collectives import nccl_model
from simulator.collectives.algorithms import Options, evaluate
from simulator.collectives.communicator import Communicator, on_fitted_links, on_slower_ports
from simulator.collectives.curves import P2P_CHANNELS, Floats, peer_channels
from simulator.collectives.nccl_model import NcclMachine

# Channels to one peer on another node where nChannelsPerNetPeer is not set (NCCL src/graph/paths.cc).
NET_PEER_CHANNELS = 2
# NCCL gives a channel this many bytes before it adds another: threads x threshold (enqueue.cc), per protocol.
_BYTES_PER_CHANNEL = {"LL": 512 * 8, "LL128": 640 * 8, "Simple": 512 * 64}
_NVLS_CHANNELS = {2: 16, 3: 24}  # by tuner generation: Hopper 16, Blackwell 24 (GB300 log of 2.29.7)


def held_sms(
    comm: Communicator,
    op: str,
    sizes: Floats,
    options: Options,
    *,
    int8: bool = False,
    algorithm: str | None = None,
) -> Floats:
    """Return the SMs that a collective takes from other kernels while it lasts: one for each channel, but never more SM
    seconds than over slower links.

    NCCL doubles its channels where links pass a rate (`nccl_model._duplicate`), and then holds twice the SMs for hardly
    less time. Users can limit that by `NCCL_MAX_CTAS`, so faster links cost kernels no more than slower ones here.
    """
    held = _channels(comm, op, sizes, options)
    if op in {"all_to_all", "send_recv"}:
        return held
    held = _on_any_slower_ports(held, comm, op, sizes, options, int8=int8, algorithm=algorithm)
    if (fitted := on_fitted_links(comm)) is not None:
        there = evaluate(fitted, op, sizes, int8=int8, algorithm=algorithm)
        known = _channels(fitted, op, sizes, there)
        known = _on_any_slower_ports(known, fitted, op, sizes, there, int8=int8, algorithm=algorithm)
        faster = fitted.link_bytes_per_s < comm.link_bytes_per_s
        held = (np.fmin if faster else np.fmax)(held, _for_as_long(known, there, options))
    return held


def _on_any_slower_ports(
    held: Floats, comm: Communicator, op: str, sizes: Floats, options: Options, *, int8: bool, algorithm: str | None
) -> Floats:
    """Return the SMs, reduced so that their SM seconds are no more than over any slower network."""
    for nccl in _machines_with_fewer_channels(comm.nccl):
        slower = on_slower_ports(comm, nccl.nic / comm.nccl.nic)
        there = evaluate(slower, op, sizes, int8=int8, algorithm=algorithm)
        held = np.fmin(held, _for_as_long(_channels(slower, op, sizes, there), there, options))
    return held


def _for_as_long(held: Floats, there: Options, here: Options) -> Floats:
    """Return the number of SMs whose SM seconds in `here` equal those of `held` SMs in `there`."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(held * there.time_s / here.time_s)


def _channels(comm: Communicator, op: str, sizes: Floats, options: Options) -> Floats:
    """Return the SMs for each size: one per channel, none for copy engines."""
    names = [options.names[pick] for pick in options.pick]
    counts = [
        0 if name == "copy_engine" else channel_count(comm, op, name, protocol, float(size))
        for size, (name, protocol) in zip(sizes, names, strict=True)
    ]
    return np.array(counts, dtype=np.float64)


@lru_cache(maxsize=256)
def _machines_with_fewer_channels(nccl: NcclMachine) -> tuple[NcclMachine, ...]:
    """Return the machines with slower networks on which NCCL finds fewer ring channels than on every faster one."""
    fewest, found = nccl_model.ring_graph(nccl).channels, []
    for rate in reversed(nccl_model.network_rates(nccl)):
        slower = replace(nccl, nic=rate)
        if (channels := nccl_model.ring_graph(slower).channels) < fewest:
            fewest = channels
            found.append(slower)
    return tuple(found)


def channel_count(comm: Communicator, op: str, algorithm: str, protocol: str, size: float) -> int:
    """Return NCCL's channels for one call; each is one CTA on one SM. Small messages get fewer."""
    if algorithm == "p2p":
        if op == "send_recv" and comm.nodes > 1:
            return NET_PEER_CHANNELS
        if op == "send_recv":
            return int(peer_channels(comm.ranks, np.array([size]))[0])
        peers = max(1, min(comm.ranks, P2P_CHANNELS))
        return int(min(P2P_CHANNELS, peers * peer_channels(comm.ranks, np.array([size / comm.ranks]))[0]))
    if algorithm in {"nvls", "nvls_tree"}:
        return _NVLS_CHANNELS.get(comm.nccl.generation, 16)
    if algorithm == "copy_engine":
        return 0
    if algorithm in {"one_shot", "two_shot"}:
        return 24  # assumed: the SMs that torch's symmetric-memory all-reduces use
    most = min(nccl_model.MAX_CHANNELS, 2 * nccl_model.ring_graph(comm.nccl).channels)
    per_channel = _BYTES_PER_CHANNEL[protocol] * (comm.ranks if protocol == "LL" else 1)
    return int(np.clip(np.ceil(size / per_channel), 1, most))
