"""One format that is damaged: what draws its inputs, and what reads them as the commands do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.mutations import JUNK, damaged_json, damaged_text
from tests.fuzz.structure import rearranged_json, rearranged_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """`inputs` draws texts; `read` uses one, written to the given path, and returns what would be shown.

    `read` may raise `PlannerError` and nothing else.
    """

    inputs: Callable[[], st.SearchStrategy[str]]
    read: Callable[[str, Path], list[Any]]


def json_inputs(corpus: Callable[[], list[Any]]) -> Callable[[], st.SearchStrategy[str]]:
    return lambda: st.one_of(damaged_json(corpus()), rearranged_json(corpus()), JUNK.map(json.dumps))


def text_inputs(corpus: Callable[[], list[str]]) -> Callable[[], st.SearchStrategy[str]]:
    return lambda: st.one_of(damaged_text(corpus()), rearranged_text(corpus()), st.text(max_size=400))
