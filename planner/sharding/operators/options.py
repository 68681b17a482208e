"""The ways to shard one operator: which mesh axes may shard which axis, and the layouts of operands and result that
follow.

An *assignment* maps every mesh axis to one axis of the operator, to a reduction that is already pending in its operands
and passes through, or to None (the operator is replicated over that mesh axis). The layouts of operands and result
follow from it: a dim is sharded as the axes in it are, in their order. What a mesh axis may be assigned to follows from
the roles of axes (`planner.sharding.operators.roles`):

    an axis that passes through        always, where the mesh axis divides it
    a partial axis                     the result is pending a reduction
    a merged axis                      with collectives of statistics inside the operator
                                       (`planner.sharding.operators.options`); nothing is pending
    a created axis                     every rank makes its own piece
    an unsharded axis                  never, nor one that a tensor has in two dims
    a pending sum                      of operands that the result is linear in
    tokens and experts                 at once, where tokens are sent to their experts and back
    groups of rows                     each rank has matrices of some groups, and makes their rows; zeros pass through
    what
                                       keeps them (`planner.sharding.operators.grouped_rows`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import prod

from planner.sharding.layouts.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Collective
from planner.sharding.layouts.layout import (
    DimSpec,
    Layout,
    Mesh,
    divides_evenly,
    has_empty_pieces,
    local_size,
    normalize_spec,
)
from planner.sharding.operators.grouped_rows import MASK, group_axis, grouped_rows, routed_axes, zero_keepers
from planner.sharding.operators.operator import Operator, Tensor
from planner.sharding.ops.annotation import Dim
from planner.sharding.ops.routed import SENT_OF
from planner.sharding.ops.table import STATISTICS
from topology.errors import Infeasible

MAX_OPTIONS = 4000
_LINEAR_REDUCERS = ("sum", "avg")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOption:
    """One way to shard an operator: required operand layouts, the layout of the result, and collectives inside it.

    `axis_specs` says for each sharded axis which mesh axes shard it. `replicated_axes` counts the mesh axes over which
    a scatter's result is replicated although it could be sharded.
    """

    axis_specs: tuple[tuple[str, DimSpec], ...]
    operands: tuple[tuple[str, Layout], ...]
    result: Layout
    collectives: tuple[Collective, ...] = ()
    replicated_axes: int = 0


@dataclass(frozen=True, slots=True)
class _PassThrough:
    """Assigned to a mesh axis over which `tensors` are pending a reduction: the result is pending `result`.

    `groups` is the axis of a grouped product's groups, which the mesh axis shards. `rows` is the axis of tokens, if the
    mesh axis shards these as well and they are sent to their groups; then nothing is pending.
    """

    reducer: str
    tensors: frozenset[str]
    result: str
    groups: str = ""
    rows: str = ""


def sharding_options(
    operator: Operator,
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
    *,
    pending: Mapping[str, frozenset[str]],
    irregular_specs: Mapping[str, frozenset[tuple[int, DimSpec]]],
    grouped: Mapping[str, str] | None = None,
) -> list[ShardingOption]:
    """Return every way to shard `operator`.

    `pending` says by tensor which reductions it may be pending; `irregular_specs` gives further (dim, spec) pairs by
    tensor that are uneven or have blocks; `grouped` are tensors with rows in groups (`grouped_rows`). Raises Infeasible
    for more than MAX_OPTIONS.
    """
    irregular: dict[str, set[DimSpec]] = {}
    for name, dims in operator.operands:
        for dim, spec in irregular_specs.get(name, ()):
            for axis, part in (split_dim_spec(spec, dims[dim], operator.sizes, mesh) or {}).items():
                irregular.setdefault(axis, set()).add(part)
    for dim, spec in irregular_specs.get(operator.result.name, ()):
        for axis, part in (split_dim_spec(spec, operator.dims[dim], operator.sizes, mesh) or {}).items():
            irregular.setdefault(axis, set()).add(part)
    shardable = [axis for axis in operator.axes if _can_shard(operator, axis)]
    pass_through = list(_pass_through_reductions(operator, pending, grouped or {}))
    found: dict[tuple[tuple[tuple[str, Layout], ...], Layout], ShardingOption] = {}
    for targets in product([None, *shardable, *pass_through], repeat=len(mesh.names)):
        assignment = dict(zip(mesh.names, targets, strict=True))
        for axis_specs in _axis_orders(operator, assignment, irregular, mesh):
            option = _make_option(operator, tensors, axis_specs, assignment, mesh)
            if option is not None:
                found.setdefault((option.operands, option.result), option)
        if len(found) > MAX_OPTIONS:
            raise Infeasible(
                f"{operator.result.name} can be sharded in more than {MAX_OPTIONS:,} ways",
                why="all of them are priced",
                remedy="fewer mesh axes, or an operator of fewer axes",
            )
    if not operator.text.startswith(SENT_OF):
        return list(found.values())
    sending = [one for one in found.values() if one.collectives]
    if not sending:
        raise Infeasible(
            f"the tokens of {operator.result.name} are not sent to their experts",
            why="no mesh axis shards the experts and divides their tokens",
            remedy='a number of tokens that the mesh divides, or leave "routes" out',
        )
    return sending


def _can_shard(operator: Operator, axis: str) -> bool:
    roles = operator.roles
    if operator.sizes[axis] == 1 or axis in roles.unsharded or _is_twice(operator, axis):
        return False
    if axis in roles.merged or axis in roles.partial:
        return True
    if axis in operator.output_only:
        return axis in roles.created
    return axis not in operator.reduced


def _is_twice(operator: Operator, axis: str) -> bool:
    """Return whether two dims of one tensor are this axis, as in `x @ x.T`: ranks would then have only blocks of the
    diagonal.
    """
    tensors = (operator.dims, *(dims for _, dims in operator.operands))
    return any(sum(dim.count(axis) for dim in dims) > 1 for dims in tensors)


def _pass_through_reductions(
    operator: Operator, pending: Mapping[str, frozenset[str]], grouped: Mapping[str, str]
) -> Iterator[_PassThrough]:
    """Yield the ways in which a reduction pending over one mesh axis can pass through the operator."""
    listed = {name for name, _ in operator.operands}
    if routed := routed_axes(operator):
        tokens, experts = routed
        yield _PassThrough("", frozenset(), "", experts, tokens)
    yield from _rows_by_groups(operator, pending, grouped)
    reducers = sorted({reducer for name in listed for reducer in pending.get(name, ())})
    for reducer in reducers:
        by_groups = reducer == MASK and any(name in grouped for name in listed)
        after = "sum" if by_groups else reducer
        if operator.is_view:
            yield _PassThrough(reducer, frozenset(listed), after)
            continue
        if after not in _LINEAR_REDUCERS:
            continue
        picks = [frozenset(operator.operands[at][0] for at in numbers) for numbers in operator.roles.linear]
        for pick in sorted(picks, key=sorted):
            if all(reducer in pending.get(name, ()) for name in pick):
                yield _PassThrough(reducer, pick, after)


def _rows_by_groups(
    operator: Operator, pending: Mapping[str, frozenset[str]], grouped: Mapping[str, str]
) -> Iterator[_PassThrough]:
    """Yield the ways in which ranks can have the rows of their own groups: from all rows, or from those that they have
    already.
    """
    groups = group_axis(operator)
    if groups:
        (rows, _), _, (ends, _) = operator.operands
        yield _PassThrough(MASK, frozenset(), MASK, groups)
        if grouped.get(rows) == ends and MASK in pending.get(rows, ()):
            yield _PassThrough(MASK, frozenset((rows,)), MASK, groups)
        return
    for tensors in zero_keepers(operator, grouped):
        if all(MASK in pending.get(name, ()) for name in tensors):
            yield _PassThrough(MASK, tensors, MASK)


def _axis_orders(
    operator: Operator,
    assignment: Mapping[str, str | _PassThrough | None],
    irregular: Mapping[str, set[DimSpec]],
    mesh: Mesh,
) -> Iterator[dict[str, DimSpec]]:
    """Yield the specs of all axes for an assignment, in every order of mesh axes that divides them."""
    mesh_axes_of: dict[str, list[str]] = {}
    for name, target in assignment.items():
        axes = (target.groups, target.rows) if isinstance(target, _PassThrough) else (target,)
        for axis in filter(None, axes):
            mesh_axes_of.setdefault(axis, []).append(name)
    choices = []
    for axis, names in mesh_axes_of.items():
        regular_specs = {p for p in permutations(names) if divides_evenly(operator.sizes[axis], p, mesh)}
        irregular_specs = {
            spec for spec in irregular.get(axis, ()) if {i for i in spec if isinstance(i, str)} == set(names)
        }
        choices.append([(axis, spec) for spec in sorted(regular_specs | irregular_specs, key=repr)])
    for pick in product(*choices):
        yield dict(pick)


def _make_option(
    operator: Operator,
    tensors: Mapping[str, Tensor],
    axis_specs: Mapping[str, DimSpec],
    assignment: Mapping[str, str | _PassThrough | None],
    mesh: Mesh,
) -> ShardingOption | None:
    pass_through = {name: target for name, target in assignment.items() if isinstance(target, _PassThrough)}
    groups = {target.groups for target in pass_through.values()} - {""}
    if any(len(axis_specs[axis]) != 1 for axis in groups):
        return None  # the groups of a rank would depend on the order of mesh axes, which layouts do not record
    operand_layouts = []
    for name, dims in operator.operands:
        dim_specs = [
            combine_axis_specs(dim, operator.sizes, axis_specs, mesh) if size > 1 else ()
            for dim, size in zip(dims, tensors[name].shape, strict=True)
        ]
        if any(spec is None for spec in dim_specs):
            return None
        pending = tuple((axis, t.reducer) for axis, t in pass_through.items() if name in t.tensors)
        operand_layouts.append((name, Layout(tuple(spec or () for spec in dim_specs), pending)))
    result_specs = [combine_axis_specs(dim, operator.sizes, axis_specs, mesh) for dim in operator.dims]
    if any(spec is None for spec in result_specs):
        return None
    reducers = {axis: t.result for axis, t in pass_through.items() if t.result}
    for axis, spec in axis_specs.items():
        largest = axis in operator.roles.merged or operator.roles.partial.get(axis) in {"max", "min"}
        if largest and has_empty_pieces(operator.sizes[axis], spec, mesh):
            return None  # an empty piece has no largest element
        if axis in operator.roles.partial:
            reducer = operator.roles.partial[axis]
            if reducer == "avg" and not divides_evenly(operator.sizes[axis], spec, mesh):
                return None  # the mean of uneven pieces' means is not the mean
            reducers.update({str(i): reducer for i in spec if isinstance(i, str)})
    operand_layouts += [(name, Layout(((),) * len(tensors[name].shape))) for name in operator.unannotated]
    return ShardingOption(
        axis_specs=tuple(axis_specs.items()),
        operands=tuple(operand_layouts),
        result=Layout(
            tuple(spec or () for spec in result_specs),
            tuple((name, reducers[name]) for name in mesh.names if name in reducers),
        ),
        collectives=internal_collectives(operator, axis_specs, mesh),
        replicated_axes=sum(target is None for target in assignment.values()) if operator.kind == "scatter" else 0,
    )


def combine_axis_specs(
    dim: Dim, sizes: Mapping[str, int], axis_specs: Mapping[str, DimSpec], mesh: Mesh
) -> DimSpec | None:
    """Return the spec of a dim made of several axes from the specs of those axes, or None if there is none.

    The part of an axis that is not sharded becomes a block, inside which the later axes are sharded.
    """
    if len(dim) == 1:
        return axis_specs.get(dim[0], ())
    out: list[str | int] = []
    for axis in dim:
        spec = axis_specs.get(axis, ())
        pieces = prod(item if isinstance(item, int) else mesh.size(item) for item in spec)
        if sizes[axis] % pieces:
            return None
        out += [*spec, sizes[axis] // pieces]
    return normalize_spec(out)


def split_dim_spec(spec: DimSpec, dim: Dim, sizes: Mapping[str, int], mesh: Mesh) -> dict[str, DimSpec] | None:
    """Return the specs of the axes that make a dim from the spec of the dim, or None where a shard would span two
    axes.
    """
    if len(dim) == 1:
        return {dim[0]: spec}
    out: dict[str, DimSpec] = {}
    remaining = list(spec)
    for axis in dim:
        part: list[str | int] = []
        remaining_size = sizes[axis]
        while remaining and remaining_size > 1:
            item = remaining[0]
            size = item if isinstance(item, int) else mesh.size(item)
            if remaining_size % size == 0:
                part.append(item)
                remaining_size //= size
                remaining.pop(0)
            elif isinstance(item, int) and item % remaining_size == 0:  # the block extends into the next axis
                remaining[0] = item // remaining_size
                remaining_size = 1
            else:
                return None
        out[axis] = normalize_spec(part)
    return None if remaining else out


def possible_reductions(
    operators: Sequence[Operator], assignment: Mapping[str, Layout], mesh: Mesh
) -> dict[str, frozenset[str]]:
    """Return the reductions that each tensor could ever be pending, propagating them through the operators in order."""
    found = {name: frozenset(reducer for _, reducer in layout.pending) for name, layout in assignment.items()}
    if mesh.ranks == 1:
        return found
    grouped = grouped_rows(operators)
    for operator in operators:
        reducers = {t.result for t in _pass_through_reductions(operator, found, grouped) if t.result}
        reducers |= set(operator.roles.partial.values())
        found[operator.result.name] = found.get(operator.result.name, frozenset()) | reducers
    return found


def internal_collectives(operator: Operator, axis_specs: Mapping[str, DimSpec], mesh: Mesh) -> tuple[Collective, ...]:
    """Return the collectives inside `operator` if its axes are sharded as in `axis_specs`."""
    if routed := routed_axes(operator):
        return _routes(operator, *routed, axis_specs, mesh)
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


def _routes(
    operator: Operator, tokens: str, experts: str, axis_specs: Mapping[str, DimSpec], mesh: Mesh
) -> tuple[Collective, ...]:
    """Return the exchanges of tokens with the ranks of their experts, if every expert has equally many."""
    axes = tuple(item for item in axis_specs.get(experts, ()) if isinstance(item, str) and mesh.size(item) > 1)
    (_, pairs), *others = operator.operands
    rows = _local_dim(operator, pairs[0], axis_specs, mesh, {})
    sent = [(dims, "tokens to experts") for _, dims in others if dims and tokens in dims[0]]
    return tuple(
        Collective(
            kind=ALL_TO_ALL,
            mesh_dim=mesh.group_name(axes),
            axes=axes,
            group=mesh.size(axes),
            dtype=operator.result.dtype,
            local_in=(rows, *(_local_dim(operator, dim, axis_specs, mesh, {}) for dim in dims[1:])),
            local_out=(rows, *(_local_dim(operator, dim, axis_specs, mesh, {}) for dim in dims[1:])),
            tensor=operator.result.name,
            note=note,
        )
        for dims, note in ([*sent, (operator.dims, "results of experts back to their tokens")] if axes else ())
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
