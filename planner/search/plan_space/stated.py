"""Parts of a plan that the user fixes: `--tp 8`, `--tp 1,2,4`, `--pp 2-8`. Impossible values are refused with the
reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.question.case_fields import SPELLED
from simulator.config.plan import PLAN_FIELDS
from simulator.config.plan_schema import MAX_COUNT, Kind, PlanField
from topology.errors import UserError

MOST_VALUES = 64  # values of a number, all of which a search tries
Spans = tuple[tuple[int, int], ...]  # ranges of integers, both ends included
Values = Spans | tuple[str, ...]


def exactly(*values: int) -> Spans:
    """Return the spans of single values."""
    return tuple((value, value) for value in values)


def read_spans(text: str | None, flag: str) -> Spans | None:
    """Parse the flag of a number: a value, a list (1,2,4) or a range (2-8). Raises UserError."""
    if text is None:
        return None
    spans = []
    for word in text[:1000].split(","):
        match = re.fullmatch(r"\s*([0-9]{1,10})\s*(?:-\s*([0-9]{1,10})\s*)?", word)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high <= MAX_COUNT:
            raise UserError(
                f"{flag} {text[:40]!r} is neither a whole number from 1 to {MAX_COUNT}, nor a list, nor a range",
                remedy=f"{flag} 2, {flag} 1,2,4 or {flag} 2-8",
            )
        spans.append((low, high))
    return tuple(spans)


def read_words(text: str | None, flag: str) -> tuple[str, ...] | None:
    """Parse the flag of a mode: one word, or several separated by commas. Raises UserError."""
    if text is None:
        return None
    words = tuple(dict.fromkeys(word.strip() for word in text[:1000].split(",")))
    if not all(words):
        raise UserError(f"{flag} {text[:40]!r} names nothing", remedy=f"{flag} with one word, or several with commas")
    return words


def read_values(known: PlanField, text: str | None) -> Values | None:
    """Parse the flag of a plan's field: spans of a number, or words. Raises UserError."""
    if known.kind is Kind.COUNT:
        return read_spans(text, known.flag)
    words = read_words(text, known.flag)
    for word in words or ():
        if known.choices and word not in known.choices:
            raise UserError(f"{known.flag} {word[:40]!r} is not known", remedy=f"one of {', '.join(known.choices)}")
    spell = SPELLED.get(known.name, str)
    return words and tuple(map(spell, words))


def within(value: int, spans: Spans | None) -> bool:
    """Return whether `value` is one of the stated values; True if none are stated."""
    return spans is None or any(low <= value <= high for low, high in spans)


def among(values: Sequence[int], spans: Spans | None) -> list[int]:
    """Return those of `values` that are among the stated ones."""
    return [value for value in values if within(value, spans)]


def each_value(values: Values, name: str) -> list[int] | list[str]:
    """Return each of the stated values of a field. Raises UserError for more than a search tries."""
    spans = [value for value in values if isinstance(value, tuple)]
    if sum(high - low + 1 for low, high in spans) > MOST_VALUES:
        raise UserError(
            f"{PLAN_FIELDS[name].flag} {values_text(values)} has more than {MOST_VALUES} values",
            why="a search tries each of them with every plan",
            remedy="state fewer",
        )
    return [n for low, high in spans for n in range(low, high + 1)] or [v for v in values if isinstance(v, str)]


def values_text(values: Values) -> str:
    """Return stated values as text for a flag."""
    return ",".join(_text(*value) if isinstance(value, tuple) else value for value in values)


def _text(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"
