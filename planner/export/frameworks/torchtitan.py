"""Settings of a plan that no version of torchtitan can express."""

from __future__ import annotations

from collections.abc import Iterator

from planner.export.degrees import masters_alone, to_fsdp_degrees
from planner.export.job import ExportJob, require_legal
from simulator.config.overlap_sites import tp_overlap_label
from simulator.config.plan import Plan
from simulator.pipeline.schedules.registry import schedule_kind
from topology.errors import Infeasible

TITLE = "torchtitan"


def prepared(job: ExportJob, title: str) -> tuple[ExportJob, tuple[str, ...], tuple[str, ...]]:
    """Return the job with its sharding as FSDP2 degrees, the settings that torchtitan cannot express, and notes.

    Raises Infeasible for a plan that it cannot run.
    """
    fsdp, sharding_notes = to_fsdp_degrees(job.plan, title)
    if fsdp.ep_overlap != "none" and not (title.endswith("0.2.2") and schedule_kind(fsdp.schedule_name).pairs):
        fsdp = fsdp.with_(ep_overlap="none")
        sharding_notes = (*sharding_notes, f"all-to-all of experts during compute: {title} does not with this schedule")
    job, types_notes = masters_alone(job.with_plan(fsdp), title)
    written = fsdp if not overlap_not_expressed(fsdp) else fsdp.with_(tp_overlap="none")
    notes = require_legal(job.with_plan(written), "torchtitan", title)
    runtime = job.question.runtime
    if runtime.param_dtype not in {"float32", "bfloat16"}:
        raise Infeasible(f"{TITLE} stores parameters in float32 or bfloat16, the plan in {runtime.param_dtype}")
    return job, (*sharding_notes, *types_notes, *_not_expressed(job), *overlap_not_expressed(fsdp)), notes


def _not_expressed(job: ExportJob) -> Iterator[str]:
    plan, runtime = job.plan, job.question.runtime
    if plan.capacity_factor is not None:
        yield f"expert capacity factor {plan.capacity_factor:g}: {TITLE} drops no tokens"
    if plan.recompute_per_stage:
        yield f"recompute per stage ({', '.join(plan.recompute_per_stage)}): {TITLE} has one mode for all stages"
    if runtime.reduce_dtype != "float32":
        yield f"gradients reduced in {runtime.reduce_dtype}: {TITLE} reduces in float32"
    if runtime.low:
        wide = "; let it leave out the first {} and the last {} layers".format(*runtime.wide_layers)
        yield (
            f"{runtime.compute_dtype} products: add the converter of your torchao version to model.converters"
            f"{wide if any(runtime.wide_layers) else ''}"
        )
    if runtime.optimizer != "adamw":
        yield f"optimizer {runtime.optimizer}: left at {TITLE}'s AdamW"


def overlap_not_expressed(plan: Plan) -> tuple[str, ...]:
    if plan.tp_overlap in {"none", "async"}:
        return ()
    return (
        (
            f"tensor-parallel overlap {tp_overlap_label(plan.tp_overlap)}: {TITLE} has asynchronous tensor parallelism"
            " only"
        ),
    )
