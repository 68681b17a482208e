"""Programs, files, pictures and explanations written of captured graphs, without torch."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import defusedxml.ElementTree as ET  # noqa: N817
import msgspec
import pytest

from planner.cli import main
from planner.sharding.answer import answer_request
from planner.sharding.backends.runnable import simulate_program
from planner.sharding.plans.explanation import explain_plan
from simulator.program.check import check
from simulator.sharded.program import Exchange, read_program
from topology.catalog.clusters import cluster
from topology.errors import BadInput

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "sharding" / "captured.json"


@pytest.fixture(scope="module")
def answer():
    return answer_request(json.loads(EXAMPLE.read_text()), where="the example")


def test_a_program_has_no_fault_and_comes_to_an_end(answer) -> None:
    program = answer.written.program

    assert check(program.program()) == []
    run = simulate_program(answer.written, answer.problem, cluster("dgx-h100"))
    assert run.step_s > 0
    text = msgspec.json.encode(program)
    assert msgspec.json.encode(read_program(json.loads(text), where="itself")) == text


def test_gradients_of_fully_sharded_parameters_are_scattered_where_they_were_gathered(answer) -> None:
    kinds = [work.kind for work in answer.written.program.work.values() if isinstance(work, Exchange)]

    # forward gathers two weights and a bias over data, and sums over model; backward is the dual of each, and sums the
    # gradient of the bias that every rank of data has
    assert kinds[:4] == ["all_gather", "all_gather", "all_reduce", "all_gather"]
    assert kinds.count("reduce_scatter") == 3
    assert set(kinds[4:]) == {"all_reduce", "reduce_scatter"}


def test_every_collective_says_why_it_is_there_and_what_is_next_best(answer) -> None:
    explained = explain_plan(answer.problem, answer.plan, cluster("dgx-h100"))

    assert len(explained) == len(answer.plan.collectives)
    for one in explained:
        assert one.why
        assert one.instead
        assert one.seconds > 0
    total = next(one for one in explained if one.kind == "all_reduce")
    assert "partial sum on the ranks of model" in total.why


def test_the_picture_shows_all_operators_and_collectives(answer, tmp_path, capsys) -> None:
    at = tmp_path / "plan.svg"
    assert main(["shard", str(EXAMPLE), "--picture", str(at), "--explain"]) == 0

    words = [element.text or "" for element in ET.fromstring(at.read_text()).iter() if element.tag.endswith("text")]
    for operator in answer.problem.operators:
        assert any(operator.result.name in word for word in words)
    assert sum("all_gather over data" in word for word in words) == 3
    assert "why" in capsys.readouterr().out


def test_the_python_file_is_python_and_names_no_module_of_a_config(tmp_path) -> None:
    at = tmp_path / "placed.py"
    case = json.loads(EXAMPLE.read_text())
    case["id"] = 'a"""\nimport os\nos.abort()\n"""'
    (tmp_path / "case.json").write_text(json.dumps(case))
    assert main(["shard", str(tmp_path / "case.json"), "--python", str(at)]) == 0

    tree = ast.parse(at.read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert all(name.startswith("torch") for name in imported)
    assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"axes": {"nobody": "a"}}, "names no input"),
        ({"axes": {"x": "batch"}}, "2 dims"),
        ({"parameters": {"width": "model"}}, "no input has an axis"),
        ({"parameters": {"mlp": "pp"}}, "no axis 'pp'"),
        ({"parameters": {"mlp": "model", "embed": "model"}}, "shards one dim"),
        ({"placements": {"nothing": ["R", "R"]}}, "no tensor of the graph"),
        ({"policy": "guess"}, "unknown policy"),
        ({"depth": 3}, "unknown field"),
    ],
)
def test_what_does_not_fit_the_graph_is_refused(change, what) -> None:
    with pytest.raises(BadInput) as refused:
        answer_request({**json.loads(EXAMPLE.read_text()), **change}, where="the example")
    assert what in str(refused.value)
