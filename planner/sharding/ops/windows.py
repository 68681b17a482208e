"""Convolutions, and what slides windows over space: pooling, resampling, padding."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from planner.sharding.ops.aten import AtenCall, NotKnownError, Statement, letters, result_axes, written
from planner.sharding.ops.axis_flow import NotUnderstood, Value
from planner.sharding.ops.op import Op
from planner.sharding.ops.products import with_bias
from planner.sharding.ops.syntax import is_none, number_of
from planner.sharding.ops.walker import Call


def _convolved(call: Call) -> Value:
    """A convolution: batch and channels as in a product; what it slides over, and its window, are needed whole."""
    flow, x, w = call.flow, call.value(0), call.value(1, "weight")
    window = len(w.dims) - 2
    if window < 1 or len(x.dims) != len(w.dims):
        raise NotUnderstood("a convolution without a batch")
    groups = call.number(6, "groups", 1)
    for dim in (*x.dims[2:], *w.dims[2:]):
        flow.keep_unsharded(dim, f"{call.name} slides a window over it", contradicts=True)
    spatial = tuple(flow.dim(dim) for dim in x.dims[2:])
    sized = _spatial_sizes(call, [flow.size(d) for d in spatial], [flow.size(d) for d in w.dims[2:]])
    made = tuple(flow.new_dim(size) for size in sized)
    for dim in made:
        flow.keep_unsharded(dim, f"{call.name} makes it of windows")
    left = Value((x.dims[0], w.dims[0], *made), flow.pending_of_product([x, w], call.name))
    if groups == 1:
        over = flow.unify(x.dims[1], w.dims[1], call.name)
        product_ = flow.contract([over], left, "sum", call.name)
    else:
        for dim in (x.dims[1], *w.dims[:2]):
            flow.keep_unsharded(dim, f"{call.name} works in {groups} groups of channels")
        product_ = left
    bias = call.node(2, "bias")
    if bias is None or is_none(bias):
        return product_
    vector = Value((*call.walker.value(bias).dims, *[()] * window))
    return flow.add([product_, vector], "the bias")


def _pooled(call: Call) -> Value:
    """Pooling over windows of the last dims: `max_pool2d(x, kernel, stride, padding)`."""
    flow, x = call.flow, call.flow.finish(call.value(0), "pooling needs finished sums")
    window = int(call.name[-2])
    if len(x.dims) <= window:
        raise NotUnderstood("pooling without channels")
    kernels = call.numbers(1, "kernel_size") if call.node(2, "stride") is None else [call.number(1, "kernel_size", 1)]
    sizes = [flow.size(dim) for dim in x.dims[-window:]]
    kernels = (kernels or [1]) * (window if len(kernels or [1]) == 1 else 1)
    step, padding = call.number(2, "stride", kernels[0]), call.number(3, "padding", 0)
    made = []
    for dim, size, kernel in zip(x.dims[-window:], sizes, kernels, strict=True):
        flow.keep_unsharded(dim, f"{call.name} slides a window over it", contradicts=True)
        made.append(flow.new_dim((size + 2 * padding - kernel) // step + 1))
        flow.keep_unsharded(made[-1], f"{call.name} makes it of windows")
    return Value((*x.dims[:-window], *made))


def _spatial_sizes(call: Call, sizes: Sequence[int], windows: Sequence[int]) -> list[int]:
    def each(at: int, keyword: str, default: int) -> list[int]:
        node = call.node(at, keyword)
        if isinstance(node, ast.Tuple | ast.List):
            found = [number_of(n) for n in node.elts]
        else:
            found = [default if node is None else number_of(node)] * len(sizes)
        if any(n is None for n in found) or len(found) != len(sizes):
            raise NotUnderstood(f"{call.name} whose {keyword} is not written out")
        return [n for n in found if n is not None]

    strides, padding, dilation = each(3, "stride", 1), each(4, "padding", 0), each(5, "dilation", 1)
    return [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(sizes, windows, strides, padding, dilation, strict=True)
    ]


# --- captured


def _capture_convolution(call: AtenCall) -> list[Statement]:
    x, w = call.shape(0), call.shape(1)
    if call.argument(6, 1) != 1 or len(x) not in {3, 4, 5} or len(w) != len(x):
        raise NotKnownError
    args = (call.argument(0), call.argument(1), None, *call.node.args[3:])
    rest = [one if isinstance(one, int) else f"({', '.join(str(int(n)) for n in one)},)" for one in call.node.args[3:6]]
    formula = f"{call.name}({', '.join([call.tensor(0), call.tensor(1), 'None', *map(str, rest)])})"
    return with_bias(call, formula, call.optional_tensor(2, "bias"), 1, args=args)


def _capture_over_space(call: AtenCall) -> list[Statement]:
    """Pooling, resampling and padding: the dims that an operator changes are needed whole, those before them pass."""
    shape, after = call.shape(0), call.node.shape
    if call.name.endswith("2d"):
        space = [len(shape) - 2, len(shape) - 1]
    else:  # pairs of widths, those of the last dim first
        pairs = list(call.argument(1))
        last = len(shape) - 1
        space = sorted(last - n // 2 for n in range(0, len(pairs), 2) if any(pairs[n : n + 2]))
    passes = all(d in space or n == after[d] for d, n in enumerate(shape))
    if not passes or min(space, default=0) < 0 or len(after) != len(shape) or len(call.node.operands()) != 1:
        raise NotKnownError
    dims = letters(shape)
    made, sizes = result_axes(after, space)
    right = [dict(zip(space, made, strict=True)).get(d, n) for d, n in enumerate(dims)]
    annotation = f"{written(dims, dict.fromkeys(space, '^'))} -> {' '.join(right)}"
    return [call.statement(f"space_{call.name}({call.tensor(0)})", annotation, sizes=sizes)]


OPS = (
    Op(names="conv1d conv2d conv3d", axes=_convolved, aten="conv1d conv2d conv3d", capture=_capture_convolution),
    Op(names="max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d", axes=_pooled),
    Op(
        aten="max_pool2d avg_pool2d adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d pad constant_pad_nd",
        capture=_capture_over_space,
    ),
)
