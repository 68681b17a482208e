"""Hypothesis strategies that damage documents and texts: one draw is a shipped input with a few things wrong in it."""

from __future__ import annotations

import json
from contextlib import suppress
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

NUMBERS = (-1, 0, 1, 2, 3, 7, 10**6, 10**12, 2**31, 2**63, 10**400, -(10**30), 0.1, -0.0, 1e-300, 1e300, -1e308)
TEXTS = (
    "",
    "x",
    "x" * 300,
    "x" * 100_000,
    "\x00",
    "é\u202e\ud83d\ude00",
    "../../etc/passwd",
    "$(rm -rf ~)",
    "nan",
    "-1",
)
HOSTILE = st.sampled_from([*NUMBERS, *TEXTS, None, True, False, [], {}, [[]], {"": None}, ["x"] * 1000, [1] * 1000])
LEAVES = HOSTILE | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12)
JUNK = st.recursive(
    LEAVES, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=8), part, max_size=3)
)
TOKENS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "1" * 400,
    "[" * 500,
    '{"a":' * 300,
    "\\ud800",
    "\x00",
    ",",
    "}",
    '"',
)
LINES = (
    "",
    "GPU0\tGPU0",
    "\t" * 50,
    "[" * 20_000,
    "NV" + "9" * 50,
    "x" * 5000,
    "GPU" + "1" * 30,
    "<a>" * 200,
    "\x1b[31m",
    "-1",
)


def nodes(document: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value in a document of lists and dictionaries."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        here = waiting.pop()
        pairs = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
        for key, value in pairs:
            found.append((here, key))
            waiting.append(value)
    return found


@st.composite
def damaged_json(draw: st.DrawFn, corpus: list[Any]) -> str:
    """Draw the text of a document of `corpus` with one to four values, keys or stretches of text altered."""
    document = json.loads(json.dumps(draw(st.sampled_from(corpus))))
    for _ in range(draw(st.integers(1, 4))):
        places = nodes(document)
        if not places:
            break
        container, key = places[draw(st.integers(0, len(places) - 1))]
        how = draw(st.sampled_from(["value", "value", "value", "scale", "remove", "rename", "repeat", "exchange"]))
        _alter(draw, container, key, how, places)
    text = json.dumps(document)
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(TOKENS)) + text[at + draw(st.integers(0, 3)) :]
    return text


def _alter(draw: st.DrawFn, container: Any, key: Any, how: str, places: list[tuple[Any, Any]]) -> None:
    value = container[key]
    if how == "scale" and isinstance(value, (int, float)) and not isinstance(value, bool):
        factor = draw(st.sampled_from([-1, 0, 2, 10, 1000, 10**9, 0.5, 1e-6]))
        with suppress(OverflowError):  # a whole number beyond all floats keeps its value
            container[key] = value * factor
    elif how == "remove":
        del container[key]
    elif how == "rename" and isinstance(container, dict):
        container[draw(st.text(max_size=8))] = container.pop(key)
    elif how == "repeat" and isinstance(value, list) and value:
        container[key] = value * draw(st.integers(2, 5))
    elif how == "exchange":
        other, at = places[draw(st.integers(0, len(places) - 1))]
        container[key] = json.loads(json.dumps(other[at])) if _holds(other, at) else None
    else:
        container[key] = deepcopy(draw(HOSTILE | JUNK))  # the strategy keeps what it draws from


def _holds(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


@st.composite
def damaged_text(draw: st.DrawFn, corpus: list[str]) -> str:
    """Draw a text of `corpus` with one to five lines, words or characters altered."""
    lines = draw(st.sampled_from(corpus)).splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, max(0, len(lines) - 1)))
        line = lines[at] if lines else ""
        how = draw(st.sampled_from(["line", "remove", "repeat", "exchange", "word", "word", "cut", "insert"]))
        if how == "line":
            lines[at : at + 1] = [draw(st.sampled_from(LINES) | st.text(max_size=40)) + "\n"]
        elif how == "remove":
            del lines[at : at + draw(st.integers(1, 4))]
        elif how == "repeat":
            lines[at:at] = [line] * draw(st.integers(1, 40))
        elif how == "exchange" and lines:
            other = draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        elif how == "word" and line.split():
            words = line.split()
            words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from([str(n) for n in NUMBERS] + list(LINES)))
            lines[at] = ("\t" if "\t" in line else " ").join(words) + "\n"
        elif how == "cut":
            lines[at : at + 1] = [line[: draw(st.integers(0, len(line)))]]
        else:
            where = draw(st.integers(0, len(line)))
            lines[at : at + 1] = [line[:where] + draw(st.text(max_size=6)) + line[where:]]
    return "".join(lines)
