"""Explain a deployment: where its time goes, why others lost, where another one would win; and compare it with another,
term by term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.io.plan_words import differing
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One part of the time of a token (`of` is `token`) or of the first one (`first_token`), in seconds."""

    of: str
    name: str
    first: float
    second: float

    @property
    def delta(self) -> float:
        return self.second - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingComparison:
    """`terms` add up to `token_s` and `first_token_s`, the differences of the predicted means; none if one is illegal.

    `settings` and `question` list the differences.
    """

    answers: tuple[ServingAnswer, ServingAnswer]
    terms: tuple[Term, ...]
    settings: tuple[str, ...]
    question: tuple[str, ...]

    def _total(self, of: str) -> float | None:
        return sum(term.delta for term in self.terms if term.of == of) if self.terms else None

    @property
    def token_s(self) -> float | None:
        return self._total("token")

    @property
    def first_token_s(self) -> float | None:
        return self._total("first_token")


def compare_answers(first: ServingAnswer, second: ServingAnswer) -> ServingComparison:
    """Return two answers side by side, each under its own question."""
    one, other = first.account, second.account
    terms: list[Term] = []
    if one is not None and other is not None:
        terms += _terms("token", one.token_s, other.token_s)
        terms += _terms("first_token", one.first_s, other.first_s)
    asked = (replace(answer.question, assumed=()) for answer in (first, second))
    return ServingComparison(
        answers=(first, second),
        terms=tuple(terms),
        settings=tuple(differences(first.deployment, second.deployment)),
        question=tuple(differences(*asked)),
    )


def _terms(of: str, one: dict[str, float], other: dict[str, float]) -> list[Term]:
    return [
        Term(of=of, name=name, first=one.get(name, 0.0), second=other.get(name, 0.0))
        for name in dict.fromkeys([*one, *other])
    ]


def differences(one: Any, other: Any) -> Iterator[str]:
    """Return what differs between two values of one kind, field by field: `pool.tp: 4, then 8`."""
    return (f"{where}: {first}, then {second}" for where, first, second in differing(one, other))
