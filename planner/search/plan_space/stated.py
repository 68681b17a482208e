"""Parts of a plan that a person fixes: `--tp 8`, `--tp 1,2,4`, `--pp 2-8`. What cannot be is refused with the reason."""

from __future__ import annotations

import re
from collections.abc import Sequence

from simulator.config.plan import EP_OVERLAPS, OFFLOADS
from simulator.config.plan_schema import MAX_COUNT
from topology.errors import UserError

Spans = tuple[tuple[int, int], ...]  # ranges of whole numbers, both ends included


def exactly(*values: int) -> Spans:
    """Return the spans of single values."""
    return tuple((value, value) for value in values)


def read_spans(text: str | None, flag: str) -> Spans | None:
    """Return what a flag says of a number: a value, a list (1,2,4) or a range (2-8). Raises UserError."""
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
    """Return what a flag says of a mode: one word or several, with commas. Raises UserError."""
    if text is None:
        return None
    words = tuple(dict.fromkeys(word.strip() for word in text[:1000].split(",")))
    if not all(words):
        raise UserError(f"{flag} {text[:40]!r} names nothing", remedy=f"{flag} with one word, or several with commas")
    return words


def known_offloads(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return what `--offload` says. Raises UserError for a word that is none of `OFFLOADS`."""
    for word in words:
        if word not in OFFLOADS:
            raise UserError(f"--offload {word[:40]!r} is not known", remedy=f"one of {', '.join(OFFLOADS)}")
    return words


def known_ep_overlaps(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return what `--ep-overlap` says. Raises UserError for a word that is none of `EP_OVERLAPS`."""
    for word in words:
        if word not in EP_OVERLAPS:
            raise UserError(f"--ep-overlap {word[:40]!r} is not known", remedy=f"one of {', '.join(EP_OVERLAPS)}")
    return words


def within(value: int, spans: Spans | None) -> bool:
    """Return whether `value` is one of those stated; true where nothing was."""
    return spans is None or any(low <= value <= high for low, high in spans)


def among(values: Sequence[int], spans: Spans | None) -> list[int]:
    """Return those of `values` that were stated."""
    return [value for value in values if within(value, spans)]


def spans_text(spans: Spans) -> str:
    """Return spans as a flag takes them."""
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
