"""The work of one operator on one rank: a matrix product, attention, or bytes read and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.sharding.operators.grouped_rows import group_axis, routed_axes
from planner.sharding.operators.operator import Operator, Tensor
from simulator.config.runtime import ELEMENT_BYTES
from simulator.kernels.operators import ATTENTION_BACKWARD, Work, WorkKind
from simulator.kernels.roofline import Roofline

Sizes = Mapping[str, NDArray[np.float64]]
# Matrix products of [m, k] by [k, n] for each of the three gradients of attention. One kernel computes five: scores
# again, the gradient of the weights, and the three results (Dao, arXiv 2307.08691, algorithm 2), divided evenly among
# the gradients. The forward pass has two.
_BACKWARD_PRODUCTS = ATTENTION_BACKWARD * 2 / 3
# Attention to pieces of the keys, with statistics exchanged between ranks, takes several kernels: scores are computed
# three times, and products, masks, exponentials and sums read and write them in float32
# (`executor/sharding/merged.py`), 26 times forward and 21 times backward. Below, the backward pass is counted as twice
# the forward pass's bytes, so this is a third of both.
_SCORE_PASSES = 47 / 3


def operator_work(operator: Operator, tensors: Mapping[str, Tensor], sizes: Sizes) -> Work:
    """Return the work with `sizes` of axes, each of shape (options,): one value for every way to shard the operator."""

    def size(axes: Iterable[str]) -> NDArray[np.float64]:
        total = np.ones(len(next(iter(sizes.values()), np.ones(1))))
        for axis in axes:
            total = total * sizes[axis]
        return total

    def elements(dims: Iterable[Iterable[str]]) -> NDArray[np.float64]:
        return size(axis for dim in dims for axis in dim)

    moved = elements(operator.dims) * ELEMENT_BYTES[operator.result.dtype]
    for name, dims in operator.operands:
        whole = tensors[name].shape
        moved = (
            moved + elements(d for d, n in zip(dims, whole, strict=True) if n > 1) * ELEMENT_BYTES[tensors[name].dtype]
        )
    if routed := routed_axes(operator):
        matrices = [dims for _, dims in operator.operands if len(dims) == 3 and dims[0] == (routed[1],)]
        m, k = elements(operator.operands[0][1]), elements(matrices[0][1:2]) if matrices else np.ones(1)
        n = sum((elements(dims[1:]) for dims in matrices), np.zeros(1)) / k
        return Work(
            kind=WorkKind.MATMUL, name="product", flops=2.0 * m * n * k, bytes=moved, batch=np.ones(1), m=m, n=n, k=k
        )
    parts = [{axis for dim in dims for axis in dim} for _, dims in operator.operands]
    result = {axis for dim in operator.dims for axis in dim}
    if operator.kind in {"attention", "attention_bwd"} and len(parts) >= 3:
        first = int(operator.kind == "attention_bwd")  # after the incoming gradient
        (_, q), (_, keys) = operator.operands[first : first + 2]
        m, n, k, batch = size(q[-2]), size(keys[-2]), size(q[-1]), elements(q[:-2])
        flops = 2.0 * (_BACKWARD_PRODUCTS if first else 2.0) * m * n * k * batch
        flops = flops * _seen(operator, q[-2], keys[-2], m, n)
        every = float(np.prod([operator.sizes[axis] for axis in keys[-2]]))
        moved = moved + np.where(n < every, _SCORE_PASSES * ELEMENT_BYTES["f32"] * m * n * batch, 0.0)
        return Work(
            kind=WorkKind.ATTENTION,
            name="attn",
            flops=flops,
            bytes=moved,
            batch=batch,
            m=m,
            n=n,
            k=k,
            backward=bool(first),
        )
    if operator.kind == "attention_rows":  # saved by the forward kernel
        return Work(kind=WorkKind.MOVE, name="rows", bytes=elements(operator.dims) * ELEMENT_BYTES["f32"])
    contracted = {axis for part in parts for axis in part} & set(operator.roles.partial) - result
    both = [part for part in parts if contracted & part]
    if len(both) >= 2 and operator.kind == "sum" and operator.roles.multiplies:
        left, right = both[0], both[1]
        # A convolution's result has positions that no operand has; each is a sum over a window that the result does not
        # have.
        m, n = size(result - right), size(right & result - left)
        batch, k = size(left & right & result), size(contracted | (right - left - result))
        groups = group_axis(operator)
        if groups:  # a row is multiplied by its group's matrix, and groups have equally many rows on average
            share = sizes[groups] / operator.sizes[groups]
            m, k = m * share, size(contracted)
        return Work(
            kind=WorkKind.MATMUL, name="product", flops=2.0 * m * n * k * batch, bytes=moved, batch=batch, m=m, n=n, k=k
        )
    return Work(kind=WorkKind.MOVE, name="elementwise", bytes=moved)


def _seen(
    operator: Operator, queries: tuple[str, ...], keys: tuple[str, ...], m: NDArray[np.float64], n: NDArray[np.float64]
) -> NDArray[np.float64] | float:
    """Return the share of pairs of queries and keys that is computed.

    A causal kernel leaves out keys after its queries; a rank with a piece of either uses a mask instead and computes
    all.
    """
    if not {*queries, *keys} & operator.roles.positional:
        return 1.0
    whole = [float(np.prod([operator.sizes[axis] for axis in axes])) for axes in (queries, keys)]
    return np.where((m == whole[0]) & (n == whole[1]), (n + 1) / (2 * n), 1.0)


def backward_s(work: Work, gradients: int, roofline: Roofline) -> NDArray[np.float64]:
    """Return the seconds of an operator's backward pass, which computes this number of `gradients`.

    A product needs one product of its size for each; attention has one kernel with five products, where the forward
    pass has two.
    """
    if not gradients:
        return np.zeros(1)
    if work.kind is WorkKind.ATTENTION:
        flops, moved = work.flops * ATTENTION_BACKWARD, work.bytes * 2.0
        return np.asarray(roofline.seconds(replace(work, flops=flops, bytes=moved, backward=True)))
    return np.asarray(gradients * roofline.seconds(work))
