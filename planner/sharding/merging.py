"""Collectives inside an operator: what its pieces must exchange when an axis that it reduces inside is sharded.

Some reductions are not sums, but merge from small statistics of the pieces. The operator then keeps its axis sharded, or
finishes its result on every rank, at the price of these:

    softmax         maximum, then sum of exponentials: one number a row each
    logsumexp       likewise
    cross-entropy   those two and the logit of the target (Megatron-LM, tensor_parallel/cross_entropy.py)
    RMSNorm         sum of squares
    LayerNorm       sum and sum of squares, in one buffer
    attention       maximum, sum of exponentials, weighted values over pieces of keys (Milakov and Gimelshein, 2018;
                    Flash-Decoding, 2023)
    top-k, arg-max  the candidates of every piece

Statistics are in single precision, or in double where the result is.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.sharding.collectives import ALL_GATHER, ALL_REDUCE, Collective
from planner.sharding.layout import Items, local_size
from planner.sharding.mesh import Mesh
from planner.sharding.operator import Operator

# kind of formula: which marks of an axis it can merge over
MERGED = {
    "softmax": "*",
    "rmsnorm": "*",
    "layernorm": "*",
    "logsumexp": "+*",
    "cross_entropy": "+*",
    "attention": "+",
    "topk": "+",
    "arg": "+",
}


def merges(operator: Operator, axis: str) -> bool:
    """Return whether `operator` can merge its pieces over `axis` itself."""
    marks = MERGED.get(operator.kind, "")
    return (axis in operator.kept and "*" in marks) or (axis in operator.reduced and "+" in marks)


def merging(operator: Operator, placed: Mapping[str, Items], mesh: Mesh) -> tuple[Collective, ...]:
    """Return what is exchanged when axes are sharded as `placed` says."""
    merged = [axis for axis in placed if merges(operator, axis)]
    axes = mesh.ordered(str(item) for axis in merged for item in placed[axis] if isinstance(item, str))
    if not axes:
        return ()
    group = mesh.size(axes)
    result = tuple(_local(operator, dim, placed, mesh, {}) for dim in operator.dims if not (set(dim) & operator.kept))
    statistic = "f64" if operator.result.dtype == "f64" else "f32"

    def one(kind: str, local_in: tuple[int, ...], local_out: tuple[int, ...], dtype: str, reducer: str) -> Collective:
        return Collective(
            kind=kind,
            mesh_dim=mesh.group_name(axes),
            axes=axes,
            group=group,
            dtype=dtype,
            local_in=local_in,
            local_out=local_out,
            tensor=operator.result.name,
            reducer=reducer,
            note=f"inside {operator.kind.replace('_', '-')}",
        )

    if operator.kind in {"topk", "arg"}:
        whole = {axis: operator.sizes[axis] * group for axis in operator.created}
        gathered = tuple(_local(operator, dim, placed, mesh, whole) for dim in operator.dims)
        if operator.kind == "arg":  # a value and where it was
            return (one(ALL_GATHER, (*result, 2), (*result, 2 * group), statistic, ""),)
        return (one(ALL_GATHER, result, gathered, operator.result.dtype, ""),)
    if operator.kind == "attention":
        rows = result[:-1]
        return tuple(one(ALL_REDUCE, s, s, statistic, r) for s, r in ((rows, "max"), (rows, "sum"), (result, "sum")))
    _, dims = operator.operands[0]
    rows = tuple(_local(operator, dim, placed, mesh, {}) for dim in dims if not set(dim) & set(merged))
    if operator.kind == "layernorm":
        rows = (2, *rows)
    reducers = {"rmsnorm": ("sum",), "layernorm": ("sum",), "cross_entropy": ("max", "sum", "sum")}
    return tuple(one(ALL_REDUCE, rows, rows, statistic, r) for r in reducers.get(operator.kind, ("max", "sum")))


def _local(
    operator: Operator, dim: tuple[str, ...], placed: Mapping[str, Items], mesh: Mesh, grown: Mapping[str, int]
) -> int:
    size = 1
    for axis in dim:
        size *= local_size(grown.get(axis, operator.sizes[axis]), placed.get(axis, ()), mesh)
    return size
