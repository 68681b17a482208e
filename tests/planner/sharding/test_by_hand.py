"""Placements as people write them, of matrices by themselves and side by side, and of the rows of attention."""

from __future__ import annotations

from planner.sharding.frontends.by_hand import placed_by_hand
from planner.sharding.frontends.captured import Constraints, captured_problem
from planner.sharding.layouts.layout import make_mesh
from simulator.sharded.graph import CapturedGraph, GraphInput, GraphNode


def node(name: str, op: str, shape: tuple[int, ...], *args, index=None) -> GraphNode:
    tensors = tuple({"tensor": one} if isinstance(one, str) else one for one in args)
    return GraphNode(name=name, op=f"aten.{op}", args=tensors, shape=shape, dtype="f32", index=index)


def test_of_matrices_side_by_side_the_columns_of_each_are_split() -> None:
    """Megatron-LM's split of a block whose queries, keys and values are one product (1909.08053, section 3)."""
    rows, heads = (2, 8, 32), (2, 4, 8, 8)
    shapes = {"qkv": (96, 32), "qkv_bias": (96,), "out": (32, 32), "out_bias": (32,)}
    nodes = [node("linear_0", "linear.default", (2, 8, 96), "x", "qkv", "qkv_bias")]
    for number, name in enumerate("qkv"):
        nodes += [
            node(name, "chunk.default", rows, "linear_0", 3, -1, index=number),
            node(f"{name}_1", "view.default", (2, 8, 4, 8), name, [2, 8, 4, 8]),
            node(f"{name}_2", "transpose.int", heads, f"{name}_1", 1, 2),
        ]
    nodes += [
        node("mixed_0", "scaled_dot_product_attention.default", heads, "q_2", "k_2", "v_2"),
        node("mixed_1", "transpose.int", (2, 8, 4, 8), "mixed_0", 1, 2),
        node("mixed_2", "reshape.default", rows, "mixed_1", [2, 8, 32]),
        node("linear_1", "linear.default", rows, "mixed_2", "out", "out_bias"),
    ]
    parameters = [GraphInput(name=n, shape=s, dtype="f32", kind="parameter", target=n) for n, s in shapes.items()]
    graph = CapturedGraph(
        inputs=(GraphInput(name="x", shape=rows, dtype="f32"), *parameters), nodes=tuple(nodes), outputs=("linear_1",)
    )
    problem = captured_problem(graph, make_mesh(["d"], [4]), Constraints(choose=tuple(shapes))).problem

    whole, split, in_pieces = placed_by_hand(problem)

    assert not any(any(whole.input_layouts[name].dims) for name in shapes)
    assert {name: split.input_layouts[name].dims for name in shapes} == {
        "qkv": ((3, "d"), ()),
        "qkv_bias": ((3, "d"),),
        "out": ((), ("d",)),
        "out_bias": ((),),
    }
    of_rows = {name: one.dims for name, one in in_pieces.pins.items() if name not in problem.pins}
    assert of_rows == dict.fromkeys(("q_2", "k_2", "v_2", "mixed_0"), ((), (), ("d",), ()))
