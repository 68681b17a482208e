"""Rotary positions that were captured as separate operators become one, and nothing else does."""

from __future__ import annotations

import pytest

from planner.sharding.frontends.captured import Constraints, captured_problem
from planner.sharding.layouts.layout import make_mesh
from planner.sharding.ops.rotary import ROTARY, with_rotations
from simulator.sharded.graph import CapturedGraph, GraphInput, GraphNode

Q = (2, 8, 4, 16)
HALF = (2, 8, 4, 8)


def node(name: str, op: str, *args, shape=Q, dtype="bf16", index=None) -> GraphNode:
    tensors = tuple({"tensor": one} if isinstance(one, str) else one for one in args)
    return GraphNode(name=name, op=f"aten.{op}", args=tensors, shape=shape, dtype=dtype, index=index)


def graph(*, cast: bool = True, slices: bool = False, swapped: bool = False, more: tuple[GraphNode, ...] = ()):
    wide, x = ("f32", "w") if cast else ("bf16", "x")
    halves = ("a", "b")
    nodes = [node("w", "to.dtype", "x", {"dtype": "f32"}, dtype="f32")] if cast else []
    if slices:
        nodes += [
            node("a", "slice.Tensor", x, 3, 0, 8, shape=HALF, dtype=wide),
            node("b", "slice.Tensor", x, 3, 8, 2**63 - 1, shape=HALF, dtype=wide),
        ]
    else:
        nodes += [node(n, "chunk.default", x, 2, -1, shape=HALF, dtype=wide, index=i) for i, n in enumerate(halves)]
    first, second = reversed(halves) if swapped else halves
    nodes += [
        node("n", "neg.default", second, shape=HALF, dtype=wide),
        node("r", "cat.default", [{"tensor": "n"}, {"tensor": first}], -1, dtype=wide),
        node("xc", "mul.Tensor", x, "cos", dtype=wide),
        node("rs", "mul.Tensor", "r", "sin", dtype=wide),
        node("s", "add.Tensor", "xc", "rs", dtype=wide),
    ]
    nodes += [node("y", "to.dtype", "s", {"dtype": "bf16"})] if cast else []
    angles = [GraphInput(name=name, shape=(8, 1, 16), dtype=wide, kind="buffer") for name in ("cos", "sin")]
    inputs = (GraphInput(name="x", shape=Q, dtype="bf16"), *angles)
    return CapturedGraph(
        inputs=inputs, nodes=(*nodes, *more), outputs=("y" if cast else "s", *(one.name for one in more))
    )


@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("slices", [True, False])
def test_a_rotation_is_one_operator_of_x_and_its_angles(cast: bool, slices: bool) -> None:
    (one,) = with_rotations(graph(cast=cast, slices=slices), ()).nodes

    assert (one.name, one.op, one.operands()) == ("y" if cast else "s", ROTARY, ("x", "cos", "sin"))
    assert (one.shape, one.dtype) == (Q, "bf16")


@pytest.mark.parametrize(
    ("captured", "kept"),
    [
        (graph(swapped=True), ()),  # another rotation: by minus the angles
        (graph(), ("r",)),  # a tensor that a user has placed
        (graph(more=(node("z", "relu.default", "r", dtype="f32"),)), ()),  # one that something else uses
    ],
)
def test_what_is_no_rotation_or_is_used_inside_stays_as_it_is(captured: CapturedGraph, kept: tuple[str, ...]) -> None:
    assert with_rotations(captured, kept) == captured


def test_tokens_and_heads_of_a_rotation_may_be_sharded_and_pairs_may_not() -> None:
    found = captured_problem(graph(), make_mesh(["d"], [2]), Constraints(placements={"x": ["S(1)"]}))
    (operator,) = found.problem.operators
    tokens, pairs = operator.dims[1][0], operator.dims[3][0]

    assert tokens not in operator.roles.unsharded
    assert pairs in operator.roles.unsharded
    assert dict(operator.operands)["cos"][0] == operator.dims[1]  # an angle for each token
