"""The work of one operator on one rank: a matrix product, attention, or bytes read and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from planner.sharding.operators.operator import Operator, Tensor
from simulator.config.runtime import ELEMENT_BYTES
from simulator.kernels.operators import Work, WorkKind

Sizes = Mapping[str, NDArray[np.float64]]
# Products of [m, k] by [k, n] in the gradients of attention, of which the forward pass has two: scores again, the gradient
# of the shares, and the three results, in one kernel (Dao, arXiv 2307.08691, algorithm 2): five, told evenly to the three.
_BACKWARD_PRODUCTS = 5 / 3


def operator_work(operator: Operator, tensors: Mapping[str, Tensor], sizes: Sizes) -> Work:
    """Return the work with `sizes` of axes, a column each: one value for every way to shard the operator."""

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
    parts = [{axis for dim in dims for axis in dim} for _, dims in operator.operands]
    result = {axis for dim in operator.dims for axis in dim}
    if operator.kind in {"attention", "attention_bwd"} and len(parts) >= 3:
        first = int(operator.kind == "attention_bwd")  # after the incoming gradient
        (_, q), (_, keys) = operator.operands[first : first + 2]
        m, n, k, batch = size(q[-2]), size(keys[-2]), size(q[-1]), elements(q[:-2])
        flops = 2.0 * (_BACKWARD_PRODUCTS if first else 2.0) * m * n * k * batch
        return Work(kind=WorkKind.ATTENTION, name="attn", flops=flops, bytes=moved, batch=batch, m=m, n=n, k=k)
    if operator.kind == "attention_rows":  # the forward kernel keeps them
        return Work(kind=WorkKind.MOVE, name="rows", bytes=elements(operator.dims) * ELEMENT_BYTES["f32"])
    contracted = {axis for part in parts for axis in part} & set(operator.roles.partial) - result
    both = [part for part in parts if contracted & part]
    if len(both) >= 2 and operator.kind == "sum" and any(len(t.linear) > 1 for t in operator.terms):
        left, right = both[0], both[1]
        m, n = size(left & result - right), size(right & result - left)
        batch, k = size(left & right & result), size(contracted)
        return Work(
            kind=WorkKind.MATMUL, name="product", flops=2.0 * m * n * k * batch, bytes=moved, batch=batch, m=m, n=n, k=k
        )
    return Work(kind=WorkKind.MOVE, name="elementwise", bytes=moved)
