"""Damaged inputs of every format end in an answer with sound numbers or in an error of ours, never otherwise.

Reading them starts no process, reaches no network and writes nowhere else.

The gate tries few inputs of each format, the same every time. The nightly tests try more, and other inputs each time;
`MESHWRIGHT_FUZZ_INPUTS` says how many.
"""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.formats import FORMATS, wrong_numbers
from tests.fuzz.watch import watching
from topology.errors import PlannerError

INPUTS = 10
MANY_INPUTS = int(os.environ.get("MESHWRIGHT_FUZZ_INPUTS", "1000"))


@pytest.mark.parametrize("name", FORMATS)
def test_no_input_breaks_a_reader(name: str, tmp_path: Path) -> None:
    try_inputs(name, tmp_path, INPUTS, derandomize=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FORMATS)
def test_none_of_many_inputs_breaks_a_reader(name: str, tmp_path: Path) -> None:
    try_inputs(name, tmp_path, MANY_INPUTS, derandomize=False)


def try_inputs(name: str, tmp_path: Path, inputs: int, *, derandomize: bool) -> None:
    one = FORMATS[name]

    @settings(max_examples=inputs, derandomize=derandomize, database=None, suppress_health_check=list(HealthCheck))
    @given(one.inputs())
    def check(text: str) -> None:
        shown = []
        with watching(tmp_path) as seen, suppress(PlannerError):
            shown = one.read(text, tmp_path / "input.json")
        assert seen == []
        assert list(wrong_numbers(shown)) == []

    check()
