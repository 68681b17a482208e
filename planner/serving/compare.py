"""Compare two deployments, term by term: time per token, time to the first token, and settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from planner.io.plan_words import differing
from planner.serving.answer import ServingAnswer


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
