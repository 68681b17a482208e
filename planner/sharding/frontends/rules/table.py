"""Which rule knows which ATen operator."""

from __future__ import annotations

from collections.abc import Callable

from planner.sharding.formulas.formula import parse_formula
from planner.sharding.frontends.rules.elements import (
    POINTWISE,
    RESHAPES,
    SAME_ELEMENTS,
    expand,
    permute,
    pointwise,
    repeat,
    repeat_interleave,
    reshape,
    same_elements,
    transpose,
)
from planner.sharding.frontends.rules.parts import cat, pieces, scatter, select, sliced
from planner.sharding.frontends.rules.products import (
    GROUPED_PRODUCTS,
    addmm,
    convolution,
    einsum,
    embedding,
    grouped_product,
    indexed_rows,
    linear,
    matmul,
)
from planner.sharding.frontends.rules.reductions import (
    REDUCTIONS,
    along_one_dim,
    attention,
    cross_entropy,
    group_norm,
    norm,
    over_space,
    reduction,
    softmax,
    topk,
)
from planner.sharding.frontends.rules.rotations import ROTARY
from planner.sharding.frontends.rules.statement import LETTERS, Call, NotKnownError, Shape, Statement, result_axes
from planner.sharding.operators.roles import shape_of
from simulator.sharded.graph import GraphNode


def statements(node: GraphNode, shapes: dict[str, Shape]) -> list[Statement]:
    """Return the statements of one node of a graph; `shapes` are of all tensors before it."""
    call = Call(node, shapes)
    if node.op == ROTARY:
        return [call.statement(f"rope({', '.join(call.tensor(at) for at in range(3))})")]
    rule = grouped_product if node.op in GROUPED_PRODUCTS else _RULES.get(call.name)
    if rule is None and call.name in POINTWISE:
        rule = pointwise
    if rule is not None and (node.op.startswith("aten.") or node.op in GROUPED_PRODUCTS):
        try:
            found = rule(call)
        except (NotKnownError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            found = []  # arguments that the operator does not take, from a file
        if found and _are_understood(found, shapes):
            return found
    return [opaque(call)]


def _are_understood(lines: list[Statement], shapes: dict[str, Shape]) -> bool:
    """Return whether every formula without an annotation makes a result of the shape that was captured."""
    known = shapes | {line.result: line.shape for line in lines}
    return all(
        line.annotation or shape_of(parse_formula(line.formula, line.operands), known) == line.shape for line in lines
    )


def opaque(call: Call) -> Statement:
    """Operands whole, result whole."""
    operands = call.node.operands()
    parts: list[str] = []
    sizes: dict[str, int] = {}
    for number, name in enumerate(operands):
        parts.append(" ".join(f"u{number}{LETTERS[d]}^" if n > 1 else "1" for d, n in enumerate(call.shapes[name])))
    dims, more = result_axes(call.node.shape)
    sizes |= more
    return call.statement(
        f"opaque_{call.name}({', '.join(operands)})",
        f"{', '.join(parts)} -> {' '.join(dims)}",
        sizes=sizes,
        known=False,
    )


_RULES: dict[str, Callable[[Call], list[Statement]]] = {
    **dict.fromkeys(SAME_ELEMENTS, same_elements),
    **dict.fromkeys(RESHAPES, reshape),
    **dict.fromkeys(("transpose", "t", "mT", "swapaxes"), transpose),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), pieces),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), softmax),
    **dict.fromkeys(("layer_norm", "rms_norm"), norm),
    **dict.fromkeys(("cumsum", "cumprod", "flip"), along_one_dim),
    **dict.fromkeys(("matmul", "mm", "bmm"), matmul),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(
        (
            "max_pool2d",
            "avg_pool2d",
            "adaptive_avg_pool2d",
            "upsample_nearest2d",
            "upsample_bilinear2d",
            "pad",
            "constant_pad_nd",
        ),
        over_space,
    ),
    "permute": permute,
    "expand": expand,
    "repeat_interleave": repeat_interleave,
    "repeat": repeat,
    "scatter": scatter,
    "slice": sliced,
    "select": select,
    "cat": cat,
    "linear": linear,
    "addmm": addmm,
    "einsum": einsum,
    "embedding": embedding,
    "index": indexed_rows,
    "group_norm": group_norm,
    "scaled_dot_product_attention": attention,
    "cross_entropy_loss": cross_entropy,
    "topk": topk,
}
