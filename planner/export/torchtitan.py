"""What torchtitan is told, whatever the version: the settings, by section and key.

Names and meanings: torchtitan 0.2.2 `config/job_config.py`, 0.3.0 `config/configs.py` and `trainer.py`. Its mesh runs
pp, dp_replicate, dp_shard, cp, tp, the last fastest (`distributed/parallel_dims.py`), as `rank_grid` does.
"""

from __future__ import annotations

from typing import Any

from planner.export.job import Job
from simulator.overlap_sites import spoken
from simulator.plan import Plan
from simulator.runtime_library import runtime_spec
from simulator.stages import stage_layers
from topology.errors import Infeasible

TITLE = "torchtitan"
# Ring attention hands keys and values on, which torchtitan calls `alltoall`; `allgather` collects them first.
ROTATE = {"ring": "alltoall", "all_gather": "allgather"}
MULTI_STAGE = frozenset({"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"})


def training(job: Job) -> dict[str, Any]:
    """Return the training section.

    torchtitan runs all micro batches of a pipeline in one pass, so there the local batch is the rank's whole share of
    the step; without a pipeline it is one micro batch, and gradients accumulate up to the global batch.
    """
    plan, runtime = job.plan, job.runtime
    if runtime.param_dtype not in {"float32", "bfloat16"}:
        raise Infeasible(f"{TITLE} stores parameters in float32 or bfloat16, the plan in {runtime.param_dtype}")
    local = plan.micro_batch_size * (job.micro_batches if plan.pp > 1 else 1)
    return {
        "local_batch_size": local,
        "global_batch_size": job.workload.global_batch_size,
        "seq_len": job.workload.seq_len,
        "dtype": runtime.param_dtype,
        "mixed_precision_param": "bfloat16" if runtime.compute_dtype == "float8" else runtime.compute_dtype,
        "mixed_precision_reduce": "float32",
    }


def parallelism(job: Job) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the parallelism section that both versions share, and what of the plan it cannot say."""
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
    unsaid = []
    if plan.pp > 1:
        section["pipeline_parallel_schedule"] = plan.schedule or "1F1B"
        section["pipeline_parallel_microbatch_size"] = plan.micro_batch_size
    if plan.capacity_factor is not None:
        unsaid.append(f"expert capacity factor {plan.capacity_factor:g}: {TITLE} drops no tokens")
    if plan.recompute_per_stage:
        unsaid.append(
            f"recompute per stage ({', '.join(plan.recompute_per_stage)}): {TITLE} has one mode for all stages"
        )
    if job.runtime.reduce_dtype != "float32":
        unsaid.append(f"gradients reduced in {job.runtime.reduce_dtype}: {TITLE} reduces in float32")
    if job.runtime.compute_dtype == "float8":
        unsaid.append("float8 products: add the converter of your torchao version to model.converters")
    if job.runtime.optimizer != "adamw":
        unsaid.append(f"optimizer {job.runtime.optimizer}: left at {TITLE}'s AdamW")
    return section, tuple(unsaid)


def stage_modules(job: Job, head: str) -> list[list[str]]:
    """Return the modules of each stage, as the plan splits them; empty where torchtitan's own split is the same.

    `head` is what the version calls the output projection.
    """
    plan = job.plan
    default = 2 if plan.schedule in MULTI_STAGE else 1
    if plan.pp == 1 or (not plan.layers_per_stage and plan.virtual_stages == default):
        return []
    counts = stage_layers(job.model.layers, plan, runtime_spec("torchtitan").pipeline)
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


def overlap_unsaid(plan: Plan) -> tuple[str, ...]:
    if plan.tp_overlap in {"none", "async"}:
        return ()
    return (f"tensor-parallel overlap {spoken(plan.tp_overlap)}: {TITLE} has asynchronous tensor parallelism only",)
