"""The settings that all versions of torchtitan share, by section and key.

Sources: torchtitan 0.2.2 `config/job_config.py`, 0.3.0 `config/configs.py` and `trainer.py`. Its mesh axes are
pp, dp_replicate, dp_shard, cp, tp, the last fastest (`distributed/parallel_dims.py`), as `rank_grid` does.
"""

from __future__ import annotations

from typing import Any

from planner.export.job import ExportJob
from simulator.config.overlap_sites import tp_overlap_label
from simulator.config.plan import Plan
from simulator.pipeline.schedules import SCHEDULES
from simulator.pipeline.stages import stage_layers
from simulator.runtimes.library import runtime_spec
from topology.errors import Infeasible

TITLE = "torchtitan"
# torchtitan's `alltoall` passes keys and values around a ring; `allgather` gathers them first.
ROTATE = {"ring": "alltoall", "all_gather": "allgather"}


def training(job: ExportJob) -> dict[str, Any]:
    """Return the training section.

    With a pipeline, torchtitan runs all micro batches in one pass, so the local batch is the rank's share of the global
    batch; without one it is a micro batch, and gradients are accumulated up to the global batch.
    """
    plan, runtime = job.plan, job.question.runtime
    if runtime.param_dtype not in {"float32", "bfloat16"}:
        raise Infeasible(f"{TITLE} stores parameters in float32 or bfloat16, the plan in {runtime.param_dtype}")
    local = plan.micro_batch_size * (job.micro_batches if plan.pp > 1 else 1)
    return {
        "local_batch_size": local,
        "global_batch_size": job.question.workload.global_batch_size,
        "seq_len": job.question.workload.seq_len,
        "dtype": runtime.param_dtype,
        "mixed_precision_param": "bfloat16" if runtime.compute_dtype == "float8" else runtime.compute_dtype,
        "mixed_precision_reduce": "float32",
    }


def parallelism(job: ExportJob) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the parallelism section that both versions share, and what of the plan it cannot express."""
    plan = job.plan
    section: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.dp_replicate,
        "data_parallel_shard_degree": plan.dp_shard,
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
        "expert_parallel_degree": plan.ep,
        "fsdp_reshard_after_forward": {None: "default", True: "always", False: "never"}[plan.reshard_after_forward],
    }
    not_expressed = []
    if plan.pp > 1:
        section["pipeline_parallel_schedule"] = plan.schedule or "1F1B"
        section["pipeline_parallel_microbatch_size"] = plan.micro_batch_size
    if plan.capacity_factor is not None:
        not_expressed.append(f"expert capacity factor {plan.capacity_factor:g}: {TITLE} drops no tokens")
    if plan.recompute_per_stage:
        not_expressed.append(
            f"recompute per stage ({', '.join(plan.recompute_per_stage)}): {TITLE} has one mode for all stages"
        )
    if job.question.runtime.reduce_dtype != "float32":
        not_expressed.append(f"gradients reduced in {job.question.runtime.reduce_dtype}: {TITLE} reduces in float32")
    if job.question.runtime.compute_dtype == "float8":
        not_expressed.append("float8 products: add the converter of your torchao version to model.converters")
    if job.question.runtime.optimizer != "adamw":
        not_expressed.append(f"optimizer {job.question.runtime.optimizer}: left at {TITLE}'s AdamW")
    return section, tuple(not_expressed)


def stage_modules(job: ExportJob, head: str) -> list[list[str]]:
    """Return the modules of each stage; empty if torchtitan splits the model in the same way.

    `head` is the name of the output projection in this version.
    """
    plan = job.plan
    default = SCHEDULES[plan.schedule].least_stages if plan.schedule in SCHEDULES else 1
    if plan.pp == 1 or (not plan.layers_per_stage and plan.virtual_stages == default):
        return []
    counts = stage_layers(job.question.model.layers, plan, runtime_spec("torchtitan").pipeline)
    parts: list[list[str]] = []
    start = 0
    for count in counts:
        parts.append([f"layers.{index}" for index in range(start, start + count)])
        start += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def uses_async(plan: Plan) -> bool:
    return plan.tp_overlap == "async"


def overlap_not_expressed(plan: Plan) -> tuple[str, ...]:
    if plan.tp_overlap in {"none", "async"}:
        return ()
    return (
        f"tensor-parallel overlap {tp_overlap_label(plan.tp_overlap)}: {TITLE} has asynchronous tensor parallelism only",
    )
