"""nvFuser's figures as programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli import main
from planner.sharding.plans.plan import plan_sharding
from planner.sharding.problem.problem import parse_problem
from tests.tools.sharding_figures import FOLDER, figures

CASES = {case["id"]: case for case in json.loads(Path(FOLDER, "figures.json").read_text())["cases"]}
# nvFuser's document, "Communication-computation decomposition" and the figures after it: what each `set` and `sum`
# becomes.
COMMUNICATION = {
    "tensor parallelism": ["all_reduce"],
    "sequence parallelism": ["all_gather", "reduce_scatter"],
    "distributed data parallelism": [],
    "data parallelism across nodes, tensor parallelism within": ["all_reduce"],
    "fully sharded data parallelism": ["all_gather", "all_gather"],
}


@pytest.mark.parametrize("name", COMMUNICATION)
def test_each_figure_communicates_as_its_document_says(name) -> None:
    plan = plan_sharding(parse_problem(CASES[name]))

    assert [one.kind for one in plan.collectives] == COMMUNICATION[name]


def test_the_printed_programs_are_those_of_the_compiler() -> None:
    assert (FOLDER / "figures.md").read_text() == figures()


def test_a_listing_is_the_program_in_the_notation_of_the_document(capsys) -> None:
    assert main(["shard", str(FOLDER / "figures.json"), "--listing", "--json"]) == 0

    rows = json.loads(capsys.readouterr().out)["cases"]
    text = (FOLDER / "figures.md").read_text()
    assert all(f"```\n{row['listing']}\n```" in text for row in rows)


def test_a_program_on_very_many_ranks_is_chosen_and_not_simulated(tmp_path, capsys) -> None:
    one = CASES["tensor parallelism"]
    inputs = {name: {**each, "placements": ["R", *each["placements"]]} for name, each in one["inputs"].items()}
    mesh = {"names": ["DIDy", "DIDx"], "shape": [1 << 16, 4]}
    case = {**one, "mesh": mesh, "inputs": inputs, "pins": {"out": ["R", "R"]}}
    at = tmp_path / "case.json"
    at.write_text(json.dumps(case))

    assert main(["shard", str(at), "--cluster", "dgx-h100", "--gpus", str(1 << 18), "--json"]) == 0

    (row,) = json.loads(capsys.readouterr().out)["cases"]
    assert "time_s" not in row
    assert row["not_simulated"] == "programs on more than 32,768 ranks are not simulated"
    assert [one["kind"] for one in row["collectives"]] == ["all_reduce"]
