"""Published runs alongside their predictions: which is nearest to a question, and what it says."""

from __future__ import annotations

import json

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import ROOT
from ui.data import nearest, sentence


def row(name, gpus, billions, gpu="h100-sxm", framework="torchtitan", step=0.1, memory=None):
    about = {"model": "m", "parameters": billions * 1e9, "gpu": gpu, "gpus": gpus, "framework": framework}
    return {"id": name, "about": about, "error": {"step": step, "memory": memory}, "file": "some_runs.json"}


ROWS = (
    row("same", 8, 8),
    row("larger", 128, 70),
    row("other-gpu", 16, 8, gpu="a100-sxm-80gb"),
    row("other-framework", 16, 8, framework="megatron-lm"),
    row("unmeasured", 16, 8, step=None),
    {**row("unknown", 16, 8), "about": None},
)


@pytest.mark.parametrize(
    ("gpus", "billions", "gpu", "framework", "wanted"),
    [
        (16, 8, "h100-sxm", "torchtitan", "same"),
        (256, 70, "h100-sxm", "torchtitan", "larger"),
        (16, 8, "a100-sxm-80gb", "torchtitan", "other-gpu"),
        (16, 8, "h100-sxm", "megatron-lm", "other-framework"),
    ],
)
def test_the_nearest_run_is_the_most_alike(gpus, billions, gpu, framework, wanted):
    found = nearest(ROWS, parameters=billions * 1e9, gpu=gpu, gpus=gpus, framework=framework)

    assert found["id"] == wanted


def test_nothing_is_near_where_no_row_says_what_it_is_about():
    assert nearest([ROWS[-1]], parameters=8e9, gpu="h100-sxm", gpus=8, framework="torchtitan") is None


def test_a_run_is_told_with_the_signs_of_its_errors():
    assert sentence(row("a", 64, 174.6, step=-0.061, memory=0.002)) == (
        "175 B parameters on 64 x h100-sxm with torchtitan (some runs): step predicted 6% too short, memory as measured"
    )
    assert "step predicted 10% too long" in sentence(row("a", 64, 8))


def test_the_kept_table_says_what_its_rows_are_about():
    rows = json.loads((ROOT / "examples" / "validation" / "cases.json").read_text())["rows"]

    assert all(one["about"]["gpus"] > 0 for one in rows if one["predicted"])
