"""Changes with which a question without a legal plan has one: each changes one thing and is tried before it is
listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from math import log2

from planner.question.question import Question, default_runtime, question_of
from planner.search.deadline import over
from planner.search.infeasible import ConstrainedQuestion, nearest_fitting_gpus
from planner.search.plan_space.candidates import Bounds
from simulator.config.adapter import ALL_LINEAR
from simulator.config.runtime import TF32, Runtime
from simulator.kernels.low_precision import has_no_bfloat16
from simulator.legality.frameworks import ANY, FRAMEWORKS
from topology.cluster import Cluster
from topology.errors import UserError

MOST_WAYS = 3  # that are listed
NEAR_COUNTS = 8  # smaller and larger GPU counts that are tried

Grow = Callable[[int], Cluster] | None


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
