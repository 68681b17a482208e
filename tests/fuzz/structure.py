"""Strategies that damage documents by what is in them: fields that change places, units and spellings of numbers.

Where `mutations` puts anything anywhere, these stay close to what a person or another program may write: a file whose
parts are those of two others, numbers in another unit or as text, letters that look alike, keys that are there twice,
a byte order mark, an end within a character.
"""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.mutations import nodes

# Letters of other alphabets that look like Latin ones, signs of other widths.
LOOK_ALIKE = str.maketrans("aceopxyiABCEHKMOPTX0123-.:", "асеорхуіАВСЕНКМОРТХ０１２３−․：")
UNITS = (1e-9, 1e-6, 1e-3, 1 / 8, 8, 1024, 1e3, 2**20, 1e6, 2**30, 1e9, 1e12)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
MARK = "\ufeff"


def as_text(number: float) -> st.SearchStrategy[Any]:
    """Return spellings of a number that are none, or none of JSON."""
    return st.sampled_from(
        [
            str(number),
            f"{number:e}",
            f"{number:g} GB",
            f"{number}s",
            f"+{number}",
            f"0{number}",
            f"{number:,}",
            [number],
        ]
    )


@st.composite
def rearranged_json(draw: st.DrawFn, corpus: list[Any]) -> str:
    """Draw the text of a document of `corpus` with one to four parts in the place, unit or spelling of others."""
    document, donor = (json.loads(json.dumps(draw(st.sampled_from(corpus)))) for _ in range(2))
    for _ in range(draw(st.integers(1, 4))):
        places = nodes(document)
        if not places:
            break
        container, key = _one_of(draw, places)
        how = draw(st.sampled_from(["swap", "graft", "unit", "text", "alike", "sign"]))
        value = container[key] if _there(container, key) else None
        if how == "swap":
            other, at = _one_of(draw, places)
            if _there(other, at) and _there(container, key) and not _inside(container, other):
                container[key], other[at] = json.loads(json.dumps([other[at], value]))
        elif how == "graft":
            alike = [(place, name) for place, name in nodes(donor) if name == key]
            place, name = _one_of(draw, alike or nodes(donor) or [({key: value}, key)])
            container[key] = json.loads(json.dumps(place[name]))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            if how == "unit":
                scaled = value * draw(st.sampled_from(UNITS))
                container[key] = int(scaled) if isinstance(value, int) and draw(st.booleans()) else scaled
            elif how == "text":
                container[key] = draw(as_text(value))
            else:
                container[key] = -value
        elif isinstance(value, str):
            container[key] = value.translate(LOOK_ALIKE) if how == "alike" else f" {value.swapcase()}\u200b"
        elif how == "alike" and isinstance(container, dict) and isinstance(key, str) and key in container:
            container[key.translate(LOOK_ALIKE)] = container.pop(key)
    return _written(draw, json.dumps(document, ensure_ascii=draw(st.booleans())))


def _one_of(draw: st.DrawFn, places: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    return places[draw(st.integers(0, len(places) - 1))]


def _there(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


def _inside(one: Any, other: Any) -> bool:
    """Return whether one container is part of the other, so that a swap would put it into itself."""
    return any(part is second for first, second in ((one, other), (other, one)) for part in _parts(first))


def _parts(container: Any) -> list[Any]:
    return [place[key] for place, key in nodes(container)]


@st.composite
def rearranged_text(draw: st.DrawFn, corpus: list[str]) -> str:
    """Draw a text of `corpus` with lines or numbers of another, numbers in other units, look-alikes, or keys twice."""
    text, donor = draw(st.sampled_from(corpus)), draw(st.sampled_from(corpus))
    lines, others = text.splitlines(keepends=True), donor.splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 4))):
        if not lines or not others:
            break
        at, from_ = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(others) - 1))
        how = draw(st.sampled_from(["graft", "twice", "unit", "number", "alike", "words", "indent"]))
        numbers = list(NUMBER.finditer(lines[at]))
        if how == "graft":
            lines[at : at + 1] = others[from_ : from_ + draw(st.integers(1, 5))]
        elif how == "twice":
            lines.insert(draw(st.integers(0, len(lines))), lines[at])
        elif how == "alike":
            lines[at] = lines[at].translate(LOOK_ALIKE)
        elif how == "words":
            words = lines[at].split(" ")
            one, two = draw(st.integers(0, len(words) - 1)), draw(st.integers(0, len(words) - 1))
            words[one], words[two] = words[two], words[one]
            lines[at] = " ".join(words)
        elif how == "indent":
            lines[at] = draw(st.sampled_from(["\t", " ", "\u00a0", "\r\n"])) + lines[at]
        elif numbers:
            found = draw(st.sampled_from(numbers))
            number = float(found[0][:300])
            spelt = f"{number * draw(st.sampled_from(UNITS)):g}" if how == "unit" else str(draw(as_text(number)))
            lines[at] = lines[at][: found.start()] + spelt + lines[at][found.end() :]
    return _written(draw, "".join(lines))


def _written(draw: st.DrawFn, text: str) -> str:
    """Return a text as a careless program may write it: marked, cut within a character, or with a key twice."""
    how = draw(st.sampled_from(["as it is", "as it is", "as it is", "mark", "cut", "twice", "ends"]))
    if how == "mark":
        return MARK + text
    if how == "cut":
        data = (text + "é").encode("utf-8", "surrogatepass")
        return data[: draw(st.integers(0, len(data)))].decode("utf-8", "replace")
    if how == "twice" and (key := re.search(r'"[^"]*": [^,{}\[\]]+, ', text)):
        return text.replace(key[0], key[0] * 2, 1)
    return text.replace("\n", "\r\n") + "\0" if how == "ends" else text
