"""A plan's sharding in the two ways frameworks speak of it: by a degree (FSDP2) and by a stage (ZeRO).

Rajbhandari et al., arXiv 1910.02054, section 5: stage 1 shards the optimizer, 2 gradients too, 3 parameters too. FSDP
that keeps parameters gathered after the forward pass is stage 2 in traffic, and shards them between steps as well.
"""

from __future__ import annotations

from simulator.plan import Plan
from topology.errors import Infeasible


def as_degrees(plan: Plan, title: str) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with its sharding as FSDP2 says it, and what that changes.

    Ranks keep their coordinates: both data-parallel axes are neighbours in the mesh. Raises Infeasible for ZeRO-1,
    which FSDP2 does not have.
    """
    stage, ranks = plan.zero_stage, plan.data_parallel
    if stage is None:
        return plan, ()
    if stage == 0 or ranks == 1:
        return plan.with_(zero_stage=None, dp_replicate=ranks, dp_shard=1), ()
    if stage == 1:
        raise Infeasible(
            f"{title} has no ZeRO-1: it shards parameters and gradients together with the optimizer",
            remedy="plan for FSDP2 with planner suggest --framework torchtitan",
        )
    if stage == 2:
        told = (
            "ZeRO-2 is written as FSDP that keeps parameters gathered until the backward pass; it shards them after it"
        )
        return plan.with_(zero_stage=None, dp_replicate=1, dp_shard=ranks, reshard_after_forward=False), (told,)
    return plan.with_(zero_stage=None, dp_replicate=1, dp_shard=ranks, reshard_after_forward=True), ()


def as_stage(plan: Plan) -> int:
    """Return the ZeRO stage that a plan amounts to."""
    if plan.zero_stage is not None:
        return plan.zero_stage
    if plan.dp_shard == 1:
        return 0
    return 2 if plan.reshard_after_forward is False else 3
