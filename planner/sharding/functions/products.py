"""Products of tensors and convolutions: what is summed over leaves partial sums."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from planner.sharding.formulas.annotation import Dim
from planner.sharding.formulas.axis_flow import NotUnderstood, Value, number_of
from planner.sharding.functions.matrices import product_of_matrices
from planner.sharding.functions.walker import Call


def matmul(call: Call) -> Value:
    return product_of_matrices(call.flow, call.value(0), call.value(1))


def outer(call: Call) -> Value:
    left, right = call.value(0), call.value(1)
    return Value((*left.dims, *right.dims), call.flow.pending_of_product([left, right], "outer"))


def linear(call: Call) -> Value:
    flow, x, w = call.flow, call.value(0), call.value(1, "weight")
    if not x.dims or len(w.dims) not in {1, 2}:
        raise NotUnderstood("a linear layer whose weight has not two dims")
    over = flow.unify(x.dims[-1], w.dims[-1], "linear")
    pending = flow.pending_of_product([x, w], "linear")
    product_ = flow.contract([over], Value((*x.dims[:-1], *w.dims[:-1]), pending), "sum", "linear")
    bias = call.node(2, "bias")
    return product_ if bias is None or is_none(bias) else flow.add([product_, call.walker.value(bias)], "linear's bias")


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def addmm(call: Call) -> Value:
    return call.flow.add([call.value(0), product_of_matrices(call.flow, call.value(1), call.value(2))], call.name)


def einsum(call: Call) -> Value:
    flow = call.flow
    text = call.arguments[0]
    if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
        raise NotUnderstood("an einsum whose letters are no text")
    left, arrow, right = text.value.replace(" ", "").partition("->")
    operands, values = left.split(","), [call.walker.value(node) for node in call.arguments[1:]]
    if not arrow or len(operands) != len(values) or not (left.replace(",", "") + right).isalpha():
        raise NotUnderstood("an einsum without an arrow, or with an ellipsis")
    letters: dict[str, Dim] = {}
    for operand, value in zip(operands, values, strict=True):
        if len(operand) != len(value.dims) or len(set(operand)) != len(operand):
            raise NotUnderstood("an einsum whose letters do not fit its tensors")
        for letter, dim in zip(operand, value.dims, strict=True):
            letters[letter] = flow.unify(letters.get(letter, ()), dim, "einsum")
    if not set(right) <= set(letters):
        raise NotUnderstood("an einsum whose result has other letters")
    pending = flow.pending_of_product(values, "einsum")
    kept = Value(tuple(letters[letter] for letter in right), pending)
    return flow.contract([letters[x] for x in letters if x not in right], kept, "sum", "einsum")


def grouped_mm(call: Call) -> Value:
    """Rows of `x` by groups through one matrix a group: `[m, k] @ [g, k, n]`, with the ends of groups among rows."""
    flow, x, w = call.flow, call.value(0), call.value(1)
    if len(x.dims) != 2 or len(w.dims) != 3:
        raise NotUnderstood("a grouped product that is not of [m, k] and [g, k, n]")
    flow.keep_unsharded(w.dims[0], "rows of any group may be on any rank")
    flow.positional.update(flow.dim(x.dims[0]))
    if len(call.arguments) > 2 and call.walker.names_in(call.arguments[2]):
        for dim in call.value(2).dims:
            flow.keep_unsharded(dim, "the ends of groups are needed whole")
    over = flow.unify(x.dims[1], w.dims[1], "grouped_mm")
    return flow.contract(
        [over], Value((x.dims[0], w.dims[2]), flow.pending_of_product([x, w], "grouped_mm")), "sum", "grouped_mm"
    )


def grouped_mm_weight_gradient(call: Call) -> Value:
    """`grouped_mm_weight_bwd(gradient, x, ends)`: `[m, n]` and `[m, k]` to `[g, k, n]`, a sum over the rows of a group."""
    flow, gradient, x = call.flow, call.value(0), call.value(1)
    rows = flow.unify(gradient.dims[0], x.dims[0], call.name)
    flow.positional.update(flow.dim(rows))
    (groups,) = call.value(2).dims
    flow.keep_unsharded(groups, "rows of any group may be on any rank")
    pending = flow.pending_of_product([gradient, x], call.name)
    return flow.contract([rows], Value((groups, x.dims[1], gradient.dims[1]), pending), "sum", call.name)


def convolved(call: Call) -> Value:
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
    left = Value((x.dims[0], w.dims[0], *made))
    x = flow.finish(x, "a convolution needs finished sums")
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


def pooled(call: Call) -> Value:
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
