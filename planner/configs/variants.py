"""Plans that differ from a given one in a single field: a degree, the micro batch, a mode. Data parallelism is
adjusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.io.plan_words import changed_fields, value_words
from planner.question.question import Question
from simulator.config.plan import Plan, default_schedule
from simulator.config.runtime import Runtime
from simulator.runtimes.library import compiles

MICRO_BATCHES = (0.125, 0.25, 0.5, 2, 4)  # factors of the file's own micro batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A plan and its runtime; `what` describes the change: `tensor parallel (TP) from 8 to 4`."""

    what: str
    plan: Plan
    runtime: Runtime


def variants_of(plan: Plan, question: Question) -> Iterator[Variant]:
    """Return all plans one change away, on the same GPUs with the same batch, legal or not."""
    found = {}
    for other in _plans(plan, question):
        if other != plan and other not in found:
            found[other] = Variant(what=_named(plan, other), plan=other, runtime=question.runtime)
    yield from found.values()
    if compiles(question.runtime):
        compiled = replace(question.runtime, compile=not question.runtime.compile)
        word = "on" if compiled.compile else "off"
        yield Variant(what=f"torch.compile {word}", plan=plan, runtime=compiled)


def _plans(plan: Plan, question: Question) -> Iterator[Plan]:
    framework = question.framework
    for axis in ("tp", "cp", "pp"):
        now = getattr(plan, axis)
        for degree in {1, now // 2, now * 2, now * 4} - {0, now}:
            if (other := _resized(plan, axis, degree, question)) is not None:
                yield other
    yield from (plan.with_(ep=ep) for ep in {1, plan.ep // 2, plan.ep * 2, plan.ep * 4} - {0, plan.ep})
    for size in {1, *(int(plan.micro_batch_size * factor) for factor in MICRO_BATCHES)}:
        if size > 0 and question.workload.global_batch_size % (plan.data_parallel * size) == 0:
            yield plan.with_(micro_batch_size=size)
    yield from (plan.with_(recompute=mode, recompute_per_stage=()) for mode in framework.recomputes)
    if plan.zero_stage is not None:
        yield from (plan.with_(zero_stage=stage) for stage in framework.zero_stages)
    elif plan.data_parallel > 1:
        yield from _sharded_otherwise(plan, question)
    if plan.pp > 1:
        yield from (
            plan.with_(virtual_stages=stages, schedule=default_schedule(stages), layers_per_stage=())
            for stages in (1, 2, 4)
        )
    if plan.tp > 1:
        yield plan.with_(sequence_parallel=not plan.sequence_parallel, tp_overlap="none")
        yield from (plan.with_(tp_overlap=mode) for mode in ("none", *framework.overlaps[:1]))


def _resized(plan: Plan, axis: str, degree: int, question: Question) -> Plan | None:
    """Return the plan with another degree; data parallelism takes the remaining GPUs. None if they do not divide."""
    fills = "dp_replicate" if plan.dp_shard == 1 and plan.dp_replicate > 1 else question.framework.fills
    rest = plan.gpus // getattr(plan, fills) // getattr(plan, axis) * degree
    if plan.gpus % rest:
        return None
    other = plan.with_(
        **{axis: degree, fills: plan.gpus // rest}, layers_per_stage=(), recompute_per_stage=(), placement=()
    )
    if axis == "tp":
        parallel = degree > 1 and (plan.sequence_parallel or plan.tp == 1) and question.framework.sequence_parallel
        other = other.with_(sequence_parallel=parallel, tp_overlap="none" if degree == 1 else plan.tp_overlap)
    if axis == "cp":
        other = other.with_(
            cp_method=None if degree == 1 else plan.cp_method or (question.framework.cp_methods or (None,))[0]
        )
    if axis == "pp":
        stages = 1 if degree == 1 else plan.virtual_stages
        schedule = None if degree == 1 else plan.with_(virtual_stages=stages).schedule_name
        other = other.with_(virtual_stages=stages, schedule=schedule)
    share = question.workload.global_batch_size // max(1, other.data_parallel)
    while other.micro_batch_size > 1 and (
        share % other.micro_batch_size or question.workload.global_batch_size % other.data_parallel
    ):
        other = other.with_(micro_batch_size=other.micro_batch_size // 2)
    return other


def _sharded_otherwise(plan: Plan, question: Question) -> Iterator[Plan]:
    """Yield the plan with data parallelism sharded over all ranks, over those of a node, or not at all."""
    total, node = plan.data_parallel, question.cluster.gpus_per_node // (plan.tp * plan.cp) or 1
    for shard in {total, node, 1}:
        if shard <= total and total % shard == 0:
            yield plan.with_(dp_shard=shard, dp_replicate=total // shard)
    for reshard in (True, False):
        if plan.dp_shard > 1:
            yield plan.with_(reshard_after_forward=reshard)


def _named(before: Plan, after: Plan) -> str:
    return ", ".join(
        f"{what} {new}" if old == value_words(None) else f"{what} from {old} to {new}"
        for what, old, new in changed_fields(before, after)
    )
