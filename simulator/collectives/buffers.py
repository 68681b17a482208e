"""Memory of NCCL's communicators on a rank, from the connections that NCCL makes.

For every channel and peer of its node a rank has a buffer for what it receives, which holds the LL, LL128 and Simple
protocols' parts (src/init.cc, computeBuffSizes: 0.5, 4.7 and 4 MiB), and a page for what it sends
(src/transport/p2p.cc). Both are whole pages of 2 MiB: 10 and 2 MiB, as a run's own log of allocations shows
(github.com/NVIDIA/nccl/issues/1685). Connections are made by the first operation that uses them (NCCL_RUNTIME_CONNECT,
on since 2.22): gathers and reduce-scatters connect rings, all-reduces rings and trees, sends and all-to-alls every peer
over up to 32 channels. That log's all-to-all among eight H100 took 3.3 GB; here it is 2.8. NVLS, which has buffers of
its own, is not counted.
"""

from __future__ import annotations

import numpy as np

from simulator.collectives import nccl_model
from simulator.collectives.channels import NET_PEER_CHANNELS
from simulator.collectives.curves import P2P_CHANNELS
from simulator.collectives.group_times import GroupTimes
from simulator.columns.plan_table import Floats
from topology.rates.groups import GroupShape, group_shape
from topology.units import MIB

# LL: 8 lines of 16 bytes for 512 threads; LL128: 120 words of 8 bytes for 640; each with 8 steps. Simple:
# NCCL_BUFFSIZE.
PROTOCOL_BYTES = (8 * 16 * 512 * 8, 120 * 8 * 640 * 8, 4 * MIB)
PAGE = 2 * MIB  # CUDA_IPC_MIN
CONNECTION_BYTES = -(-sum(PROTOCOL_BYTES) // PAGE) * PAGE + PAGE  # of one channel: from one peer, and to one


def communicator_bytes(groups: GroupTimes) -> Floats:
    """Return the bytes of all groups in which a rank of each plan communicates, the group of all ranks included."""
    table = groups.table
    one = np.ones(len(table))
    world, which = np.unique(table["gpus"], return_inverse=True)
    per_node = groups.cluster.gpus_per_node
    of_world = [
        _bytes(groups, group_shape(size=int(n), stride=1, gpus_per_node=per_node, world=int(n)), rings=2) for n in world
    ]
    total = np.array(of_world)[which]
    reduces_whole = ~table.fully_sharded & (table.state_shard["optimizer"] <= 1)
    rings = {
        "tp": np.where(table.sequence_parallel, one, 2 * one),
        "cp": np.where(table.conditions["cp_all_gather"], one, 0.0),
        "fsdp": one,
        "replicate": np.where(table.fully_sharded | reduces_whole, 2 * one, one),
    }
    for axis, count in rings.items():
        for _, shape, rows in groups.shapes(axis):
            total[rows] += _bytes(groups, shape, rings=1) * count[rows]
    passed_on = np.where(table.conditions["cp_all_gather"], 0.0, one)
    for axis, used in {"ep": one, "pp": one, "cp": passed_on}.items():
        for _, shape, rows in groups.shapes(axis):
            total[rows] += _bytes(groups, shape, peers=True) * used[rows]
    return total


def _bytes(groups: GroupTimes, shape: GroupShape, *, rings: int = 0, peers: bool = False) -> float:
    """Return the bytes of one group's connections: those of `rings` rings or trees, or those to all `peers`."""
    if shape.ranks <= 1:
        return 0.0
    if peers:
        near = min(shape.ranks, shape.ranks_per_node) - 1
        away = NET_PEER_CHANNELS if shape.nodes > 1 else 0  # network buffers of one node, which all its peers share
        return float(CONNECTION_BYTES * (near * P2P_CHANNELS + away))
    machine = groups.collectives.communicator(shape).nccl
    channels = min(nccl_model.MAX_CHANNELS, 2 * nccl_model.ring_graph(machine).channels)
    return float(CONNECTION_BYTES * channels * rings)
