"""An operator bound to tensors: the axes of its annotation with their sizes, and what its formula says of them.

The annotation names axes of its own, so tensors are bound by position and size; two operators may call one dim by two
names, or one of them see a single dim where the other sees two axes in it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod

from planner.sharding import expression, notation
from planner.sharding.expression import Formula, Term
from planner.sharding.notation import Dim, Notation, axis_name
from planner.sharding.shapes import Shape, integer, shape_of
from topology.errors import BadInput

MAX_BOUND_BY_TRIAL = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of the whole problem: global shape, element type, and the names its dims were declared with."""

    name: str
    shape: Shape
    dtype: str
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One result, its operands (tensor name, axes by dim) and the sizes of all axes.

    `reduced`, `whole` and `kept` are axes by their mark, `created` those that only the result has. `unlisted` tensors are
    in the formula and not in the annotation: they are taken whole.
    """

    result: Tensor
    text: str
    operands: tuple[tuple[str, tuple[Dim, ...]], ...]
    dims: tuple[Dim, ...]
    sizes: Mapping[str, int]
    reduced: frozenset[str]
    whole: frozenset[str]
    kept: frozenset[str]
    created: frozenset[str]
    unlisted: tuple[str, ...]
    terms: tuple[Term, ...]
    kind: str
    is_view: bool
    best: int = 0  # elements that a top-k keeps

    @property
    def axes(self) -> tuple[str, ...]:
        """Return all axes in order of appearance."""
        every = [axis for _, dims in self.operands for dim in dims for axis in dim]
        return tuple(dict.fromkeys([*every, *(axis for dim in self.dims for axis in dim)]))


def operators_of(text: str, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> list[Operator]:
    """Return what `name = formula :: annotation` is: one operator a result; a linear layer's bias is an addition apart.

    The bias goes apart because it is to be added once: after the reduction where that is pending. Raises BadInput.
    """
    left, separator, annotation = text.partition("::")
    names, equals, formula_text = left.partition("=")
    results = [name.strip() for name in names.split(",")]
    if not separator or not equals or not all(name.isidentifier() for name in results):
        raise BadInput(f"cannot read the operator {text[:80]!r}", remedy="`y = linear(x, w) :: t h+, f h+ -> t f`")
    spec = notation.parse(annotation)
    if len(results) != len(spec.results):
        raise BadInput(f"{text[:60]!r} names {len(results)} results and annotates {len(spec.results)}")
    clash = [name for name in results if name in tensors]
    if clash:
        raise BadInput(f"{clash[0]} is given twice", why="every tensor is made once", remedy="another name")
    formula = expression.parse(formula_text, list(tensors))
    out = []
    for index, name in enumerate(results):
        one = replace(spec, results=(spec.results[index],))
        if formula.bias and len(spec.operands) == 3 and formula.tensors[2:] == (formula.bias,):
            out += _with_bias(name, formula_text, formula, one, tensors, sizes)
        else:
            out.append(_bound(name, formula_text, formula, one, tensors, sizes))
    return out


def _with_bias(
    name: str, text: str, formula: Formula, spec: Notation, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> list[Operator]:
    """Return a product and the addition of its bias; `name.product` is the tensor between them."""
    between = f"{name}.product"
    without = replace(spec, operands=spec.operands[:2])
    terms = tuple(term for term in formula.terms if formula.bias not in term.linear)
    first = _bound(
        between, text, replace(formula, tensors=formula.tensors[:2], terms=terms, bias=""), without, tensors, sizes
    )
    added = expression.parse(f"left + {formula.bias}", ["left", formula.bias])
    after = replace(
        spec,
        operands=(spec.results[0], spec.operands[2]),
        reduced=frozenset(),
        whole=spec.whole - spec.reduced,
        kept=frozenset(),
    )
    renamed = tuple(Term(frozenset({between if n == "left" else n for n in t.linear})) for t in added.terms)
    second = _bound(
        name,
        text,
        replace(added, tensors=(between, formula.bias), terms=renamed),
        after,
        {**tensors, between: first.result},
        sizes,
    )
    return [first, second]


def _bound(
    name: str, text: str, formula: Formula, spec: Notation, tensors: Mapping[str, Tensor], declared: Mapping[str, int]
) -> Operator:
    uses, sizes = _bind(text, formula, spec, tensors)
    shapes = {tensor.name: tensor.shape for tensor in tensors.values()}
    _complete(sizes, spec, uses, declared, shape_of(formula.tree, shapes), tensors)
    spec = _with_groups_joined(spec, uses, sizes, tensors)
    (dims,) = spec.results
    unknown = [axis for dim in dims for axis in dim if axis not in sizes]
    if unknown:
        raise BadInput(
            f"{name}: the size of axis {axis_name(unknown[0])} is not known",
            why="no operand has it alone in a dim",
            remedy="give it under axes",
        )
    seen = {axis for operand in spec.operands for dim in operand for axis in dim}
    floats = [tensors[use].dtype for use in uses if tensors[use].dtype.startswith(("f", "bf"))]
    dtype = floats[0] if floats else (tensors[uses[0]].dtype if uses else "f32")
    if formula.kind in {"softmax", "logsumexp", "cross_entropy"} and dtype != "f64":
        dtype = "f32"  # as torch's autocast has it: statistics of probabilities are kept in single precision
    return Operator(
        result=Tensor(
            name=name,
            shape=tuple(prod(sizes[axis] for axis in dim) for dim in dims),
            dtype=dtype,
            axes=tuple(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims),
        ),
        text=text.strip(),
        operands=tuple(zip(uses, spec.operands, strict=True)),
        dims=dims,
        sizes=sizes,
        reduced=spec.reduced,
        whole=spec.whole,
        kept=spec.kept,
        created=frozenset(axis for dim in dims for axis in dim if axis not in seen),
        unlisted=tuple(dict.fromkeys(n for n in formula.tensors if n not in uses)),
        terms=formula.terms,
        kind=formula.kind,
        is_view=formula.is_view,
        best=_best(formula.tree),
    )


def _bind(
    text: str, formula: Formula, spec: Notation, tensors: Mapping[str, Tensor]
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return which tensor each annotated operand is, and the sizes that follow.

    In the order of the formula, or, where that does not fit (`einsum(p, einsum(x, w))` annotated x first), the order that
    does; of several, the one whose dims were declared under the same names.
    """
    wanted, distinct = len(spec.operands), tuple(dict.fromkeys(formula.tensors))
    orders: list[tuple[str, ...]] = []
    if len(formula.tensors) == wanted:
        orders.append(formula.tensors)
    if len(distinct) >= wanted:
        orders.append(distinct[:wanted])
        if len(distinct) <= MAX_BOUND_BY_TRIAL:
            orders += permutations(distinct, wanted)
    if not orders:
        raise BadInput(
            f"{text.strip()[:60]!r} has {len(distinct)} tensors and an annotation of {wanted}",
            why="every annotated operand is a tensor that was given or made before",
            remedy="annotate the tensors of the formula, in its order",
        )
    problem: BadInput | None = None
    best: tuple[int, tuple[str, ...], dict[str, int]] | None = None
    for uses in orders:
        try:
            sizes = _sizes(uses, spec, tensors)
        except BadInput as error:
            problem = problem or error
            continue
        strange = sum(
            dim != (declared,)
            for use, dims in zip(uses, spec.operands, strict=True)
            for dim, declared in zip(dims, tensors[use].axes, strict=False)
            if len(dim) == 1 and axis_name(dim[0]) != declared
        )
        if best is None or strange < best[0]:
            best = (strange, uses, sizes)
    if best is None:
        assert problem is not None  # noqa: S101 - no order fitted, so the first said why
        raise problem
    return best[1], best[2]


def _sizes(uses: Sequence[str], spec: Notation, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sizes of axes that are alone in a dim of an operand. Raises BadInput where two operands disagree."""
    sizes: dict[str, int] = {}
    for use, dims in zip(uses, spec.operands, strict=True):
        shape = tensors[use].shape
        if len(shape) != len(dims):
            raise BadInput(f"{use} has {len(shape)} dims and is annotated with {len(dims)}")
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) != 1:
                continue
            (axis,) = dim
            if sizes.get(axis, 1) == 1:
                sizes[axis] = size
            elif size not in {1, sizes[axis]}:
                raise BadInput(f"axis {axis_name(axis)} is {sizes[axis]} and, in {use}, {size}")
    return sizes


def _complete(
    sizes: dict[str, int],
    spec: Notation,
    uses: Sequence[str],
    declared: Mapping[str, int],
    result: Shape | None,
    tensors: Mapping[str, Tensor],
) -> None:
    """Find the sizes of axes inside groups, and of those that only the result has."""
    (dims,) = spec.results
    groups = [
        (dim, size)
        for use, ds in zip(uses, spec.operands, strict=True)
        for dim, size in zip(ds, tensors[use].shape, strict=True)
    ]
    if result is not None and len(result) == len(dims):
        groups += zip(dims, result, strict=True)
    for _ in range(2):
        for dim, size in groups:
            missing = [axis for axis in dim if axis not in sizes]
            known = prod(sizes[axis] for axis in dim if axis in sizes)
            if len(missing) == 1 and size % known == 0:
                sizes[missing[0]] = size // known
            elif not missing and len(dim) > 1 and known != size:
                raise BadInput(f"({' '.join(dim)}) is {known} elements, and the dim has {size}")
        for axis in {axis for dim, _ in groups for axis in dim} | {axis for dim in dims for axis in dim}:
            if axis not in sizes and axis_name(axis) in declared:
                sizes[axis] = declared[axis_name(axis)]


def _with_groups_joined(
    spec: Notation, uses: Sequence[str], sizes: dict[str, int], tensors: Mapping[str, Tensor]
) -> Notation:
    """Take groups whose parts have no known sizes as one axis: `b s e+, (h t) e+ -> b s (h t)` never looks inside."""
    joined = {}
    for use, dims in zip(uses, spec.operands, strict=True):
        for dim, size in zip(dims, tensors[use].shape, strict=True):
            if len(dim) > 1 and not any(axis in sizes for axis in dim):
                joined[dim] = f"({' '.join(dim)})"
                sizes[joined[dim]] = size

    def renamed(operand: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple((joined[dim],) if dim in joined else dim for dim in operand)

    inside = {axis: name for dim, name in joined.items() for axis in dim}
    return replace(
        spec,
        operands=tuple(renamed(operand) for operand in spec.operands),
        results=tuple(renamed(operand) for operand in spec.results),
        reduced=frozenset(inside.get(axis, axis) for axis in spec.reduced),
        whole=frozenset(inside.get(axis, axis) for axis in spec.whole),
        kept=frozenset(inside.get(axis, axis) for axis in spec.kept),
    )


def _best(tree: ast.expr) -> int:
    """Return the k of a top-k, or 1."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and expression.called(node) == "topk":
            for argument in node.args:
                if (found := integer(argument)) is not None:
                    return found
    return 1
