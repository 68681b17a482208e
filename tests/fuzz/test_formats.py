"""Damaged inputs of every format end in an answer with sound numbers or in an error of ours, never otherwise.

Reading them starts no process, reaches no network and writes nowhere else.

`MESHWRIGHT_FUZZ_INPUTS=10000 pytest tests/fuzz` tries more than the gate does, and other inputs each time.
"""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.formats import FORMATS, wrong_numbers
from tests.fuzz.watch import watching
from topology.errors import PlannerError

ASKED = os.environ.get("MESHWRIGHT_FUZZ_INPUTS")
INPUTS = int(ASKED) if ASKED else 200


@pytest.mark.parametrize("name", FORMATS)
def test_no_input_breaks_a_reader(name: str, tmp_path: Path) -> None:
    one = FORMATS[name]

    @settings(
        max_examples=INPUTS,
        derandomize=not ASKED,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(one.inputs())
    def check(text: str) -> None:
        shown = []
        with watching(tmp_path) as seen, suppress(PlannerError):
            shown = one.read(text, tmp_path / "input.json")
        assert seen == []
        assert list(wrong_numbers(shown)) == []

    check()
