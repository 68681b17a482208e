"""Check the annotation of an operator against its formula, or derive it.

An annotation names axes; the effect of the formula's functions along them is known (`planner.sharding.ops`). If the two
differ, the function decides:

    the annotation restricts (`^`)              believed: the author may know more
    it leaves an axis unmarked, which the       the axis is kept whole, with a warning; or, for what can be computed
    function needs whole                        from statistics of pieces (softmax, norms), gets their collectives
    it says something else than the function    BadInput that says what: a mark, or a dim of the result, is wrong
    the function is not known                   opaque: all tensors are gathered, with a warning; a case may declare
                                                a function, and then its annotation is believed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from planner.sharding.operators.formula import Formula
from planner.sharding.ops.annotation import Annotation, Dim, axis_name
from planner.sharding.ops.axis_flow import AxisFlow, NotUnderstood, Value
from planner.sharding.ops.table import result_of, walk
from topology.errors import BadInput

_PENDING = "@"  # an axis along which operands are pending a sum
_FEW = 5  # most operands for which all subsets are examined


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRoles:
    """What sharding an axis of an operator means.

    `unsharded` axes cannot be sharded; `merged` ones cost collectives of statistics inside the operator; `partial`
    ones leave the result pending a reduction, given by axis. `created` axes are in the result alone, and a rank can
    make its piece of them; along `positional` ones it must know where its piece starts. All others pass through.

    `linear` has sets of operands, by index, in which the result is jointly linear: if they are pending a sum, so is the
    result. An operator that `multiplies` operands may be a matrix product.
    """

    unsharded: frozenset[str] = frozenset()
    merged: frozenset[str] = frozenset()
    partial: Mapping[str, str] = field(default_factory=dict)
    created: frozenset[str] = frozenset()
    positional: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    multiplies: bool = False
    warnings: tuple[str, ...] = ()


def check_annotation(
    name: str,
    formula: Formula,
    annotation: Annotation,
    operands: Sequence[str],
    sizes: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    *,
    index: int = 0,
    declared: bool = False,
) -> AxisRoles:
    """Return the roles of the axes of `annotation`, whose operands are the tensors `operands`.

    `declared` formulas use a function whose annotation is believed. Raises BadInput if the two contradict each other.
    """
    (dims,) = annotation.results
    given = frozenset(axis for each in (*annotation.operands, dims) for dim in each for axis in dim)
    if declared:
        return _believed(annotation, given)
    flow = AxisFlow(tensors={}, sizes=dict(sizes), given=given)
    flow.tensors = _values(flow, annotation, operands, shapes, formula)
    try:
        made = walk(flow, formula.tree, formula.merges)
        value = result_of(made, index)
        derived = flow.dims(value)
    except NotUnderstood as error:
        if str(error) == "rearrange" and formula.is_view and _same_axes(annotation):
            return _believed(annotation, given)
        return _opaque(name, given, annotation, str(error))
    if len(derived) != len(dims):
        raise BadInput(
            f"{name} has {len(derived)} dims and is annotated with {len(dims)}",
            why="that is what its formula computes",
            remedy="annotate every dim of the result; 1 is a dim of size 1",
        )
    warnings: list[str] = []
    created = _match_result(name, flow, derived, annotation)
    _check_marks(name, flow, annotation, {axis for dim in derived for axis in dim}, warnings)
    partial = {axis: reducer for axis, reducer in value.pending.items() if axis in given}
    if len(set(partial.values())) > 1:
        raise BadInput(f"{name} sums and averages at once", remedy="make it two operators")
    unsharded = (set(flow.unsharded) & given) | annotation.unsharded
    return AxisRoles(
        unsharded=frozenset(unsharded),
        merged=frozenset(set(flow.merged) & given) - unsharded,
        partial={axis: reducer for axis, reducer in partial.items() if axis not in unsharded},
        created=frozenset(created) - unsharded,
        positional=frozenset(flow.positional & given) | frozenset(created & _positional_created(flow)),
        linear=_linear_operands(formula, annotation, operands, sizes, shapes, index),
        multiplies=flow.multiplies,
        warnings=tuple(warnings),
    )


def _linear_operands(
    formula: Formula,
    annotation: Annotation,
    operands: Sequence[str],
    sizes: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    index: int,
) -> tuple[frozenset[int], ...]:
    """Return the smallest sets of operands that may be pending a sum: found by walking the formula with that sum as one
    more axis.

    A pending sum passes only through what is linear (scaling, a matrix product, a view), and through an addition only
    if every term is pending: a finished tensor added on each of n ranks would count n times.
    """
    given = frozenset(axis for each in (*annotation.operands, *annotation.results) for dim in each for axis in dim)
    numbers = [number for number, name in enumerate(operands) if operands.index(name) == number]
    found: list[frozenset[int]] = []
    for size in (1, 2, len(numbers)) if len(numbers) > _FEW else range(1, len(numbers) + 1):
        for picked in map(frozenset, combinations(numbers, size)):
            if any(one <= picked for one in found):
                continue
            flow = AxisFlow(tensors={}, sizes={**sizes, _PENDING: 2}, given=given)
            values = _values(flow, annotation, operands, shapes, formula)
            pending = {operands[number] for number in picked}
            flow.tensors = {n: Value(v.dims, {_PENDING: "sum"}) if n in pending else v for n, v in values.items()}
            value = result_of(walk(flow, formula.tree, ""), index)
            if _PENDING in value.pending and _PENDING not in flow.unsharded:
                found.append(picked)
    return tuple(found)


def _same_axes(annotation: Annotation) -> bool:
    """Return whether an operator of one operand keeps all axes, as a view does."""
    (operand, *others), (result,) = annotation.operands, annotation.results
    before, after = ([axis for dim in dims for axis in dim] for dims in (operand, result))
    return not others and sorted(before) == sorted(after) and len(set(before)) == len(before)


def _positional_created(flow: AxisFlow) -> set[str]:
    return {part for axis in flow.positional for part in flow.dim((axis,))} | flow.positional


def _values(
    flow: AxisFlow,
    annotation: Annotation,
    operands: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
    formula: Formula,
) -> dict[str, Value]:
    """Return the axes of every tensor of the formula: annotated, or new ones that must not be sharded."""
    values: dict[str, Value] = {}
    for name, dims in zip(operands, annotation.operands, strict=True):
        found = tuple(() if size == 1 else dim for dim, size in zip(dims, shapes[name], strict=True))
        if name in values:
            for mine, other in zip(values[name].dims, found, strict=True):
                if mine != other:
                    flow.keep_unsharded((*mine, *other), "one tensor is annotated in two ways")
        values.setdefault(name, Value(found))
    for name in formula.tensors:
        if name not in values:
            dims = tuple(flow.new_dim(size) for size in shapes[name])
            for dim in dims:
                flow.keep_unsharded(dim, f"{name} is not annotated")
            values[name] = Value(dims)
    return values


def _match_result(name: str, flow: AxisFlow, derived: Sequence[Dim], annotation: Annotation) -> set[str]:
    """Compare the dims of the result with the annotation; return the axes that only the result has and ranks
    can make.
    """
    (dims,) = annotation.results
    seen = {axis for operand in annotation.operands for dim in operand for axis in dim}
    created: set[str] = set()
    for number, (found, annotated) in enumerate(zip(derived, dims, strict=True)):
        said = tuple(axis for axis in annotated if flow.sizes[axis] != 1)
        if flow.size(found) != flow.size(said):
            raise BadInput(
                f"dim {number} of {name} has {flow.size(found)} elements and is annotated with {_words(said)} of"
                f" {flow.size(said)}"
            )
        if found == said:
            continue
        foreign = [axis for axis in found if axis not in flow.given]
        if not foreign and not (set(said) - seen):
            if set(found) | set(said) <= annotation.unsharded:
                continue
            raise BadInput(
                f"dim {number} of {name} is {_words(found)} and is annotated with {_words(said)}",
                why="that is what its formula computes",
                remedy="correct the annotation, or mark the axis with ^",
            )
        pairs = list(zip(found, said, strict=True)) if len(found) == len(said) else []
        if not pairs or any(a != b and flow.sizes[a] != flow.sizes[b] for a, b in pairs):
            flow.keep_unsharded((*found, *said), "the annotation has other axes there than the formula")
            continue
        for a, b in pairs:
            if a == b:
                continue
            if a in flow.given or b in seen:
                flow.keep_unsharded((a, b), f"dim {number} of the result is another axis")
            elif a in flow.created and a not in flow.unsharded:
                created.add(b)
                if a in flow.positional:
                    flow.positional.add(b)
            else:
                flow.keep_unsharded((b,), flow.unsharded.get(a, "the function makes it"))
    return created


def _check_marks(name: str, flow: AxisFlow, annotation: Annotation, kept: set[str], warnings: list[str]) -> None:
    """Compare the marks of the annotation with the result of the walk. Raises BadInput for a wrong mark."""
    seen = {axis for operand in annotation.operands for dim in operand for axis in dim}
    for axis in sorted(flow.given):
        why = flow.unsharded.get(axis)
        if axis in annotation.explicit and axis in annotation.reduced:
            if axis in flow.contradicted and axis not in flow.reduced:
                raise BadInput(
                    f"{name}: axis {axis_name(axis)} is marked + (reduced)", why=f"{why}", remedy="mark it with ^"
                )
            if axis in kept and axis not in flow.reduced:
                raise BadInput(
                    f"{name}: axis {axis_name(axis)} is marked + (reduced)",
                    why="the formula keeps it in its result",
                    remedy="leave the mark out",
                )
        elif why is not None and axis in seen and axis not in annotation.explicit:
            _warn(warnings, name, (axis,), annotation, why)


def _warn(warnings: list[str], name: str, dim: Dim, annotation: Annotation, why: str) -> None:
    loud = [axis for axis in dim if axis not in annotation.explicit]
    text = f"{name}: axis {_words(tuple(loud))} is kept whole: {why}"
    if loud and text not in warnings:
        warnings.append(text)


def _words(dim: Dim) -> str:
    return " ".join(axis_name(axis) for axis in dim) or "1"


def _opaque(name: str, given: frozenset[str], annotation: Annotation, why: str) -> AxisRoles:
    loud = given - annotation.unsharded
    warning = f"{name} is opaque, and computed on whole tensors: {why}"
    return AxisRoles(unsharded=given, warnings=(warning,) if loud else ())


def _believed(annotation: Annotation, given: frozenset[str]) -> AxisRoles:
    """Return roles as stated by the annotation of a declared function, or of a view."""
    seen = {axis for operand in annotation.operands for dim in operand for axis in dim}
    return AxisRoles(
        unsharded=annotation.unsharded | annotation.normalized,
        partial=dict.fromkeys(annotation.reduced, "sum"),
        created=frozenset(given - seen - annotation.unsharded),
    )


def derive_annotation(
    formula: Formula,
    operands: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
    names: Mapping[str, Sequence[str]],
    *,
    index: int = 0,
) -> tuple[Annotation, dict[str, int]]:
    """Return the annotation that a formula implies for `operands`, and the sizes of its axes.

    Axes get the names that tensors declare (`names`), where those differ. An operator that is not understood gets axes
    that are kept whole. Raises BadInput if the shape of its result is unknown as well.
    """
    flow = AxisFlow(tensors={}, sizes={})
    dims_of = {name: tuple(flow.new_dim(size) for size in shapes[name]) for name in operands}
    flow.tensors = {name: Value(dims) for name, dims in dims_of.items()}
    try:
        value = result_of(walk(flow, formula.tree, formula.merges), index)
    except NotUnderstood as error:
        raise BadInput(
            "the axes of an operator are not known", why=str(error), remedy="annotate it: `y = f(x) :: t h^ -> t h^`"
        ) from error
    result = flow.dims(value)
    renamed = _readable_names(flow, [(dims_of[name], names.get(name, ())) for name in operands], result)

    def rename(dims: Sequence[Dim]) -> tuple[Dim, ...]:
        return tuple(tuple(renamed[axis] for axis in flow.dim(dim)) for dim in dims)

    kept = {axis for dim in result for axis in dim}
    gone = {axis for name in operands for dim in dims_of[name] for axis in flow.dim(dim)} - kept
    annotation = Annotation(
        operands=tuple(rename(dims_of[name]) for name in operands),
        results=(rename(result),),
        reduced=frozenset(renamed[axis] for axis in gone & flow.reduced),
        unsharded=frozenset(renamed[axis] for axis in set(flow.unsharded) & set(renamed)),
        normalized=frozenset(renamed[axis] for axis in set(flow.merged) & kept),
        explicit=frozenset(renamed.values()),
    )
    return annotation, {new: flow.sizes[old] for old, new in renamed.items()}


def _readable_names(
    flow: AxisFlow, declared: Sequence[tuple[Sequence[Dim], Sequence[str]]], result: Sequence[Dim]
) -> dict[str, str]:
    names: dict[str, str] = {}
    taken: set[str] = set()
    for dims, words in declared:
        for dim, word in zip(dims, words, strict=False):
            found = flow.dim(dim)
            if len(found) == 1 and found[0] not in names and word.isidentifier() and word not in taken:
                names[found[0]] = word
                taken.add(word)
    for dims in (*(dims for dims, _ in declared), result):
        for dim in dims:
            for axis in flow.dim(dim):
                if axis not in names:
                    word = next(w for n in range(1000) if (w := f"a{n}") not in taken)
                    names[axis] = word
                    taken.add(word)
    return names
