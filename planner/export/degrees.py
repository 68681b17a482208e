"""A plan's sharding in the two ways frameworks speak of it: by a degree (FSDP2) and by a stage (ZeRO).

Rajbhandari et al., arXiv 1910.02054, section 5: stage 1 shards the optimizer, 2 gradients too, 3 parameters too. FSDP
that keeps parameters gathered after the forward pass is stage 2 in traffic, and shards them between steps as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.plan import Plan
from topology.errors import Infeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """`reshard` is whether parameters are dropped after the forward pass; None leaves it to the framework."""

    replicate: int
    shard: int
    reshard: bool | None
    unsaid: tuple[str, ...] = ()


def as_degrees(plan: Plan, title: str) -> Degrees:
    """Return the sharding as FSDP2 says it. Raises Infeasible for ZeRO-1, which FSDP2 does not have."""
    stage = plan.zero_stage
    if stage is None:
        return Degrees(replicate=plan.dp_replicate, shard=plan.dp_shard, reshard=plan.reshard_after_forward)
    ranks = plan.data_parallel
    if stage == 0 or ranks == 1:
        return Degrees(replicate=ranks, shard=1, reshard=plan.reshard_after_forward)
    if stage == 1:
        raise Infeasible(
            f"{title} has no ZeRO-1: it shards parameters and gradients together with the optimizer",
            remedy="plan for FSDP2 with planner suggest --framework torchtitan",
        )
    if stage == 2:
        told = "ZeRO-2 is written as FSDP that keeps parameters gathered after the forward pass; between steps it shards them too"
        return Degrees(replicate=1, shard=ranks, reshard=False, unsaid=(told,))
    return Degrees(replicate=1, shard=ranks, reshard=True)


def as_stage(plan: Plan) -> int:
    """Return the ZeRO stage that a plan amounts to."""
    if plan.zero_stage is not None:
        return plan.zero_stage
    if plan.dp_shard == 1:
        return 0
    return 2 if plan.reshard_after_forward is False else 3
