"""`planner export` of a serving plan writes the files that `planner suggest --out FOLDER` does, and refuses what they
cannot be.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.planner.conftest import Finished

ASKED = ("--task", "serve", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "2", "--isl", "64", "--osl", "8")


@pytest.fixture
def saved(planner: Callable[..., Finished], tmp_path: Path) -> Path:
    """Return the folder of a plan with its files."""
    folder = tmp_path / "made"
    assert planner("suggest", *ASKED, "--out", str(folder)).returncode == 0
    return folder


def test_files_are_those_that_suggest_writes(planner: Callable[..., Finished], saved: Path, tmp_path: Path) -> None:
    plan, again = str(saved / "plan.json"), tmp_path / "again"
    assert planner("export", plan, "--all", "--out", str(again)).returncode == 0
    files = {path.name: path.read_text() for path in saved.iterdir() if path.name != "plan.json"}
    assert {path.name: path.read_text() for path in again.iterdir()} == files

    assert planner("export", plan, "--to", "vllm").stdout == files["serve.sh"]
    found = planner("export", plan, "--to", "compose", "--name", "/weights", "--json").document
    assert found["text"] == files["compose.yaml"].replace("meta-llama/Meta-Llama-3.1-8B", "/weights")


def test_what_is_in_the_way_and_other_engines_are_refused(planner: Callable[..., Finished], saved: Path) -> None:
    plan = str(saved / "plan.json")
    for arguments, words in (
        (("--all", "--out", str(saved)), "serve.sh exists"),
        (("--to", "sglang"), "the plan serves with vllm"),
        (("--to", "torchtitan"), "the plan serves with vllm"),
        (("--to", "script", "--id", "a"), "--id"),
    ):
        done = planner("export", plan, *arguments)
        assert done.returncode == 2, done.output
        assert words in " ".join(done.output.split())
