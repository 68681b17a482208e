"""Why a question has no legal plan, and what would give it one: the rules that the nearest plan with the stated parts
breaks, with legal values, and changes of one thing each, tried before they are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice, product
from math import log2
from typing import Any

import numpy as np

from planner.io.figures import gpus_text
from planner.question.question import Question, default_runtime, question_of
from planner.search.deadline import over
from planner.search.infeasible import ConstrainedQuestion, nearest_fitting_gpus
from planner.search.plan_space.candidates import Bounds, Nodes, enumerate_nodes
from planner.search.plan_space.stated import Values, values_text
from simulator.config.adapter import ALL_LINEAR
from simulator.config.plan import PLAN_FIELDS, Plan, default_schedule
from simulator.config.plan_schema import Kind
from simulator.config.runtime import TF32, Runtime
from simulator.kernels.low_precision import has_no_bfloat16
from simulator.legality.frameworks import ANY, FRAMEWORKS
from simulator.legality.rule import Grade, Problem, divisors
from simulator.pipeline.schedules.registry import SCHEDULES
from topology.cluster import Cluster
from topology.errors import Infeasible, UserError

MOST_WAYS = 3  # that are listed
NEAR_COUNTS = 8  # smaller and larger GPU counts that are tried

Grow = Callable[[int], Cluster] | None
COMBINATIONS = 256  # combinations of stated values that are tried as an example
SHOWN = 10  # legal values named


def legal_ways(question: Question, bounds: Bounds, grow: Grow, deadline: float | None = None) -> list[str]:
    """Return flags with which a legal plan was found that fits, if necessary on more GPUs."""
    found: list[str] = []
    for flags, changed in _changes(question, grow):
        if len(found) == MOST_WAYS or over(deadline):
            break
        try:
            asked = ConstrainedQuestion(question=changed, bounds=bounds)
            gap = asked.gap(deadline)
            if gap <= 0:
                found.append(flags)
            elif gap < float("inf") and "--gpus" not in flags:
                more = nearest_fitting_gpus(asked, grow, deadline)
                found += [f"{flags} --gpus {more[0]}"] if more else []
        except UserError:
            continue  # a question that cannot be asked at all
    return found


def _changes(question: Question, grow: Grow) -> Iterator[tuple[str, Question]]:
    """Yield (flags, question with these flags), the likeliest cause first."""
    workload, model, runtime = question.workload, question.model, question.runtime
    if 0 < model.max_positions < workload.seq_len:
        shorter = replace(workload, seq_len=model.max_positions)
        yield f"--seq-len {model.max_positions}", replace(question, workload=shorter)
    sixteen_bits = "float16" if has_no_bfloat16(question.cluster.slowest_kind) else "bfloat16"
    if runtime.compute_dtype not in {"float32", TF32, sixteen_bits}:
        plain = replace(runtime, compute_dtype=sixteen_bits, low_precision_recipe="")
        yield f"--compute-dtype {sixteen_bits}", replace(question, runtime=plain)
    adapter = runtime.adapter
    if adapter is not None and adapter.rank and adapter.target_modules != (ALL_LINEAR,):
        everywhere = replace(runtime, adapter=replace(adapter, target_modules=(ALL_LINEAR,)))
        flag = "--qlora" if adapter.base_weights == "nf4" else "--lora"
        yield f"{flag} {adapter.rank}:{ALL_LINEAR}", replace(question, runtime=everywhere)
    batch, count = workload.global_batch_size, question.count
    for size in dict.fromkeys((-(-batch // count) * count, 1 << (batch - 1).bit_length(), count)):
        if size != batch:
            yield f"--global-batch {size}", replace(question, workload=replace(workload, global_batch_size=size))
    even = 1 << round(log2(workload.seq_len))
    if even != workload.seq_len:
        yield f"--seq-len {even}", replace(question, workload=replace(workload, seq_len=even))
    yield from _on_other_counts(question, grow)
    for name, framework in FRAMEWORKS.items():
        if framework is not ANY and name != question.framework.name:
            runs = _as_stated(runtime, default_runtime(question.framework), default_runtime(framework))
            yield (
                f"--framework {name}",
                question_of(model, question.cluster, workload, framework=framework, runtime=runs, gpus=question.gpus),
            )


def _on_other_counts(question: Question, grow: Grow) -> Iterator[tuple[str, Question]]:
    """Yield the question on other GPU counts, nearest first."""
    here, count = question.cluster.gpu_count, question.count
    near = {count + step for step in range(-NEAR_COUNTS, NEAR_COUNTS + 1)} | {1 << count.bit_length()}
    for other in sorted(near - {count}, key=lambda n: (abs(n - count), n)):
        if other < 1 or (grow is None and other > here):
            continue
        try:
            cluster = grow(other) if grow else question.cluster
        except (UserError, ValueError):
            continue  # the cluster does not exist in this size
        yield f"--gpus {other}", replace(question, cluster=cluster, gpus=other)


def _as_stated(runtime: Runtime, its_default: Runtime, other: Runtime) -> Runtime:
    """Return another framework's runtime with the user's changes to this one."""
    names = [one.name for one in fields(Runtime) if one.name not in {"name", "version"}]
    changed = {name: getattr(runtime, name) for name in names if getattr(runtime, name) != getattr(its_default, name)}
    return replace(other, **changed)


def contradiction(
    question: Question, bounds: Bounds, found: Nodes, others: Callable[[], Sequence[str]]
) -> Infeasible | None:
    """Return the error for stated parts that no legal plan has; None if no part was stated.

    If no other value of one part helps, `others` gives changes of the question with which there is a plan.
    """
    stated = bounds.stated
    if not stated:
        return None
    plan, broken = _nearest(question, stated)
    reasons = [problem.message for problem in broken]
    if plan.pp == 1 and plan.schedule:
        reasons.append(f"schedule {plan.schedule} orders the stages of a pipeline, and pp is 1")
    left_out = f"left out by the search: {', '.join(found.pruned)}" if found.pruned else ""
    why = "; ".join(reasons) or left_out or "the search tries no such plan; planner estimate predicts a single one"
    ways = [
        f"{PLAN_FIELDS[name].flag} {values}" for name in stated if (values := _legal_values(question, bounds, name))
    ]
    remedy = f"with the rest as said: {', or '.join(ways)}" if ways else "; or ".join(others())
    said = " ".join(f"{PLAN_FIELDS[name].flag} {values_text(value)}" for name, value in stated.items())
    return Infeasible(
        f"no legal plan for {question.model.name} on {gpus_text(question.count)} in {question.framework.title} has"
        f" {said}",
        why=why,
        remedy=remedy or "leave more than one of these free: no other value of a single one is legal",
    )


def _legal_values(question: Question, bounds: Bounds, name: str) -> str:
    """Return the values of one part with which there is a plan, all other parts as stated; empty if there are none."""
    free = {name: question.framework.offloads if name == "offload" else None}
    nodes = enumerate_nodes(question, bounds=bounds.fixing(**free))
    if not len(nodes):
        return ""
    if name == "recompute":
        values = [word for word, legal in nodes.choices["recompute"] if legal.any()]
    else:
        values = [value for value in np.unique(getattr(nodes.columns, name)).tolist() if value != ""]
    shown = [str(value) for value in values[:SHOWN]]
    return ", ".join([*shown, "..."] if len(values) > SHOWN else shown)


def _nearest(question: Question, stated: Mapping[str, Values]) -> tuple[Plan, list[Problem]]:
    """Return the plan of the stated values, with the simplest values otherwise, that breaks the fewest rules, and those
    rules.
    """
    options = [_values(question, name, value) for name, value in stated.items()]
    tried = []
    for values in islice(product(*options), COMBINATIONS):
        plan = _plainest(question, dict(zip(stated, values, strict=True)))
        tried.append((plan, [p for p in question.problems(plan) if p.grade is Grade.ILLEGAL]))
    return min(tried, key=lambda pair: len(pair[1]))


def _values(question: Question, name: str, value: Any) -> list[Any]:
    """Return the stated values of one part to try as examples: those that divide the GPUs, else the smallest."""
    if PLAN_FIELDS[name].kind is not Kind.COUNT:
        return list(value)
    low = [first for first, _ in value]
    fitting = [n for first, last in value for n in range(first, min(last, first + 64) + 1) if question.count % n == 0]
    return list(dict.fromkeys([*fitting[:8], *low[:2]]))


def _plainest(question: Question, said: dict[str, Any]) -> Plan:
    """Return the plan with one value for each stated part, with data parallelism over the remaining GPUs."""
    framework = question.framework
    values = dict(said)
    kind = SCHEDULES.get(values.get("schedule", ""))
    if kind and "virtual_stages" not in values:
        values["virtual_stages"] = kind.least_stages
    if "pp" not in values and ("schedule" in values or values.get("virtual_stages", 1) > 1):
        values["pp"] = next((n for n in divisors(question.count) if n > 1), 1)
    if kind is None and "schedule" not in values and values.get("pp", 1) > 1:
        values["schedule"] = _schedule(framework.schedules, values.get("virtual_stages", 1))
    values.setdefault("recompute", framework.recomputes[0])
    plan = Plan(**values, sequence_parallel=framework.sequence_parallel and values.get("tp", 1) > 1)
    free = [axis for axis in (framework.fills, "dp_shard", "dp_replicate") if axis not in values]
    if free and question.count % plan.gpus == 0:
        plan = plan.with_(**{free[0]: question.count // plan.gpus})
    if not framework.zero_stages or plan.dp_shard > 1:
        return plan
    stages = {"parameters": (3,), "optimizer": framework.optimizer_offload_stages}.get(plan.offload, ())
    return replace(plan, zero_stage=max(stages, default=0))


def _schedule(offered: tuple[str, ...], stages: int) -> str | None:
    """Return the default schedule for this number of stages per rank, else another one of the framework."""
    default = default_schedule(stages)
    return default if default in offered or not offered else offered[0]
