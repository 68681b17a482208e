"""Lines that are alike are parsed once: the operators are those that parsing every line would give."""

from __future__ import annotations

from functools import partial

import pytest

from planner.sharding.frontends.decoder import decoder_case
from planner.sharding.operators.graph import GraphBuilder, RepeatedLines
from planner.sharding.operators.operator import Operator, parse_operators
from planner.sharding.plans.report import Limits, planned_case
from planner.sharding.problem.deadline import Deadline
from planner.sharding.problem.problem import parse_problem
from simulator.config.hf_config import load_model
from topology.catalog.cluster_file import load_cluster


def test_layers_are_what_parsing_each_of_them_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    case = decoder_case(load_model("qwen3-8b"), {"data": 2, "model": 2}, layers=3, batch=4, seq_len=64)
    together = parse_problem(case).operators
    monkeypatch.setattr(RepeatedLines, "parse", lambda _, text, tensors, parse: parse(text, tensors))

    assert together == parse_problem(case).operators


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a = x.t()", "b = x.T()"),  # methods, though there are tensors of these names
        ("a = einsum('x,w->xw', x, w)", "b = einsum('w,x->wx', w, x)"),
        ("a = x.sum(dim=0)", "b = x.sum(dim=1)"),
        ("a = x + t :: p q, q p -> p q", "b = t + x :: u v, v u -> u v"),
        ("a, a2 = x.chunk(2, 0)", "b, b2 = T.chunk(2, 0)"),
        ("a = linear(s, x, w)", "b = linear(s, t, w)"),
    ],
)
def test_a_second_line_is_not_taken_for_another_one(first: str, second: str) -> None:
    builder = GraphBuilder()
    for name, shape in (("x", (4, 4)), ("t", (4, 4)), ("T", (4, 4)), ("w", (4,)), ("s", (2, 4))):
        builder.add_input(name, shape)
    lines, made = RepeatedLines(), dict(builder.tensors)

    def outcome(parse) -> list[Operator] | str:
        try:
            return parse()
        except Exception as error:  # noqa: BLE001 - an error is the same error, too
            return f"{type(error).__name__}: {error}"

    def plain(text: str, tensors) -> list[Operator]:
        return parse_operators(text, tensors, {})

    for line in (first, second):
        once, again = outcome(partial(plain, line, made)), outcome(partial(lines.parse, line, made, plain))
        assert again == once
        if isinstance(once, list):
            made |= {operator.result.name: operator.result for operator in once}


@pytest.mark.parametrize("mesh", [{"data": 4, "model": 2}, {"model": 8}])
def test_a_limit_that_is_over_when_the_case_is_read_leaves_an_answer_with_its_gap(mesh: dict[str, int]) -> None:
    case = decoder_case(load_model("llama3-8b"), mesh, layers=2, batch=8, seq_len=64)
    row, found = planned_case(case, 1, load_cluster("dgx-h100"), limits=Limits(Deadline.after(-1.0)))

    assert found is not None
    assert row["rejected"] is None
    assert 0 <= row["cost"]["gap"] < 1
    assert row["cost"]["bound"] <= row["cost"]["value"]
