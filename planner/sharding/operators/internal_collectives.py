"""Collectives inside an operator: the statistics that ranks exchange when an axis it reduces or normalizes is sharded.

Some reductions are not sums, but can be computed from small statistics of the pieces. The operator then keeps the axis
sharded (softmax, norms) or completes the reduction on every rank, with these collectives:

    softmax         maximum, then sum of exponentials: one number per row each
    logsumexp       likewise
    cross-entropy   those two and the logit of the target (Megatron-LM, tensor_parallel/cross_entropy.py)
    RMSNorm         sum of squares
    LayerNorm       sum and sum of squares, in one buffer
    attention       maximum, sum of exponentials, weighted values over pieces of keys (Milakov and Gimelshein, 2018;
                    Flash-Decoding, 2023)
    top-k, arg-max  the candidates of every piece

Statistics are fp32, or fp64 where the result is fp64.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.sharding.layouts.collectives import ALL_GATHER, ALL_REDUCE, Collective
from planner.sharding.layouts.layout import DimSpec, local_size
from planner.sharding.layouts.mesh import Mesh
from planner.sharding.operators.operator import Operator
from planner.sharding.ops.table import STATISTICS


def internal_collectives(operator: Operator, axis_specs: Mapping[str, DimSpec], mesh: Mesh) -> tuple[Collective, ...]:
    """Return the collectives inside `operator` when its axes are sharded as `axis_specs` says."""
    merged = [axis for axis in axis_specs if axis in operator.roles.merged]
    mesh_axes = [item for axis in merged for item in axis_specs[axis] if isinstance(item, str)]
    axes = mesh.ordered(axis for axis in mesh_axes if mesh.size(axis) > 1)
    if not axes:
        return ()
    group = mesh.size(axes)
    result = tuple(
        _local_dim(operator, dim, axis_specs, mesh, {})
        for dim in operator.dims
        if not (set(dim) & operator.roles.merged)
    )
    statistic = "f64" if operator.result.dtype == "f64" else "f32"

    def collective(
        kind: str, local_in: tuple[int, ...], local_out: tuple[int, ...], dtype: str, reducer: str
    ) -> Collective:
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
        gathered_sizes = {axis: operator.sizes[axis] * group for axis in operator.output_only}
        gathered = tuple(_local_dim(operator, dim, axis_specs, mesh, gathered_sizes) for dim in operator.dims)
        if operator.kind == "arg":  # a value and its index
            return (collective(ALL_GATHER, (*result, 2), (*result, 2 * group), statistic, ""),)
        return (collective(ALL_GATHER, result, gathered, operator.result.dtype, ""),)
    _, dims = operator.operands[0]
    rows = tuple(_local_dim(operator, dim, axis_specs, mesh, {}) for dim in dims if not set(dim) & set(merged))
    if operator.kind == "attention":
        rows = result[:-1]
    shapes = {"rows": rows, "pairs of rows": (2, *rows), "result": result}
    return tuple(
        collective(ALL_REDUCE, shapes[of], shapes[of], statistic, how) for of, how in STATISTICS[operator.kind]
    )


def _local_dim(
    operator: Operator,
    dim: tuple[str, ...],
    axis_specs: Mapping[str, DimSpec],
    mesh: Mesh,
    overridden_sizes: Mapping[str, int],
) -> int:
    size = 1
    for axis in dim:
        size *= local_size(overridden_sizes.get(axis, operator.sizes[axis]), axis_specs.get(axis, ()), mesh)
    return size
