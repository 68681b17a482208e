"""Convert a plan's data-parallel sharding between the two forms of frameworks: degrees (FSDP2) and a stage (ZeRO).

Rajbhandari et al., arXiv 1910.02054, section 5: stage 1 shards the optimizer, 2 gradients too, 3 parameters too. FSDP
that keeps parameters gathered after the forward pass communicates like stage 2, and also shards parameters between
steps.
"""

from __future__ import annotations

from dataclasses import replace

from planner.export.job import ExportJob
from simulator.config.plan import Plan
from simulator.runtimes.library import spec_for
from topology.errors import Infeasible


def to_fsdp_degrees(plan: Plan, title: str) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with its sharding as FSDP2 degrees, and notes on differences.

    Ranks keep their coordinates, as the two data-parallel axes are adjacent in the mesh. Raises Infeasible for ZeRO-1,
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
        note = (
            "ZeRO-2 is written as FSDP that keeps parameters gathered until the backward pass, and shards them after it"
        )
        return plan.with_(zero_stage=None, dp_replicate=1, dp_shard=ranks, reshard_after_forward=False), (note,)
    return plan.with_(zero_stage=None, dp_replicate=1, dp_shard=ranks, reshard_after_forward=True), ()


def masters_alone(job: ExportJob, title: str) -> tuple[ExportJob, tuple[str, ...]]:
    """Return the job with float32 parameters if its runtime keeps float32 copies of 16-bit ones, and notes.

    FSDP2 stores one copy and casts parameters when it gathers them, so its float32 parameters are the master weights.
    """
    runtime = job.question.runtime
    if runtime.param_dtype not in {"bfloat16", "float16"} or not spec_for(runtime).state.master_weights:
        return job, ()
    note = (
        f"{runtime.param_dtype} parameters besides float32 master weights:"
        f" {title} stores the float32 ones alone, sharded, and computes in {runtime.compute_dtype}"
    )
    question = replace(job.question, runtime=replace(runtime, param_dtype="float32"))
    return replace(job, question=question), (note,)


def to_zero_stage(plan: Plan) -> int:
    """Return the ZeRO stage that corresponds to the sharding of a plan."""
    if plan.zero_stage is not None:
        return plan.zero_stage
    if plan.dp_shard == 1:
        return 0
    return 2 if plan.reshard_after_forward is False else 3
