"""Explain a deployment: where its time goes, why others lost, and where another one would win."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.serving.answer import ServingAnswer, answer_deployment
from planner.serving.crossings import BreakEven, Sweep, break_even, over_clients, over_context, over_links
from planner.serving.question.question import ServingQuestion
from planner.serving.search import ServingPlan, ServingResult, search_serving
from simulator.serving.deployment import Deployment
from topology.cluster import Cluster

Links = Mapping[str, tuple[float, Callable[[Cluster, float], Cluster]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingExplanation:
    """`break_even` compares tensor parallelism with half as much; `sweeps` follow the best deployments and this one."""

    answer: ServingAnswer
    result: ServingResult
    runners_up: tuple[ServingPlan, ...]
    break_even: tuple[BreakEven, ...]
    sweeps: tuple[Sweep, ...]


def explain_serving(
    question: ServingQuestion,
    chosen: Deployment | None,
    *,
    links: Links,
    top: int,
    sweep: bool,
    progress: Callable[[str], None] = lambda _: None,
) -> ServingExplanation:
    """Explain `chosen`, or the best deployment of the question. Raises Infeasible if nothing fits.

    `links` are rates (bytes/s) of kinds of links by name, each with a function that returns the cluster for a factor of
    the rate.
    """
    result = search_serving(question, progress=progress)
    deployment = chosen or result.plans[0].deployment
    others = tuple(plan for plan in result.plans if plan.deployment != deployment)[:top]
    sweeps: list[Sweep] = []
    if sweep:
        progress("crossings over clients")
        sweeps.append(over_clients(result, cross=True))
        progress("crossings over context")
        sweeps.append(over_context(result))
        for name, (rate, scale) in links.items():
            progress(f"crossings over {name}")
            sweeps.append(over_links(result, name, rate, scale))
    return ServingExplanation(
        answer=answer_deployment(question, deployment),
        result=result,
        runners_up=others,
        break_even=tuple(_break_even(question, deployment)),
        sweeps=tuple(one for one in sweeps if one.rows),
    )


def _break_even(question: ServingQuestion, deployment: Deployment) -> list[BreakEven]:
    pool = deployment.pool
    alone = pool.dp_attention == 1 and pool.tp > 1
    return [break_even(question, pool.tp, pool.tp // 2)] if alone and pool.tp % 2 == 0 else []
