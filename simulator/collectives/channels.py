"""How many channels NCCL gives a call: each is one CTA, and so takes one SM."""

from __future__ import annotations

import numpy as np

from simulator.collectives import nccl_model
from simulator.collectives.communicator import Communicator
from simulator.collectives.curves import P2P_CHANNELS, peer_channels

# Channels to one peer on another node where nChannelsPerNetPeer is not set (NCCL src/graph/paths.cc).
NET_PEER_CHANNELS = 2
# NCCL gives a channel this many bytes before it adds another: threads x threshold (enqueue.cc), per protocol.
_BYTES_PER_CHANNEL = {"LL": 512 * 8, "LL128": 640 * 8, "Simple": 512 * 64}
_NVLS_CHANNELS = {2: 16, 3: 24}  # by tuner generation: Hopper 16, Blackwell 24 (GB300 log of 2.29.7)


def channel_count(comm: Communicator, op: str, algorithm: str, protocol: str, size: float) -> int:
    """Return NCCL's channels for one call. Small messages get fewer."""
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
        return 24  # assumed: what torch's symmetric-memory all-reduces launch
    most = min(nccl_model.MAX_CHANNELS, 2 * nccl_model.ring_graph(comm.nccl).channels)
    per_channel = _BYTES_PER_CHANNEL[protocol] * (comm.ranks if protocol == "LL" else 1)
    return int(np.clip(np.ceil(size / per_channel), 1, most))
