"""An operator bound to tensors: the axes of its annotation with their sizes, and the properties of its formula.

Axis names are local to an annotation, so tensors are matched by position and size. Two operators may use different
names for one dim, and one may see a single axis where another sees two.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod

from planner.sharding.operators.formula import Formula, parse_formula
from planner.sharding.operators.roles import AxisRoles, check_annotation, derive_annotation
from planner.sharding.ops.annotation import Annotation, Dim, axis_name, parse_annotation
from planner.sharding.ops.axis_flow import NotUnderstood, Shape
from planner.sharding.ops.table import shape_of
from topology.errors import BadInput

MAX_TENSORS_TO_PERMUTE = 6
PRODUCT = "__product"  # suffix of the name of a linear layer's result before its bias is added


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of the graph: global shape, dtype, and the axis names that its dims were declared with.

    `origin` is the name of a parameter or buffer in the module that a graph was captured from.
    """

    name: str
    shape: Shape
    dtype: str
    axes: tuple[str, ...] = ()
    origin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One result, its operands as (tensor name, axes by dim), and the sizes of all axes.

    `text` is the formula, of which this is result number `index`. `reduced` axes are in no result, `output_only` axes
    in the result alone; `roles` says what sharding an axis means. `unannotated` tensors are in the formula but not in
    the annotation: they must be replicated.
    """

    result: Tensor
    text: str
    operands: tuple[tuple[str, tuple[Dim, ...]], ...]
    dims: tuple[Dim, ...]
    sizes: Mapping[str, int]
    reduced: frozenset[str]
    output_only: frozenset[str]
    unannotated: tuple[str, ...]
    kind: str
    is_view: bool
    roles: AxisRoles
    index: int = 0
    functions: frozenset[str] = frozenset()

    @property
    def likeness(self) -> Hashable:
        """Equal for operators that differ only in the names of their tensors (`repeated.py`). Holds object identities,
        so it is valid only while the operators exist.
        """
        return id(self.roles), id(self.sizes), self.result.dtype

    @property
    def axes(self) -> tuple[str, ...]:
        """Return all axes in order of appearance."""
        every = [axis for _, dims in self.operands for dim in dims for axis in dim]
        return tuple(dict.fromkeys([*every, *(axis for dim in self.dims for axis in dim)]))


def parse_operators(
    text: str, tensors: Mapping[str, Tensor], sizes: Mapping[str, int], declared: Collection[str] = ()
) -> list[Operator]:
    """Parse `name = formula :: annotation` into one operator per result. Raises BadInput.

    The annotation defaults to one derived from the functions of the formula. The annotation of a function in `declared`
    is believed. The bias of a linear layer becomes an operator of its own, because it is added once: after a pending
    reduction.
    """
    left, separator, annotation_text = text.partition("::")
    names, equals, formula_text = left.partition("=")
    results = [name.strip() for name in names.split(",")]
    if not equals or not all(name.isidentifier() for name in results):
        raise BadInput(f"cannot read the operator {text[:80]!r}", remedy="`y = linear(x, w) :: t h+, f h+ -> t f`")
    duplicates = [name for name in results if name in tensors or name + PRODUCT in tensors]
    if duplicates or len(set(results)) < len(results):
        name = (duplicates or results)[0]
        raise BadInput(f"{name} is given twice", why="every tensor is made once", remedy="another name")
    formula = parse_formula(formula_text, tensors)
    operators = []
    for index, name in enumerate(results):
        bound = _Binding(name=name, text=formula_text, index=index, tensors=tensors, declared=frozenset(declared))
        if separator:
            annotation = parse_annotation(annotation_text)
            if len(results) != len(annotation.results):
                raise BadInput(f"{text[:60]!r} names {len(results)} results and annotates {len(annotation.results)}")
            operators += bound.with_annotation(
                formula, replace(annotation, results=annotation.results[index : index + 1]), sizes
            )
        else:
            operators += bound.with_derived_annotation(formula)
    return operators


@dataclass(frozen=True, slots=True, kw_only=True)
class _Binding:
    """One result of a line being parsed; a `derived` annotation has the operands in the formula's order."""

    name: str
    text: str
    index: int
    tensors: Mapping[str, Tensor]
    declared: frozenset[str]
    derived: bool = False

    def with_derived_annotation(self, formula: Formula) -> list[Operator]:
        if formula.bias and formula.bias not in formula.tensors[:2]:
            return self._with_bias_after(formula)
        operands = tuple(dict.fromkeys(formula.tensors))
        shapes = {name: self.tensors[name].shape for name in operands}
        names = {name: self.tensors[name].axes for name in operands}
        annotation, sizes = derive_annotation(formula, operands, shapes, names, index=self.index)
        return replace(self, derived=True).with_annotation(formula, annotation, sizes)

    def with_annotation(self, formula: Formula, annotation: Annotation, sizes: Mapping[str, int]) -> list[Operator]:
        if formula.bias and len(annotation.operands) == 3 and formula.tensors[2:] == (formula.bias,):
            return self._split_off_bias(formula, annotation, sizes)
        return [self.bind(formula, annotation, sizes)]

    def _with_bias_after(self, formula: Formula) -> list[Operator]:
        """Return the product, whose sum may stay pending, and the addition of its bias."""
        x, w, bias = formula.tensors
        between = self.name + PRODUCT
        text = f"linear({x}, {w})"
        first = replace(self, name=between, text=text).with_derived_annotation(parse_formula(text, [x, w]))
        text, tensors = f"{between} + {bias}", {**self.tensors, between: first[0].result}
        second = replace(self, text=text, tensors=tensors)
        return [*first, *second.with_derived_annotation(parse_formula(text, [between, bias]))]

    def _split_off_bias(self, formula: Formula, annotation: Annotation, sizes: Mapping[str, int]) -> list[Operator]:
        """Return the product and the addition of its bias; the tensor between them is named after the result."""
        x, w, bias = formula.tensors
        between = self.name + PRODUCT
        first = replace(self, name=between, text=f"linear({x}, {w})")
        product_annotation = replace(annotation, operands=annotation.operands[:2])
        product = first.bind(parse_formula(first.text, [x, w]), product_annotation, sizes)
        second = replace(self, text=f"{between} + {bias}", tensors={**self.tensors, between: product.result})
        bias_annotation = replace(
            annotation,
            operands=(annotation.results[0], annotation.operands[2]),
            reduced=frozenset(),
            unsharded=annotation.unsharded - annotation.reduced,
            normalized=frozenset(),
            explicit=annotation.explicit - annotation.reduced,
        )
        return [product, second.bind(parse_formula(second.text, [between, bias]), bias_annotation, sizes)]

    def bind(self, formula: Formula, annotation: Annotation, sizes: Mapping[str, int]) -> Operator:
        return _bind_operator(self, formula, annotation, sizes)


def _bind_operator(line: _Binding, formula: Formula, annotation: Annotation, declared: Mapping[str, int]) -> Operator:
    name, text, tensors = line.name, line.text, line.tensors
    operand_names = tuple(dict.fromkeys(formula.tensors))
    if line.derived:
        sizes = _axis_sizes(operand_names, annotation, tensors)
    else:
        operand_names, sizes = _match_operands(text, formula, annotation, tensors)
    shapes = {name: tensors[name].shape for name in {*formula.tensors, *operand_names}}
    try:
        result = shape_of(formula.tree, shapes, line.index)
    except NotUnderstood:
        result = None
    _infer_axis_sizes(sizes, annotation, operand_names, declared, result, tensors)
    annotation = _merge_unknown_groups(annotation, operand_names, sizes, tensors)
    (dims,) = annotation.results
    unknown = [axis for dim in dims for axis in dim if axis not in sizes]
    if unknown:
        raise BadInput(
            f"{name}: the size of axis {axis_name(unknown[0])} is not known",
            why="no operand has a dim of this axis only",
            remedy="give it under axes",
        )
    seen = {axis for operand in annotation.operands for dim in operand for axis in dim}
    roles = check_annotation(
        name.removesuffix(PRODUCT),
        formula,
        annotation,
        operand_names,
        sizes,
        shapes,
        index=line.index,
        declared=bool(formula.functions & line.declared),
    )
    floats = [tensors[name].dtype for name in operand_names if tensors[name].dtype.startswith(("f", "bf"))]
    dtype = floats[0] if floats else (tensors[operand_names[0]].dtype if operand_names else "f32")
    if formula.kind in {"softmax", "logsumexp", "cross_entropy"} and dtype != "f64":
        dtype = "f32"  # as in torch autocast
    return Operator(
        result=Tensor(
            name=name,
            shape=tuple(prod(sizes[axis] for axis in dim) for dim in dims),
            dtype=dtype,
            axes=tuple(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims),
        ),
        text=text.strip(),
        operands=tuple(zip(operand_names, annotation.operands, strict=True)),
        dims=dims,
        sizes=sizes,
        reduced=annotation.reduced,
        output_only=frozenset(axis for dim in dims for axis in dim if axis not in seen),
        unannotated=tuple(dict.fromkeys(n for n in formula.tensors if n not in operand_names)),
        kind=formula.kind,
        is_view=formula.is_view,
        roles=roles,
        index=line.index,
        functions=formula.functions,
    )


def _match_operands(
    text: str, formula: Formula, annotation: Annotation, tensors: Mapping[str, Tensor]
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the tensor of each annotated operand, and the resulting axis sizes. Raises BadInput if none fits.

    Operands are matched in the order of the formula or, where the shapes do not fit (`einsum(p, einsum(x, w))`
    annotated x first), in the order that fits and renames the fewest declared dims.
    """
    num_operands, distinct = len(annotation.operands), tuple(dict.fromkeys(formula.tensors))
    orders: list[tuple[str, ...]] = []
    if len(formula.tensors) == num_operands:
        orders.append(formula.tensors)
    if len(distinct) >= num_operands:
        orders.append(distinct[:num_operands])
        if len(distinct) <= MAX_TENSORS_TO_PERMUTE:
            orders += permutations(distinct, num_operands)
    if not orders:
        raise BadInput(
            f"{text.strip()[:60]!r} has {len(distinct)} tensors and an annotation of {num_operands}",
            why="every annotated operand is a tensor that was given or made before",
            remedy="annotate the tensors of the formula, in its order",
        )
    problem: BadInput | None = None
    best: tuple[int, tuple[str, ...], dict[str, int]] | None = None
    for operand_names in orders:
        try:
            sizes = _axis_sizes(operand_names, annotation, tensors)
        except BadInput as error:
            problem = problem or error
            continue
        renamed_dims = sum(
            dim != (declared,)
            for name, dims in zip(operand_names, annotation.operands, strict=True)
            for dim, declared in zip(dims, tensors[name].axes, strict=False)
            if len(dim) == 1 and axis_name(dim[0]) != declared
        )
        if best is None or renamed_dims < best[0]:
            best = (renamed_dims, operand_names, sizes)
    if best is None:
        assert problem is not None  # noqa: S101 - no order fitted, so there is an error
        raise problem
    return best[1], best[2]


def _axis_sizes(operand_names: Sequence[str], annotation: Annotation, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sizes of the axes that have a dim to themselves. Raises BadInput if two operands disagree."""
    sizes: dict[str, int] = {}
    for name, dims in zip(operand_names, annotation.operands, strict=True):
        shape = tensors[name].shape
        if len(shape) != len(dims):
            raise BadInput(f"{name} has {len(shape)} dims and is annotated with {len(dims)}")
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) != 1:
                continue
            (axis,) = dim
            if sizes.get(axis, 1) == 1:
                sizes[axis] = size
            elif size not in {1, sizes[axis]}:
                raise BadInput(f"axis {axis_name(axis)} is {sizes[axis]} and, in {name}, {size}")
    return sizes


def _infer_axis_sizes(
    sizes: dict[str, int],
    annotation: Annotation,
    operand_names: Sequence[str],
    declared: Mapping[str, int],
    result: Shape | None,
    tensors: Mapping[str, Tensor],
) -> None:
    """Add to `sizes` the axes inside groups and the axes that only the result has."""
    (dims,) = annotation.results
    groups = [
        (dim, size)
        for name, ds in zip(operand_names, annotation.operands, strict=True)
        for dim, size in zip(ds, tensors[name].shape, strict=True)
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


def _merge_unknown_groups(
    annotation: Annotation, operand_names: Sequence[str], sizes: dict[str, int], tensors: Mapping[str, Tensor]
) -> Annotation:
    """Treat a group whose axes have unknown sizes as one axis, as in `b s e+, (h t) e+ -> b s (h t)`."""
    merged = {}
    for name, dims in zip(operand_names, annotation.operands, strict=True):
        for dim, size in zip(dims, tensors[name].shape, strict=True):
            if len(dim) > 1 and not any(axis in sizes for axis in dim):
                merged[dim] = f"({' '.join(dim)})"
                sizes[merged[dim]] = size

    def rename(operand: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple((merged[dim],) if dim in merged else dim for dim in operand)

    merged_axis_of = {axis: name for dim, name in merged.items() for axis in dim}
    return replace(
        annotation,
        operands=tuple(rename(operand) for operand in annotation.operands),
        results=tuple(rename(operand) for operand in annotation.results),
        reduced=frozenset(merged_axis_of.get(axis, axis) for axis in annotation.reduced),
        unsharded=frozenset(merged_axis_of.get(axis, axis) for axis in annotation.unsharded),
        normalized=frozenset(merged_axis_of.get(axis, axis) for axis in annotation.normalized),
        explicit=frozenset(merged_axis_of.get(axis, axis) for axis in annotation.explicit),
    )
