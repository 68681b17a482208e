"""Whether an engine's own all-reduce runs for a deployment, or why NCCL's runs.

Conditions of vLLM 0.33 (vllm/distributed/device_communicators/custom_all_reduce.py) and SGLang, which has the same: one
node, 2, 4, 6 or 8 ranks, and NVLink between all of them where there are more than two. Two GPUs on PCIe are costed as
with NCCL.
"""

from __future__ import annotations

from planner.serving.question.question import ServingQuestion
from simulator.collectives.communicator import Fabric
from simulator.collectives.cost import CollectiveModel
from simulator.serving.deployment import Pool
from simulator.serving.engine import engine_of
from simulator.serving.forward_pass import ForwardPass
from topology.rates.groups import GroupShape

WORLD_SIZES = (2, 4, 6, 8)
PROGRAMS = ("vllm", "sglang")


def nccl_because(question: ServingQuestion, pool: Pool) -> str:
    """Return why an engine uses NCCL for all-reduces, with the time of one for a token; empty if it does not."""
    if pool.tp == 1 or engine_of(question.engine).program not in PROGRAMS:
        return ""
    node = question.cluster.gpus_per_node
    shape = GroupShape(ranks=pool.tp, ranks_per_node=min(pool.tp, node))
    if not question.custom_all_reduce:
        reason = "the engine is set so"
    elif pool.tp > node:
        reason = f"{pool.tp} ranks are on several nodes"
    elif pool.tp not in WORLD_SIZES:
        reason = f"it is written for {', '.join(map(str, WORLD_SIZES))} ranks, not {pool.tp}"
    elif CollectiveModel(question.cluster).communicator(shape).fabric is Fabric.PCIE:
        reason = "NVLink does not connect all of its GPUs"
    else:
        return ""
    costs = ForwardPass(question.model, question.cluster, question.deployment(pool), pool)
    seconds = costs.reduced_s(1) / costs.reductions()
    return (
        f"custom all-reduce is off, as {reason}: NCCL's takes {1e6 * seconds:.0f} us for one token,"
        f" {costs.reductions()} times a step"
    )
