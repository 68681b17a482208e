"""Every legal deployment simulated with the requests that were asked about, ranked by the objective.

There are tens of them, and each takes milliseconds, so none is pruned: the result is optimal within the model.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.serving.answer import estimate_of, meets
from planner.serving.candidates import deployments, no_format
from planner.serving.question.question import ServingQuestion
from simulator.kernels.low_precision import has_no_bfloat16
from simulator.serving.deployment import WEIGHT_BYTES, Deployment
from simulator.serving.engine import COMPARED
from simulator.serving.estimate import ServingEstimate
from simulator.serving.server import OutOfTime
from topology.errors import Infeasible
from topology.units import two_digits

# Deployments closer than this are a tie: errors of predictions of one model on one machine differ by about as much
# between deployments (vLLM: Llama 3.1 70B on two, four and eight H100, 3 % in the mean;
# examples/validation/serving.md).
TIE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """One deployment with what clients would see. `meets`: the targets hold on average."""

    deployment: Deployment
    estimate: ServingEstimate
    meets: bool
    tied: bool = False  # with the first
    lost_because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResult:
    """All deployments that were simulated, best first."""

    question: ServingQuestion
    plans: tuple[ServingPlan, ...]
    rejected: Counter[str]
    seconds: float


def search_serving(
    question: ServingQuestion,
    *,
    progress: Callable[[str], None] = lambda _: None,
    judged: bool = False,
    time_limit_s: float | None = None,
) -> ServingResult:
    """Return all deployments, best first; with a time limit those that were simulated within it. If they are only
    `judged` by the targets, figures of those that miss one may be too low.

    Raises Infeasible, with the reasons, where there is none.
    """
    begin = time.monotonic()
    until_s = begin + (math.inf if time_limit_s is None else time_limit_s)
    found, rejected = deployments(question)
    plans: list[ServingPlan] = []
    for number, deployment in enumerate(found):
        progress(f"deployment {number + 1} of {len(found)}")
        try:
            estimate = estimate_of(question, deployment, judged=judged, until_s=until_s)
        except OutOfTime:
            if not plans:
                raise
            rejected["not simulated: --time-limit"] += len(found) - number
            break
        except Infeasible as problem:
            rejected[str(problem).splitlines()[0]] += 1
            continue
        plans.append(ServingPlan(deployment=deployment, estimate=estimate, meets=meets(question, estimate)))
    if not plans:
        raise Infeasible(
            f"{question.model.name} cannot be served on {question.gpu_count} x {question.cluster.slowest_kind.title}",
            why="; ".join(f"{reason} ({count})" for reason, count in rejected.most_common(5)),
            remedy=", or ".join(ways_to_fit(question)),
        )
    ordered = sorted(plans, key=lambda plan: (*_rank(plan), value_of(question, plan), _mechanisms(plan.deployment)))
    return ServingResult(
        question=question,
        plans=tuple(_explained(question, ordered)),
        rejected=rejected,
        seconds=time.monotonic() - begin,
    )


def ways_to_fit(question: ServingQuestion) -> list[str]:
    """Return single changes that leave room for the requests: another machine, narrower weights and, where the engine
    lacks a format, wider ones and other engines. All but the machine are tried.
    """
    machine = [f"a --cluster with {'newer' if no_format(question) else 'more or larger'} GPUs"]
    if question.weights == "mxfp4" and question.model.moe is None:  # no GPU changes that
        machine = []
    tried = [
        (f"--weights {word}", replace(question, weights=word))
        for word in ("float8", "int4")
        if WEIGHT_BYTES[word] < WEIGHT_BYTES[question.weights]
    ]
    if no_format(question):
        wide = "float16" if has_no_bfloat16(question.cluster.slowest_kind) else "bfloat16"
        tried.append((f"--weights {wide}", replace(question, weights=wide)))
        tried.append((f"--kv-cache {wide}", replace(question, kv_cache=wide)))
        tried += [(f"--engine {name}", question.of_engine(name)) for name in COMPARED]
    return [*machine, *(flags for flags, asked in tried if deployments(asked)[0])]


def _rank(plan: ServingPlan) -> tuple[bool, bool]:
    """Return what orders plans before the objective does: whether targets fail, and whether requests pile up."""
    return not plan.meets, not plan.estimate.latency.keeps_up


def value_of(question: ServingQuestion, plan: ServingPlan) -> float:
    """Return the value that the objective minimises: seconds of an answer, or seconds of an output token on all GPUs,
    idle ones among them. All deployments that keep up with a rate of requests write the same tokens, so the faster
    answer is better. Of those that fall behind, whose answers take ever longer, the one that writes most is best.
    """
    keeps_up = plan.estimate.latency.keeps_up
    if keeps_up if question.traffic.request_rate else question.objective == "latency":
        return plan.estimate.e2e_s.value
    return 1.0 / (plan.deployment.gpus * plan.estimate.output_tokens_per_s_per_gpu.value)


def _mechanisms(deployment: Deployment) -> int:
    """Return how many kinds of parallelism an engine uses; among equals, fewer is better."""
    pools = [deployment.pool, *([deployment.prefill] if deployment.prefill else [])]
    return sum((pool.tp > 1) + (pool.pp > 1) + (pool.ep > 1) + (pool.dp_attention > 1) for pool in pools) + len(pools)


def _explained(question: ServingQuestion, plans: list[ServingPlan]) -> list[ServingPlan]:
    best = plans[0]
    close = [
        p for p in plans if _rank(p) == _rank(best) and value_of(question, p) <= value_of(question, best) * (1 + TIE)
    ]
    first = min(close, key=lambda plan: _mechanisms(plan.deployment))
    rest = [plan for plan in plans if plan is not first]
    tied = {id(plan) for plan in close}
    return [first] + [replace(plan, tied=id(plan) in tied, lost_because=_why(question, first, plan)) for plan in rest]


def _why(question: ServingQuestion, first: ServingPlan, plan: ServingPlan) -> str:
    """Return how a deployment is worse than the first, in the quantity with the largest difference."""
    if first.meets and not plan.meets:
        late = []
        if question.ttft_s and plan.estimate.ttft_s.value > question.ttft_s:
            late.append(f"first token after {plan.estimate.ttft_s.value:.2g} s, wanted {question.ttft_s:g} s")
        if question.tpot_s and plan.estimate.tpot_s.value > question.tpot_s:
            late.append(f"{1e3 * plan.estimate.tpot_s.value:.2g} ms a token, wanted {1e3 * question.tpot_s:g} ms")
        return "; ".join(late)
    mine, theirs = plan.estimate, first.estimate
    if theirs.latency.keeps_up and not mine.latency.keeps_up:
        return f"requests come faster than it answers them, {two_digits(mine.latency.requests_per_s)} a second"
    ratios = {"the first token comes later": mine.ttft_s.value / theirs.ttft_s.value}
    if theirs.tpot_s.value:  # answers of one token have no time between tokens
        ratios["a token takes longer"] = mine.tpot_s.value / theirs.tpot_s.value
    if mine.latency.preempted > theirs.latency.preempted:
        return f"the KV cache is full: {mine.latency.preempted} answers were stopped and read again"
    what, ratio = max(ratios.items(), key=lambda item: item[1])
    return f"{what} (x{ratio:.2g})" if ratio > 1 + TIE else "within the error of the prediction"
