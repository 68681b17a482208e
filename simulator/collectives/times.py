"""Device time of one collective by one algorithm and protocol: single node, several nodes, and custom kernels.

Each function takes a `Communicator` and sizes in bytes (float array, nccl-tests' size column) and returns seconds.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from simulator.collectives.communicator import Communicator, Fabric
from simulator.collectives.curves import (
    ByteCost,
    Curve,
    Floats,
    all_to_all_time_s,
    curve_time_s,
    send_recv_time_s,
)
from simulator.collectives.nccl_model import LL_CAP

# PCIe and xGMI: share of the nominal rate that a large NCCL, RCCL or oneCCL message reaches. PCIe: RTX PRO 6000 x8 24.7
# to 46.5 of 63 GB/s by switch set-up, L40S x2 20 of 31.5, Arc Pro B60 19 of 31.5. xGMI: MI300X x8 313 of 448, MI355X x8
# 407 of 535. (hardware measurements listed in stas00/ml-engineering, aiconfigurator, rtx6kpro.)
PCIE_EFFICIENCY = 0.6
XGMI_EFFICIENCY = 0.72
# The LL protocol sends a flag with every four bytes, so half of the link is payload (NCCL); PCIe keeps its other
# losses.
LL_PAYLOAD = 0.5
# Network: share of NIC line rate. All-reduce 8 x B200 on 2 nodes 718 GB/s bus is 47.9 of 50 a port, and DGX A100 192 of
# 200 by ring (NVIDIA/nccl issue 812); all-gather of the B200 machines 308 of 400; all-to-all 42 (default) to 69 (tuned)
# of 94. (Vultr POC and AWS P6, via public tables.)
NET_REDUCE, NET_RING, NET_PEER = 0.95, 0.80, 0.60
NET_LL128 = 0.92  # of what Simple sends: 120 of 128 bytes (NCCL, src/graph/tuning.cc, with several ranks a node)
# Software cost of a network hop on top of the fabric's own latency, and start-up of a pipelined multi-node all-reduce:
# 2 x 8 H200 and 16 x 8 Blackwell (OCI) tables: intercepts 205 us and 400 us.
NET_STEP_S = 11e-6
NET_BULK_BASE_S, NET_BULK_DOUBLING_S = 140e-6, 65e-6
# Register load/store, TMA and copy engines reach 76, 78 and 82 % of NVLink on H100 (ParallelKittens, table 1).
LOAD_STORE_EFFICIENCY, COPY_ENGINE_EFFICIENCY = 0.76, 0.82
# One-shot kernels take 3.2 to 5.2 us at 256 B (TensorRT-LLM, H100 and B200), 4.7 in a graph (vLLM, H100); one more flag
# exchange for two-shot.
CUSTOM_BASE_S, CUSTOM_SYNC_S = 4.5e-6, 1.5e-6
COPY_ENGINE_BASE_S, COPY_ENGINE_CALL_S = 8e-6, 2e-6  # assumed: one stream memory operation per side, one copy per peer


def steps_and_share(op: str, ranks: int) -> tuple[int, float]:
    """Return the number of a ring's dependent steps, and the share of the buffer that each rank sends."""
    if op == "all_reduce":
        return 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    if op == "broadcast":
        return ranks - 1, 1.0
    return ranks - 1, (ranks - 1) / ranks


def _flat_curves(comm: Communicator) -> dict[str, Curve]:
    """LL and Simple for links that are not NVLink: latency from PCIe tables, work from the nominal rate."""
    efficiency = XGMI_EFFICIENCY if comm.fabric is Fabric.XGMI else PCIE_EFFICIENCY
    per_byte = 1 / (efficiency * comm.link_bytes_per_s) if comm.link_bytes_per_s else math.inf

    def curve(base: float, step: float, cost: float) -> Curve:
        ops = dict.fromkeys(
            ("all_reduce", "all_gather", "reduce_scatter", "broadcast"), ByteCost(sent_s=cost, buffer_s=0.0)
        )
        return Curve(base_s=base, step_s=step, reduce_step_s=step, bytes=ops)

    if comm.architecture.startswith("Xe"):
        # oneCCL on Arc Pro B60, 2 and 4 GPUs: no low-latency protocol, and an all-gather takes as long as n
        # reduce-scatters (9.5 and 4.6 GB/s bus against 19), so each rank seems to fetch every part separately.
        direct = curve(12.0e-6, 0.9e-6, per_byte)
        gather = {op: ByteCost(sent_s=per_byte * comm.ranks, buffer_s=0.0) for op in ("all_gather", "broadcast")}
        direct = replace(direct, bytes=direct.bytes | gather)
        return {"ring/LL": direct, "ring/Simple": direct}
    # RTX PRO 6000 x8 all-reduce: 17 us at 4 KiB over 14 steps.
    return {"ring/LL": curve(7e-6, 0.9e-6, per_byte / LL_PAYLOAD), "ring/Simple": curve(18e-6, 4e-6, per_byte)}


def curves_of(comm: Communicator) -> dict[str, Curve]:
    """Return the curves of the group's fabric; every fabric has "ring/LL" and "ring/Simple"."""
    return comm.generation.curves if comm.generation else _flat_curves(comm)


def curve_of(comm: Communicator, algorithm: str, protocol: str) -> Curve | None:
    curves = curves_of(comm)
    key = f"{algorithm}/{protocol}"
    if key in curves:
        return curves[key]
    # Inside one node a tree is a chain with as many steps as the ring. NVLS without a table has no substitute.
    return curves.get(f"ring/{protocol}") if algorithm == "tree" else None


def single_node_s(
    comm: Communicator, op: str, algorithm: str, protocol: str, size: Floats, *, int8: bool = False
) -> Floats:
    """Return seconds inside one node; infinite where the pair does not exist on this machine."""
    curve = curve_of(comm, algorithm, protocol)
    if curve is None or (algorithm == "nvls" and (not comm.nvls or int8)):
        return np.full_like(size, np.inf)
    steps, share = steps_and_share(op, comm.ranks)
    fill_scale = 1.0
    if algorithm == "nvls":
        # The switch does the sum: a port carries the buffer once up and one n-th of it back, for any number of ranks.
        # Every GPU is a head with its own pipeline: 8 B200 fill 45 us, 72 GB200 about nine times that.
        steps, share, fill_scale = 1, 1.0, comm.ranks / 8
    return curve_time_s(
        curve,
        op,
        size,
        ranks=comm.ranks,
        steps=steps,
        share=share,
        link_bytes_per_s=comm.link_bytes_per_s,
        int8=int8,
        fill_scale=fill_scale,
    )


def peer_to_peer_s(comm: Communicator, op: str, size: Floats) -> Floats:
    """Return seconds of an all-to-all or of a ring shift by send/recv, inside one node or across."""
    n = comm.ranks
    if comm.nodes > 1:
        return _multi_node_peer_s(comm, op, size) if comm.inter_bytes_per_s else np.full_like(size, np.inf)
    if comm.generation is not None:
        law = all_to_all_time_s if op == "all_to_all" else send_recv_time_s
        return law(comm.generation.peer, size, ranks=n, link_bytes_per_s=comm.link_bytes_per_s)
    efficiency = XGMI_EFFICIENCY if comm.fabric is Fabric.XGMI else PCIE_EFFICIENCY
    share = (n - 1) / n if op == "all_to_all" else 1.0
    return np.asarray(14e-6 + 1e-6 * math.log2(n) + size * share / (efficiency * comm.link_bytes_per_s))


def _multi_node_peer_s(comm: Communicator, op: str, size: Floats) -> Floats:
    n, ppn = comm.ranks, comm.ranks_per_node
    hop = NET_STEP_S + comm.hop_s
    network = comm.inter_peer_bytes_per_s * NET_PEER
    if op == "send_recv":  # worst case: all ranks of the node cross at once, as with pipeline stages on separate nodes
        return np.asarray(12e-6 + hop + size * ppn / network)
    outside = size * ppn * (n - ppn) / n / network
    local = np.zeros_like(size)
    if ppn > 1 and comm.generation is not None:
        peer = comm.generation.peer
        local = size * (ppn / n) * (peer.sent_s * (ppn - 1) / ppn + peer.buffer_s)
    posts = 12e-6 + hop + 1e-6 * (n - ppn)  # one proxy post per remote peer
    return np.asarray(posts + _both(local, outside))


def multi_node_s(comm: Communicator, op: str, size: Floats) -> dict[tuple[str, str], Floats]:
    """Return {(algorithm, protocol): seconds} over several nodes: low latency by tree or ring, bulk by (NVLS) tree or
    ring.

    The time of large messages is the 4-norm of the time inside a node and that on the network, since the two are
    pipelined. A tree sends 2 (k - 1) / k of the buffer per node of k, a ring 2 (n - 1) / n for an all-reduce of n ranks
    and (n - 1) / n for a gather or scatter.
    """
    n, k, ppn = comm.ranks, comm.nodes, comm.ranks_per_node
    if not comm.inter_bytes_per_s:
        return {("ring", "Simple"): np.full_like(size, np.inf)}
    hop, network = NET_STEP_S + comm.hop_s, comm.inter_bytes_per_s
    curves = curves_of(comm)
    low, bulk = curves["ring/LL"], curves["ring/Simple"]
    steps, share = steps_and_share(op, n)
    # A flag goes with every word of LL, over the network too (NCCL, src/graph/tuning.cc: busBw * .5).
    ll_rate = min(LL_CAP[0][1 if k == 2 else 2] * 1e9, network / 2)
    doublings = math.log2(k)
    found = _rings(comm, op, size)
    if op == "all_reduce":
        inside = steps_and_share(op, ppn)
        chain = low.base_s + low.reduce_step_s * inside[0]
        found["tree", "LL"] = chain + 2 * doublings * hop + size * share / ll_rate
        nvls = curves.get("nvls/Simple") if comm.nvls and ppn > 1 else None
        cost = (nvls or bulk).bytes[op]
        local = size * (cost.sent_s * inside[1] + cost.buffer_s) if ppn > 1 else np.zeros_like(size)
        outside = size * 2 * (k - 1) / k / (network * NET_REDUCE)
        start = NET_BULK_BASE_S + NET_BULK_DOUBLING_S * doublings
        found["nvls_tree" if nvls else "tree", "Simple"] = np.asarray(start + _both(local, outside))
        return found
    latency = low.base_s + low.step_s * (steps - (k - 1)) + (k - 1) * hop
    found["ring", "LL"] = latency + size * share / ll_rate
    if ppn == 1 and op in {"all_gather", "reduce_scatter"}:
        found["pat", "Simple"] = np.asarray(
            bulk.base_s + doublings * 2 * hop + size * share / (network * NET_RING * 0.75)
        )
    return found


def _rings(comm: Communicator, op: str, size: Floats) -> dict[tuple[str, str], Floats]:
    """Return the seconds of rings over several nodes for large messages, and with several ranks a node for those
    between (LL128). An all-reduce goes around twice: it scatters sums, then gathers them.
    """
    curves, (steps, share) = curves_of(comm), steps_and_share(op, comm.ranks)
    rounds = 2 if op == "all_reduce" else 1
    crossings, hop = rounds * (comm.nodes - 1), NET_STEP_S + comm.hop_s
    outside = size * share / (comm.inter_bytes_per_s * (NET_REDUCE if op == "all_reduce" else NET_RING))
    found = {}
    for protocol, hops, payload in (("Simple", 2, 1.0), ("LL128", 1, NET_LL128)):
        curve = curves.get(f"ring/{protocol}")
        if curve is None or (protocol == "LL128" and comm.ranks_per_node == 1):
            continue
        cost = curve.bytes[op]
        local = size * (cost.sent_s * share + cost.buffer_s) if comm.ranks_per_node > 1 else np.zeros_like(size)
        start = curve.base_s + curve.step_s * (steps - crossings) + hops * crossings * hop
        found["ring", protocol] = np.asarray(start + _both(local, outside / payload))
    return found


def _both(a: Floats, b: Floats) -> Floats:
    return np.asarray((a**4 + b**4) ** 0.25, dtype=np.float64)


def custom_s(comm: Communicator, op: str, algorithm: str, size: Floats) -> Floats:
    """Return seconds of kernels outside NCCL's tuner, on one node; infinite where they cannot do `op`.

    `one_shot` and `two_shot` are all-reduces over peer memory; `nvls` there is the multimem kernel. `copy_engine` uses
    no SMs, so it cannot reduce.
    """
    n, link = comm.ranks, comm.link_bytes_per_s
    _, share = steps_and_share(op, n)
    impossible = comm.nodes > 1 or comm.fabric is Fabric.PCIE
    if algorithm in {"one_shot", "two_shot"} and op == "all_reduce" and not impossible:
        rate = LOAD_STORE_EFFICIENCY * link
        if algorithm == "one_shot":
            return np.asarray(CUSTOM_BASE_S + size * (n - 1) / rate)
        return np.asarray(CUSTOM_BASE_S + CUSTOM_SYNC_S + size * share / rate)
    if algorithm == "copy_engine" and op in {"all_gather", "all_to_all", "broadcast", "send_recv"} and not impossible:
        calls = 1 if op == "send_recv" else n - 1
        moved = 1.0 if op == "send_recv" else share
        return np.asarray(
            COPY_ENGINE_BASE_S + COPY_ENGINE_CALL_S * calls + size * moved / (COPY_ENGINE_EFFICIENCY * link)
        )
    return np.full_like(size, np.inf)
