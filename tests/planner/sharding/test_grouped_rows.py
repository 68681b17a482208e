"""Rows by groups, as tokens by their experts: every rank has the rows of its own groups, and what keeps zeros runs on
them.
"""

from __future__ import annotations

import numpy as np
import pytest

from planner.sharding.operators.graph import GraphBuilder
from planner.sharding.operators.grouped_rows import group_axis, grouped_rows
from planner.sharding.operators.work import operator_work
from tests.planner.sharding import cases, virtual_ranks

EXPERTS = [
    "up = grouped_mm(x, w, ends)",
    "gate = grouped_mm(x, v, ends)",
    "inner = silu(gate) * up",
    "made = grouped_mm(inner, down, ends)",
    "y = made * shares",
]
INPUTS = {
    "x": "m k",
    "w": "g k f",
    "v": "g k f",
    "down": "g f k",
    "ends": "g: i64",
    "shares": "m one",
}
SIZES = {"m": 12, "k": 8, "f": 32, "g": 4, "one": 1}


ENDS = {"ends": np.array([3, 3, 7, 12]), "other": np.array([1, 6, 8, 12])}
EXPERT = {"w": "S(0)", "v": "S(0)", "down": "S(0)"}


def kinds_of(mesh, placed, ops=EXPERTS, **inputs):
    """The collectives of a plan whose last result is whole, every tensor of which is compared with one process."""
    tensors = {
        name: f"{dims}: {placed[name]}" if name in placed else dims for name, dims in {**INPUTS, **inputs}.items()
    }
    sizes = {**SIZES, "g": 3} if mesh == {"ep": 3} else SIZES
    whole = " ".join("R" for _ in mesh)
    problem = cases.problem(cases.case("experts", mesh, ops, tensors, sizes, {"y": whole}))
    ends = {name: found[-sizes["g"] :] for name, found in ENDS.items() if name in problem.inputs}
    return [one.kind for one in virtual_ranks.run(problem, {**cases.values(problem), **ends}).collectives]


@pytest.mark.parametrize(
    ("mesh", "placed", "kinds"),
    [
        ({"ep": 2}, EXPERT, ["all_reduce"]),
        ({"ep": 3}, EXPERT, ["all_reduce"]),
        ({"ep": 4}, {**EXPERT, "x": "S(0)"}, ["all_gather", "all_reduce"]),
        ({"ep": 2, "tp": 2}, {"w": "S(0) S(2)", "v": "S(0) S(2)", "down": "S(0) S(1)"}, ["all_reduce"]),
        ({"dp": 2, "ep": 2}, {name: f"R {at}" for name, at in EXPERT.items()}, ["all_reduce"]),
    ],
)
def test_experts_run_where_their_matrices_are(mesh, placed, kinds) -> None:
    assert kinds_of(mesh, placed) == kinds


@pytest.mark.parametrize(
    ("changed", "exchanged"),
    [
        ({2: "inner = sigmoid(gate) * gate.exp() + up"}, 2),  # neither is zero at zero
        ({1: "gate = grouped_mm(x, v, other)"}, 2),  # rows of other groups
        ({2: "inner = (silu(gate) * up).flip(0)"}, 1),  # rows change places
        ({2: "inner = silu(gate) * up", 3: "made = grouped_mm(inner, down, other)"}, 1),
        ({4: "y = made.softmax(-1) * shares"}, 0),
        ({2: "inner = (gate + x.sum()) * gate"}, 0),
    ],
)
def test_what_needs_all_rows_has_them(changed, exchanged) -> None:
    """Every tensor is right, and some exchange comes before the last operator where zeros are not kept."""
    ops = [changed.get(number, text) for number, text in enumerate(EXPERTS)]

    assert len(kinds_of({"ep": 2}, EXPERT, ops, other="g: i64")) > exchanged


def test_rows_stand_by_groups_as_far_as_zeros_are_kept() -> None:
    builder = GraphBuilder()
    for name, dims in INPUTS.items():
        axes = dims.partition(":")[0].split()
        builder.add_input(name, [SIZES[axis] for axis in axes], "i64" if name == "ends" else "f64", axes=axes)
    for text in (
        *EXPERTS[:3],
        "transposed = inner.T",
        "halves = inner.chunk(2, -1)[0]",
        "more = exp(inner)",
        "zero = inner * 2.0 - up",
    ):
        builder.apply(text)

    found = grouped_rows(builder.build().operators)

    assert found == dict.fromkeys(("up", "gate", "inner", "halves", "zero"), "ends")


def test_a_grouped_product_takes_one_matrix_a_row() -> None:
    """On a rank that has half of the groups, half of the rows."""
    builder = GraphBuilder()
    for name, shape in (("x", (12, 8)), ("w", (4, 8, 32)), ("ends", (4,))):
        builder.add_input(name, shape, "i64" if name == "ends" else "f64")
    builder.apply("y = grouped_mm(x, w, ends)")
    graph = builder.build()
    (operator,) = graph.operators
    whole = {axis: np.array([float(size)]) for axis, size in operator.sizes.items()}
    half = {**whole, group_axis(operator): np.array([2.0])}

    assert [float(operator_work(operator, graph.tensors, sizes).flops[0]) for sizes in (whole, half)] == [
        2 * 12 * 8 * 32,
        2 * 6 * 8 * 32,
    ]
