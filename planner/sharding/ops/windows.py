"""Convolutions and other functions of sliding windows: pooling, resampling, padding."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner.sharding.ops.annotation import is_none, number_of
from planner.sharding.ops.aten import (
    LETTERS,
    AtenCall,
    NotKnownError,
    Statement,
    annotated,
    axes_but,
    letters,
    made,
    result_axes,
    whole_numbers,
    written,
)
from planner.sharding.ops.axis_flow import NotUnderstood, Value
from planner.sharding.ops.op import Op
from planner.sharding.ops.products import with_bias
from planner.sharding.ops.walker import Call


def _convolved(call: Call) -> Value:
    """A convolution: batch and channels as in a product; the dims that windows slide over, and the windows, are needed
    whole.
    """
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
    if len(x) not in {3, 4, 5} or len(w) != len(x):
        raise NotKnownError
    if call.argument(6, 1) != 1 or isinstance(call.argument(4), str):
        space = len(x) - 2
        step, inside, apart = (_each(call.argument(n, d), space) for n, d in ((3, 1), (4, 0), (5, 1)))
        if isinstance(inside, str):
            inside = _same_size(inside, w[2:], apart)
        return _in_groups(call, (step, inside, apart, False, [0] * space), int(call.argument(6, 1)))
    args = (call.argument(0), call.argument(1), None, *call.node.args[3:])
    rest = [one if isinstance(one, int) else f"({', '.join(str(int(n)) for n in one)},)" for one in call.node.args[3:6]]
    formula = f"{call.name}({', '.join([call.tensor(0), call.tensor(1), 'None', *map(str, rest)])})"
    return with_bias(call, formula, call.optional_tensor(2, "bias"), 1, args=args)


def _capture_transposed(call: AtenCall) -> list[Statement]:
    """`conv_transpose2d(x, w, bias, stride, padding, output_padding, groups, dilation)`."""
    space = len(call.shape(0)) - 2
    if space < 1 or len(call.shape(1)) != space + 2:
        raise NotKnownError
    step, inside, outside, apart = (_each(call.argument(n, d), space) for n, d in ((3, 1), (4, 0), (5, 0), (7, 1)))
    return _in_groups(call, (step, inside, apart, True, outside), int(call.argument(6, 1)))


def _capture_any_convolution(call: AtenCall) -> list[Statement]:
    """`convolution(x, w, bias, stride, padding, dilation, transposed, output_padding, groups)`."""
    space = len(call.shape(0)) - 2
    if space < 1 or len(call.shape(1)) != space + 2:
        raise NotKnownError
    step, inside, apart, outside = (_each(call.argument(n), space) for n in (3, 4, 5, 7))
    return _in_groups(call, (step, inside, apart, bool(call.argument(6)), outside), int(call.argument(8)))


def _in_groups(call: AtenCall, how: tuple[Any, ...], groups: int) -> list[Statement]:
    """A convolution of groups of channels, which pass, as do their results; with one group, channels are summed over,
    as in a product.
    """
    x, (*_, transposed, _) = call.shape(0), how
    space = [LETTERS[d] for d in range(2, len(x))]
    width, each = x[1] // groups, call.node.shape[1] // groups
    sums = f"k_{width}{'+' if groups == 1 else '^'}" if width > 1 else ""
    out = f"m_{each}" if each > 1 else ""
    many = f"g_{groups}" if groups > 1 else ""

    def joined(*axes: str) -> str:
        found = [axis for axis in axes if axis]
        return f"({' '.join(found)})" if len(found) > 1 else "".join(found) or "1"

    windows = [f"w{axis}^" for axis in space]
    left = ["a", joined(many, sums), *(f"{axis}^" for axis in space)]
    weight = [joined(many, sums), out or "1"] if transposed else [joined(many, out), sums or "1"]
    made_of = [made(f"r{axis}", n) for axis, n in zip(space, call.node.shape[2:], strict=True)]
    name = f"{call.node.name}_product"[-64:] if (bias := call.optional_tensor(2, "bias")) else call.node.name
    args = (call.argument(0), call.argument(1), width, *how)
    operands = [(call.tensor(0), left), (call.tensor(1), [*weight, *windows])]
    (product,) = annotated(call, operands, ["a", joined(many, out), *made_of], op="convolution", args=args)
    product = replace(product, result=name)
    if not bias:
        return [product]
    after = len(call.node.shape) - 2
    added = f"{name} + reshape({bias}, {[-1, *[1] * after]})"
    return [product, call.statement(added, op="bias", args=({"tensor": name}, {"tensor": bias}, 1))]


def _each(value: Any, space: int) -> Any:
    """Return a number for every dim of space; a word as it is."""
    if isinstance(value, str):
        return value
    found = whole_numbers(value)
    return found * space if len(found) == 1 else found


def _same_size(word: str, windows: Sequence[int], apart: Sequence[int]) -> list[int]:
    """Return the padding that `same` or `valid` means. Raises NotKnownError if its two sides differ."""
    if word == "valid":
        return [0] * len(windows)
    total = [d * (k - 1) for k, d in zip(windows, apart, strict=True)]
    if any(n % 2 for n in total):
        raise NotKnownError
    return [n // 2 for n in total]


def _capture_shuffled(call: AtenCall) -> list[Statement]:
    """`pixel_shuffle`, `pixel_unshuffle`: channels of blocks become positions, or the reverse."""
    shape, by = call.shape(0), int(call.argument(1))
    shuffle = call.name == "pixel_shuffle"
    channels, high, wide = (call.node.shape if not shuffle else shape)[-3:]
    lead = [LETTERS[d] for d in range(len(shape) - 3)]
    deep = channels // by**2
    c = f"c_{deep} " if deep > 1 else ""
    blocks = [f"({c}u_{by}^ v_{by}^)", *(f"y_{high}" if high > 1 else "1", f"z_{wide}" if wide > 1 else "1")]
    places = [
        c.strip() or "1",
        f"({f'y_{high} ' if high > 1 else ''}u_{by}^)",
        f"({f'z_{wide} ' if wide > 1 else ''}v_{by}^)",
    ]
    if by == 1:
        raise NotKnownError
    before, after = (blocks, places) if shuffle else (places, blocks)
    return annotated(call, [(call.tensor(0), [*lead, *before])], [*lead, *after])


def _capture_patches(call: AtenCall) -> list[Statement]:
    """`im2col`: windows of space as columns, all channels of a window in a row."""
    shape, (channels, places) = call.shape(0), call.node.shape[-2:]
    if len(shape) != 4:
        raise NotKnownError
    inside = channels // shape[1]
    c = f"c_{shape[1]}" if shape[1] > 1 else ""
    rows = f"({c} k_{inside}^)" if c and inside > 1 else c or made("k", inside)
    return annotated(call, [(call.tensor(0), ["a", c or "1", "p^", "q^"])], ["a", rows, made("r", places)])


def _capture_windows_of_one_dim(call: AtenCall) -> list[Statement]:
    """`x.unfold(dim, size, step)`: windows of a dim, and a last dim of what is inside them."""
    shape = call.shape(0)
    dim = call.dim(1, len(shape))
    axes = axes_but(len(shape), [dim])
    result = [made("r", call.node.shape[dim]) if d == dim else axis for d, axis in enumerate(axes)]
    return annotated(call, [(call.tensor(0), axes)], [*result, made("s", call.node.shape[-1])])


def _capture_over_space(call: AtenCall) -> list[Statement]:
    """Pooling, resampling and padding: dims that the operator changes are needed whole, those before them pass."""
    shape, after = call.shape(0), call.node.shape
    counted = re.search(r"([123])d$", call.name.removesuffix("_with_indices"))
    if counted:
        space = list(range(len(shape) - int(counted[1]), len(shape)))
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
        aten="max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices"
        " max_pool3d_with_indices adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d"
        " adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d"
        " upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d reflection_pad1d"
        " reflection_pad2d replication_pad1d replication_pad2d pad constant_pad_nd",
        capture=_capture_over_space,
    ),
    Op(aten="conv_transpose1d conv_transpose2d conv_transpose3d", capture=_capture_transposed),
    Op(aten="convolution", capture=_capture_any_convolution),
    Op(aten="pixel_shuffle pixel_unshuffle", capture=_capture_shuffled),
    Op(aten="im2col", capture=_capture_patches),
    Op(aten="unfold", capture=_capture_windows_of_one_dim),
)
