"""ATen operators as the compiler's operators: a formula, an annotation of named axes, and the kernel a rank runs.

One function a family of operators. Operators that no rule knows are *opaque*: their operands are needed whole and their
results are whole, which is right for any operator and shards none. Axis names are local to an annotation; the name of an
axis that only the result has carries its size (`b64`), since nothing else gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from simulator.sharded.graph import GraphNode, tensors_in

Shape = tuple[int, ...]
LETTERS = "abcdefgijklmnopq"
# Functions that formulas here use and whose arguments (strides, windows) stand in the kernel alone.
OWN_FUNCTIONS = frozenset(("groupnorm", "topk_part", "valid"))
OWN_PREFIXES = ("opaque_", "space_", "along_")

# ATen's names of operators that compute every element of the result from the same element of their operands.
_POINTWISE = frozenset(
    (
        "abs",
        "acos",
        "add",
        "addcmul",
        "asin",
        "atan",
        "atan2",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bitwise_xor",
        "ceil",
        "celu",
        "clamp",
        "clamp_max",
        "clamp_min",
        "cos",
        "cosh",
        "div",
        "elu",
        "eq",
        "erf",
        "exp",
        "expm1",
        "floor",
        "floor_divide",
        "fmod",
        "ge",
        "gelu",
        "gt",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "isfinite",
        "isinf",
        "isnan",
        "le",
        "leaky_relu",
        "lerp",
        "log",
        "log10",
        "log1p",
        "log2",
        "log_sigmoid",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "lt",
        "masked_fill",
        "maximum",
        "minimum",
        "mish",
        "mul",
        "ne",
        "neg",
        "pow",
        "prelu",
        "reciprocal",
        "relu",
        "relu6",
        "remainder",
        "round",
        "rsqrt",
        "rsub",
        "selu",
        "sigmoid",
        "sign",
        "silu",
        "sin",
        "sinh",
        "softplus",
        "sqrt",
        "square",
        "sub",
        "tan",
        "tanh",
        "tanhshrink",
        "threshold",
        "true_divide",
        "trunc",
        "where",
        "_to_copy",
        "to",
        "type_as",
        "float",
        "half",
        "bool",
    )
)
_CASTS = frozenset(("to", "_to_copy", "type_as", "float", "half", "bool"))
_SAME_ELEMENTS = frozenset(("contiguous", "clone", "detach", "alias", "lift_fresh_copy", "dropout", "detach_"))
_RESHAPES = frozenset(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_copy"))
_REDUCTIONS = {"sum": "sum", "mean": "mean", "amax": "amax", "amin": "amin"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One operator of the case: `result = formula :: annotation`, and the kernel `op(*args)` that computes it.

    `sizes` are those of axes that no operand has by itself.
    """

    result: str
    formula: str
    annotation: str
    op: str
    args: tuple[Any, ...]
    shape: Shape
    dtype: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    known: bool = True
    index: int | None = None

    @property
    def text(self) -> str:
        return f"{self.result} = {self.formula} :: {self.annotation}"

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors among the kernel's arguments, in order, each once."""
        return tensors_in([*self.args, *self.kwargs.values()])


class _NotKnownError(Exception):
    """The operator, with these arguments, has no rule."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A node with the shapes of its operands at hand."""

    node: GraphNode
    shapes: dict[str, Shape]

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload."""
        return self.node.op.removeprefix("aten.").split(".", maxsplit=1)[0]

    def tensor(self, position: int) -> str:
        """Return the tensor that an argument is. Raises _NotKnownError if it is none."""
        value = self.argument(position)
        if not isinstance(value, dict) or "tensor" not in value:
            raise _NotKnownError
        return str(value["tensor"])

    def optional_tensor(self, position: int, keyword: str) -> str:
        value = self.argument(position, self.node.kwargs.get(keyword))
        return str(value["tensor"]) if isinstance(value, dict) and "tensor" in value else ""

    def argument(self, position: int, default: Any = None) -> Any:
        return self.node.args[position] if position < len(self.node.args) else default

    def shape(self, position: int) -> Shape:
        return self.shapes[self.tensor(position)]

    def dim(self, position: int, rank: int, default: Any = None) -> int:
        value = self.argument(position, default)
        if not isinstance(value, int) or isinstance(value, bool) or not -max(rank, 1) <= value < max(rank, 1):
            raise _NotKnownError
        return value % max(rank, 1)

    def statement(self, formula: str, annotation: str, **more: Any) -> Statement:
        """Return the statement of this node; by default its kernel is the operator itself."""
        given = {
            "op": self.node.op,
            "args": self.node.args,
            "kwargs": self.node.kwargs,
            "result": self.node.name,
            "shape": self.node.shape,
            "dtype": self.node.dtype,
            "index": self.node.index if more.get("op", self.node.op) == self.node.op else None,
        }
        return Statement(formula=formula, annotation=annotation, **{**given, **more})


def statements(node: GraphNode, shapes: dict[str, Shape]) -> list[Statement]:
    """Return the statements of one node of a graph; `shapes` are of all tensors before it."""
    call = _Call(node, shapes)
    rule = _RULES.get(call.name)
    if rule is None and call.name in _POINTWISE:
        rule = _pointwise
    if rule is not None and node.op.startswith("aten."):
        try:
            return rule(call)
        except (_NotKnownError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            pass  # arguments that the operator does not take, from a file: the annotation of an opaque one is always right
    return [_opaque(call)]


def _opaque(call: _Call) -> Statement:
    """Operands whole, result whole."""
    operands = call.node.operands()
    parts: list[str] = []
    sizes: dict[str, int] = {}
    for number, name in enumerate(operands):
        parts.append(" ".join(f"u{number}{LETTERS[d]}^" if n > 1 else "1" for d, n in enumerate(call.shapes[name])))
    dims, more = _result_axes(call.node.shape)
    sizes |= more
    return call.statement(
        f"opaque_{call.name}({', '.join(operands)})",
        f"{', '.join(parts)} -> {' '.join(dims)}",
        sizes=sizes,
        known=False,
    )


def _result_axes(shape: Shape, positions: Sequence[int] | None = None) -> tuple[list[str], dict[str, int]]:
    """Return axes that only a result has, named by position and size, and their sizes."""
    chosen = range(len(shape)) if positions is None else positions
    names = [f"r{LETTERS[d]}{shape[d]}" if shape[d] > 1 else "1" for d in chosen]
    return names, {f"r{LETTERS[d]}{shape[d]}": shape[d] for d in chosen if shape[d] > 1}


def _letters(shape: Shape) -> list[str]:
    return [LETTERS[d] if n > 1 else "1" for d, n in enumerate(shape)]


def _written(dims: Sequence[str], marks: dict[int, str] | None = None) -> str:
    """Return dims as an annotation, with marks by position; dims of one element carry none."""
    return " ".join(d + ((marks or {}).get(i, "") if d != "1" else "") for i, d in enumerate(dims))


# --- elements and views -----------------------------------------------------------------------------------------------


def _pointwise(call: _Call) -> list[Statement]:
    node = call.node
    operands = node.operands()
    if not operands or len(operands) > 3:
        raise _NotKnownError
    rank = len(node.shape)
    dims = _letters(node.shape)
    parts = []
    for name in operands:
        shape = call.shapes[name]
        lead = rank - len(shape)
        if lead < 0 or any(n not in {1, node.shape[lead + i]} for i, n in enumerate(shape)):
            raise _NotKnownError
        parts.append(" ".join(dims[lead + i] if n > 1 else "1" for i, n in enumerate(shape)))
    annotation = f"{', '.join(parts)} -> {' '.join(dims)}"
    if call.name in _CASTS:
        annotation = f"{parts[0]} -> {' '.join(dims)}"
        formula, args = _formula(call, operands[:1]), (call.argument(0),)
        return [call.statement(formula, annotation, op="cast", args=args, kwargs={})]
    return [call.statement(_formula(call, operands), annotation)]


def _formula(call: _Call, operands: Sequence[str]) -> str:
    """Return a pointwise formula that shows in which operands it is linear."""
    node = call.node
    signs = {"add": "+", "sub": "-", "mul": "*", "div": "/", "true_divide": "/"}
    if call.name == "neg":
        return f"-{operands[0]}"
    if call.name in {"to", "_to_copy", "type_as", "float"} and node.dtype in {"f64", "f32", "bf16", "f16"}:
        return f"to({operands[0]})"
    if call.name in signs and len(node.args) == 2 and not node.kwargs:
        both = [str(a["tensor"]) if isinstance(a, dict) else repr(a) for a in node.args]
        if all(isinstance(a, dict | int | float) for a in node.args):
            return f"{both[0]} {signs[call.name]} {both[1]}"
    return f"{call.name}({', '.join(operands)})"


def _same_elements(call: _Call) -> list[Statement]:
    dims = " ".join(_letters(call.node.shape))
    args = (call.argument(0),)
    return [call.statement(f"contiguous({call.tensor(0)})", f"{dims} -> {dims}", op="same", args=args, kwargs={})]


def _reshape(call: _Call) -> list[Statement]:
    before, after, name = call.shape(0), call.node.shape, call.tensor(0)
    left, right, sizes = reshape_axes(before, after)
    return [
        call.statement(
            f"reshape({name}, {', '.join(map(str, after))})",
            f"{' '.join(left)} -> {' '.join(right)}",
            sizes=sizes,
            op="reshape",
            args=({"tensor": name},),
            kwargs={},
        )
    ]


def reshape_axes(before: Shape, after: Shape) -> tuple[list[str], list[str], dict[str, int]]:
    """Return the axes of a view's dims before and after, and their sizes: the factors that both shapes are made of.

    Dims that share no boundary between elements are one group; a group whose factors do not nest is needed whole.
    """
    left, right = [""] * len(before), [""] * len(after)
    sizes: dict[str, int] = {}
    i = j = number = 0
    while i < len(before) or j < len(after):
        here: list[int] = []
        there: list[int] = []
        have, want = 1, 1
        while True:
            if have == want and (here or there) and (have > 1 or (i == len(before) and j == len(after))):
                break
            if (have <= want and i < len(before)) or j == len(after):
                here.append(i)
                have *= before[i]
                i += 1
            else:
                there.append(j)
                want *= after[j]
                j += 1
        number += 1
        number = _name_group(before, after, here, there, left, right, sizes, number)
    return left, right, sizes


def _name_group(
    before: Shape,
    after: Shape,
    here: list[int],
    there: list[int],
    left: list[str],
    right: list[str],
    sizes: dict[str, int],
    number: int,
) -> int:
    """Name the axes of one group of dims; return the last number used."""
    cuts = sorted({prod(before[d] for d in here[k:]) for k in range(len(here) + 1)} | {
        prod(after[d] for d in there[k:]) for k in range(len(there) + 1)
    }, reverse=True)  # fmt: skip
    nested = all(big % small == 0 for big, small in pairwise(cuts))
    if not nested:
        for d in here:
            left[d] = f"w{number}{LETTERS[d]}^" if before[d] > 1 else "1"
        for d in there:
            right[d] = f"v{number}{LETTERS[d]}" if after[d] > 1 else "1"
            if after[d] > 1:
                sizes[right[d]] = after[d]
        return number
    axes = []
    for big, small in pairwise(cuts):
        size = big // small
        name = f"x{number}s{size}"
        number += 1
        axes.append((name, size))
        sizes[name] = size
    for dims, shape, out in ((here, before, left), (there, after, right)):
        rest = list(axes)
        for d in dims:
            own, left_over = [], shape[d]
            while left_over > 1:
                name, size = rest.pop(0)
                own.append(name)
                left_over //= size
            out[d] = "1" if not own else own[0] if len(own) == 1 else f"({' '.join(own)})"
    return number


def _permuted(call: _Call, order: Sequence[int]) -> list[Statement]:
    dims = _letters(call.shape(0))
    right = " ".join(dims[d] for d in order)
    args = (call.argument(0), list(order))
    annotation = f"{' '.join(dims)} -> {right}"
    formula = f"permute({call.tensor(0)}, {', '.join(map(str, order))})"
    return [call.statement(formula, annotation, op="permute", args=args, kwargs={})]


def _transpose(call: _Call) -> list[Statement]:
    order = list(range(len(call.shape(0))))
    if call.name in {"t", "numpy_T"}:
        return _permuted(call, order[::-1])
    if call.name in {"mT", "adjoint"}:
        return _permuted(call, [*order[:-2], order[-1], order[-2]])
    first, second = (call.dim(p, len(order)) for p in (1, 2))
    order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


def _permute(call: _Call) -> list[Statement]:
    rank = len(call.shape(0))
    return _permuted(call, [int(d) % rank for d in call.argument(1)])


def _expand(call: _Call) -> list[Statement]:
    before, after = call.shape(0), call.node.shape
    lead = len(after) - len(before)
    dims = _letters(before)
    new = [d for d in range(len(after)) if d < lead or (before[d - lead] == 1 and after[d] > 1)]
    names, sizes = _result_axes(after, new)
    made = dict(zip(new, names, strict=True))
    right = [made.get(d) or dims[d - lead] for d in range(len(after))]
    annotation = f"{' '.join(dims)} -> {' '.join(right)}"
    args = (call.argument(0),)
    return [
        call.statement(
            f"expand({call.tensor(0)}, {', '.join(map(str, after))})",
            annotation,
            sizes=sizes,
            op="expand",
            args=args,
            kwargs={},
        )
    ]


def _repeat_interleave(call: _Call) -> list[Statement]:
    shape, times = call.shape(0), call.argument(1)
    dim = call.dim(2, len(shape))
    dims = _letters(shape)
    right = [f"({dims[dim]} t{times})" if d == dim and n != "1" else n for d, n in enumerate(dims)]
    if dims[dim] == "1":
        right[dim] = f"t{times}"
    args = (call.argument(0), int(times), dim)
    sizes = {f"t{times}": int(times)}
    annotation = f"{' '.join(dims)} -> {' '.join(right)}"
    formula = f"repeat_interleave({call.tensor(0)}, {times}, {dim})"
    return [call.statement(formula, annotation, sizes=sizes, op="repeat_interleave", args=args, kwargs={})]


# --- parts and joins --------------------------------------------------------------------------------------------------


def _part(call: _Call, dim: int, start: int, step: int = 1) -> list[Statement]:
    """A range of a dim, which is needed whole; `narrow` of a rank's piece is that of the others' dims."""
    before, after = call.shape(0), call.node.shape
    if before == after:
        return _same_elements(call)
    dims = _letters(before)
    names, sizes = _result_axes(after, [dim])
    right = [names[0] if d == dim else n for d, n in enumerate(dims)]
    args = (call.argument(0), dim, start, after[dim], step)
    annotation = f"{_written(dims, {dim: '^'})} -> {' '.join(right)}"
    formula = f"narrow({call.tensor(0)}, {dim}, {start}, {after[dim]})"
    return [call.statement(formula, annotation, sizes=sizes, op="range", args=args, kwargs={})]


def _slice(call: _Call) -> list[Statement]:
    rank = len(call.shape(0))
    dim = call.dim(1, rank, 0)
    size = call.shape(0)[dim]
    start, step = call.argument(2) or 0, call.argument(4, 1)
    return _part(call, dim, max(0, start + size) if start < 0 else min(start, size), int(step))


def _select(call: _Call) -> list[Statement]:
    shape = call.shape(0)
    dim, index = call.dim(1, len(shape)), int(call.argument(2))
    dims = _letters(shape)
    right = [n for d, n in enumerate(dims) if d != dim]
    args = (call.argument(0), dim, index % shape[dim])
    annotation = f"{_written(dims, {dim: '^'})} -> {' '.join(right)}"
    formula = f"select({call.tensor(0)}, {dim}, {index % shape[dim]})"
    return [call.statement(formula, annotation, op="select", args=args, kwargs={})]


def _pieces(call: _Call) -> list[Statement]:
    """One of equal pieces of a dim: the dim is (piece, rest), and the rest may be sharded inside every piece."""
    before, after, index = call.shape(0), call.node.shape, call.node.index
    if index is None:
        raise _NotKnownError
    if call.name == "unbind":
        inner = GraphNode(
            name=call.node.name,
            op=call.node.op,
            args=(call.node.args[0], call.argument(1, 0), index),
            shape=after,
            dtype=call.node.dtype,
        )
        return _select(_Call(inner, call.shapes))
    dim = call.dim(2, len(before), 0)
    sizes = call.argument(1)
    if call.name == "split_with_sizes" or isinstance(sizes, list):
        start = sum(sizes[:index])
    elif call.name == "split":
        start = index * int(sizes)
    else:
        start = index * -(-before[dim] // int(sizes))
    pieces, width = before[dim] // after[dim], after[dim]
    if before[dim] % width or start % width or pieces == 1 or width == 1:
        return _part(call, dim, start)
    dims = _letters(before)
    inner_axis = f"y{width}"
    left = [f"(z{pieces}^ {inner_axis})" if d == dim else n for d, n in enumerate(dims)]
    right = [inner_axis if d == dim else n for d, n in enumerate(dims)]
    args = (call.argument(0), dim, start // width, pieces)
    return [
        call.statement(
            f"chunk({call.tensor(0)}, {pieces}, {dim})[{start // width}]",
            f"{' '.join(left)} -> {' '.join(right)}",
            sizes={inner_axis: width, f"z{pieces}": pieces},
            op="piece",
            args=args,
            kwargs={},
        )
    ]


def _cat(call: _Call) -> list[Statement]:
    listed = call.argument(0)
    names = [str(one["tensor"]) for one in listed]
    if call.name == "stack" or len(set(names)) != len(names):
        raise _NotKnownError
    dim = call.dim(1, len(call.node.shape), 0)
    dims = _letters(call.node.shape)
    made, sizes = _result_axes(call.node.shape, [dim])
    parts = []
    for number, name in enumerate(names):
        own = [f"q{number}" if d == dim and call.shapes[name][dim] > 1 else n for d, n in enumerate(dims)]
        if call.shapes[name][dim] == 1:
            own[dim] = "1"
        parts.append(_written(own, {dim: "^"}))
    right = [made[0] if d == dim else n for d, n in enumerate(dims)]
    return [
        call.statement(
            f"cat([{', '.join(names)}], {dim})",
            f"{', '.join(parts)} -> {' '.join(right)}",
            sizes=sizes,
            op="aten.cat.default",
            args=(listed, dim),
            kwargs={},
        )
    ]


# --- products ---------------------------------------------------------------------------------------------------------


def _product(call: _Call, formula: str, annotation: str, bias: str, bias_axes: str, **kernel: Any) -> list[Statement]:
    """A product and, as an operator of its own, its bias: it is added once, after what the product leaves pending."""
    if not bias:
        return [call.statement(formula, annotation, **kernel)]
    result = annotation.rpartition("->")[2].strip()
    product_name = f"{call.node.name}_product"[-64:]
    rank, where = len(call.node.shape), result.split().index(bias_axes) if bias_axes in result.split() else -1
    first = call.statement(formula, annotation, result=product_name, **kernel)
    args = ({"tensor": product_name}, {"tensor": bias}, where % rank)
    annotation = f"{result}, {bias_axes} -> {result}"
    after = rank - 1 - where % rank
    added = f"reshape({bias}, {', '.join(['-1', *['1'] * after])})" if after else bias
    formula = f"{product_name} + {added}"
    second = call.statement(formula, annotation, op="bias", args=args, kwargs={}, sizes=first.sizes)
    return [first, second]


def _linear(call: _Call) -> list[Statement]:
    x, w = call.shape(0), call.shape(1)
    if not x or len(w) != 2:
        raise _NotKnownError
    lead = [LETTERS[d] if n > 1 else "1" for d, n in enumerate(x[:-1])]
    annotation = f"{' '.join([*lead, 'y+'])}, z y+ -> {' '.join([*lead, 'z'])}"
    formula = f"linear({call.tensor(0)}, {call.tensor(1)})"
    args = (call.argument(0), call.argument(1))
    bias = call.optional_tensor(2, "bias")
    return _product(call, formula, annotation, bias, "z", op="aten.linear.default", args=args, kwargs={})


def _addmm(call: _Call) -> list[Statement]:
    if call.node.kwargs or len(call.shape(0)) != 1:
        raise _NotKnownError
    formula = f"{call.tensor(1)} @ {call.tensor(2)}"
    args = (call.argument(1), call.argument(2))
    annotation = "x y+, y+ z -> x z"
    return _product(call, formula, annotation, call.tensor(0), "z", op="aten.matmul.default", args=args)


def _matmul(call: _Call) -> list[Statement]:
    x, w = call.shape(0), call.shape(1)
    if len(x) < 2 or len(w) < 2:
        raise _NotKnownError
    rank = len(call.node.shape)
    batch = [LETTERS[d] if n > 1 else "1" for d, n in enumerate(call.node.shape[:-2])]

    def lead(shape: Shape) -> list[str]:
        skipped = rank - len(shape)
        return [batch[skipped + d] if n > 1 else "1" for d, n in enumerate(shape[:-2])]

    left = [*lead(x), "x" if x[-2] > 1 else "1", "y+"]
    right = [*lead(w), "y+", "z" if w[-1] > 1 else "1"]
    result = [*batch, left[-2], right[-1]]
    formula = f"{call.tensor(0)} @ {call.tensor(1)}"
    return [call.statement(formula, f"{' '.join(left)}, {' '.join(right)} -> {' '.join(result)}")]


def _einsum(call: _Call) -> list[Statement]:
    equation, listed = call.argument(0), call.argument(1)
    names = [str(one["tensor"]) for one in listed]
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(set(names)) != len(names):
        raise _NotKnownError
    left, _, right = equation.replace(" ", "").partition("->")
    if any(len(set(part)) != len(part) for part in (*left.split(","), right)):
        raise _NotKnownError
    marked = [" ".join(axis + ("" if axis in right else "+") for axis in part) for part in left.split(",")]
    return [call.statement(f'einsum("{equation}", {", ".join(names)})', f"{', '.join(marked)} -> {' '.join(right)}")]


def _convolution(call: _Call) -> list[Statement]:
    x, w = call.shape(0), call.shape(1)
    groups = call.argument(6, 1)
    if groups != 1 or len(x) not in {3, 4, 5} or len(w) != len(x):
        raise _NotKnownError
    space = range(2, len(x))
    made, sizes = _result_axes(call.node.shape, list(space))
    across = " ".join(f"p{d}^" if x[d] > 1 else "1" for d in space)
    window = " ".join(f"q{d}^" if w[d] > 1 else "1" for d in space)
    n, c = ("x" if x[0] > 1 else "1"), ("y+" if x[1] > 1 else "1")
    annotation = f"{n} {c} {across}, z {c} {window} -> {n} z {' '.join(made)}"
    args = (call.argument(0), call.argument(1), None, *call.node.args[3:])
    rest = [one if isinstance(one, int) else f"({', '.join(str(int(n)) for n in one)},)" for one in call.node.args[3:6]]
    formula = f"{call.name}({', '.join([call.tensor(0), call.tensor(1), 'None', *map(str, rest)])})"
    bias = call.optional_tensor(2, "bias")
    return _product(call, formula, annotation, bias, "z", args=args, sizes=sizes)


def _embedding(call: _Call) -> list[Statement]:
    if call.argument(2, -1) != -1 or call.argument(4, default=False):
        raise _NotKnownError
    ids = " ".join(_letters(call.shape(1)))
    formula = f"embedding({call.tensor(1)}, {call.tensor(0)})"
    args = (call.argument(0), call.argument(1))
    return [call.statement(formula, f"{ids}, y+ z -> {ids} z", op="embedding", args=args, kwargs={})]


# --- reductions, norms, attention -------------------------------------------------------------------------------------


def _reduction(call: _Call) -> list[Statement]:
    shape = call.shape(0)
    given = call.argument(1)
    listed = [given] if isinstance(given, int) else (given or list(range(len(shape))))
    reduced = {int(d) % max(len(shape), 1) for d in listed} if isinstance(listed, list) else set()
    keep = bool(call.argument(2, default=False)) or bool(call.node.kwargs.get("keepdim"))
    dims = _letters(shape)
    right = [("1" if d in reduced else n) for d, n in enumerate(dims) if keep or d not in reduced]
    left = _written(dims, dict.fromkeys(reduced, "+"))
    if all(shape[d] == 1 for d in reduced):
        left = " ".join(dims)
    args = (call.argument(0), sorted(reduced), keep)
    over = ", ".join(map(str, sorted(reduced)))
    formula = f"{_REDUCTIONS[call.name]}({call.tensor(0)}, ({over},), keepdim={keep})" if shape else call.tensor(0)
    more: dict[str, Any] = {"args": args, "kwargs": call.node.kwargs if call.name in {"sum", "mean"} else {}}
    return [call.statement(formula, f"{left} -> {' '.join(right)}", op=f"reduce.{call.name}", **more)]


def _softmax(call: _Call) -> list[Statement]:
    shape = call.shape(0)
    dim = call.dim(1, len(shape))
    dims = _letters(shape)
    word = "log_softmax" if "log" in call.name else "softmax"
    annotation = f"{_written(dims, {dim: '*'})} -> {' '.join(dims)}"
    args = (call.argument(0), dim)
    return [call.statement(f"{word}({call.tensor(0)}, {dim})", annotation, op=word, args=args, kwargs={})]


def _norm(call: _Call) -> list[Statement]:
    """Layer norm and RMS norm over the last dims; several of them are needed whole."""
    shape, over = call.shape(0), len(call.argument(1))
    word = "layernorm" if call.name == "layer_norm" else "rmsnorm"
    dims = _letters(shape)
    last = range(len(shape) - over, len(shape))
    mark = "*" if over == 1 else "^"
    affine = [name for name in (call.optional_tensor(2, "weight"), call.optional_tensor(3, "bias")) if name]
    parts = [_written(dims, dict.fromkeys(last, mark)), *(" ".join(dims[d] for d in last) for _ in affine)]
    eps = call.argument(4, 1e-5) if word == "layernorm" else call.argument(3)
    tensors = [{"tensor": name} for name in (call.tensor(0), *affine)]
    args = (tensors, over, call.node.kwargs.get("eps", eps))
    formula = f"{word}({', '.join([call.tensor(0), *affine])})"
    annotation = f"{', '.join(parts)} -> {' '.join(dims)}"
    return [call.statement(formula, annotation, op=word, args=args, kwargs={})]


def _group_norm(call: _Call) -> list[Statement]:
    shape, groups = call.shape(0), int(call.argument(1))
    width = shape[1] // groups
    n = "a" if shape[0] > 1 else "1"
    space = [f"p{d}" if k > 1 else "1" for d, k in enumerate(shape[2:])]
    channels, plain = f"(g{groups} k{width}^)", f"(g{groups} k{width})"
    affine = [name for name in (call.optional_tensor(2, "weight"), call.optional_tensor(3, "bias")) if name]
    left = [" ".join([n, channels, *(s + ("^" if s != "1" else "") for s in space)]), *(channels for _ in affine)]
    annotation = f"{', '.join(left)} -> {' '.join([n, plain, *space])}"
    tensors = [{"tensor": name} for name in (call.tensor(0), *affine)]
    return [
        call.statement(
            f"groupnorm({', '.join([call.tensor(0), *affine])})",
            annotation,
            sizes={f"g{groups}": groups, f"k{width}": width},
            op="groupnorm",
            args=(tensors, width, call.argument(4, 1e-5)),
            kwargs={},
        )
    ]


def _attention(call: _Call) -> list[Statement]:
    q, k, v = (call.shape(p) for p in range(3))
    mask = call.optional_tensor(3, "attn_mask")
    if call.argument(4, 0.0) or len(q) < 3 or len(k) != len(q) or q[:-3] != k[:-3] or call.node.kwargs.get("dropout_p"):
        raise _NotKnownError
    lead = [LETTERS[d] if n > 1 else "1" for d, n in enumerate(q[:-3])]
    heads, key_heads = q[-3], k[-3]
    sizes: dict[str, int] = {}
    if heads == key_heads:
        query_heads = kv_heads = "x" if heads > 1 else "1"
    elif heads % key_heads == 0 and key_heads > 1:
        query_heads, kv_heads = f"(x{key_heads} r{heads // key_heads})", f"x{key_heads}"
        sizes = {f"x{key_heads}": key_heads, f"r{heads // key_heads}": heads // key_heads}
    else:
        query_heads, kv_heads = "x", "1"
    s, z = ("s" if q[-2] > 1 else "1"), ("z+" if k[-2] > 1 else "1")
    value = "e" if v[-1] != q[-1] else "d"
    parts = [
        " ".join([*lead, query_heads, s, "d^"]),
        " ".join([*lead, kv_heads, z, "d^"]),
        " ".join([*lead, kv_heads, z, f"{value}^"]),
    ]
    names = [call.tensor(p) for p in range(3)]
    if mask:
        full = [*lead, query_heads, s, z]
        shape = call.shapes[mask]
        own = full[len(full) - len(shape) :]
        parts.append(" ".join("1" if n == 1 else axis for axis, n in zip(own, shape, strict=True)))
        names.append(mask)
    causal = bool(call.argument(5, default=False) or call.node.kwargs.get("is_causal"))
    args = ([{"tensor": name} for name in names], causal, call.node.kwargs.get("scale"))
    annotation = f"{', '.join(parts)} -> {' '.join([*lead, query_heads, s, value])}"
    formula = f"attn({', '.join(names)})"
    return [call.statement(formula, annotation, sizes=sizes, op="attention", args=args, kwargs={})]


def _cross_entropy(call: _Call) -> list[Statement]:
    """Rows of the loss, then their mean over the targets that are not ignored."""
    logits, targets = call.tensor(0), call.tensor(1)
    if len(call.shape(0)) != 2 or call.argument(2) is not None or call.argument(5, 0.0):
        raise _NotKnownError
    rows, reduction, ignored = call.shape(0)[0], call.argument(3, 1), call.argument(4, -100)
    name, dtype = call.node.name, call.node.dtype

    def made(suffix: str, formula: str, annotation: str, op: str, args: tuple[Any, ...], shape: Shape) -> Statement:
        result = f"{name}_{suffix}"[-64:] if suffix else name
        return Statement(
            result=result, formula=formula, annotation=annotation, op=op, args=args, shape=shape, dtype=dtype
        )

    def of(tensor: str) -> dict[str, str]:
        return {"tensor": tensor}

    own = made(
        "rows" if reduction else "",
        f"cross_entropy({logits}, {targets})",
        "x y*, x -> x",
        "cross_entropy",
        (of(logits), of(targets), ignored),
        (rows,),
    )
    if reduction == 0:
        return [own]
    total = made(
        "total" if reduction == 1 else "",
        f"sum({own.result})",
        "x+ -> ",
        "reduce.sum",
        (of(own.result), [0], False),
        (),
    )
    if reduction == 2:
        return [own, total]
    valid = made("valid", f"valid({targets})", "x -> x", "not_equal", (of(targets), ignored), (rows,))
    count = made("count", f"sum({valid.result})", "x+ -> ", "reduce.sum", (of(valid.result), [0], False), ())
    args = (of(total.result), of(count.result))
    mean = made("", f"{total.result} / {count.result}", " ,  -> ", "aten.div.Tensor", args, ())
    return [own, total, valid, count, mean]


def _topk(call: _Call) -> list[Statement]:
    shape = call.shape(0)
    dim = call.dim(2, len(shape), -1)
    dims = _letters(shape)
    made, sizes = _result_axes(call.node.shape, [dim])
    right = [made[0] if d == dim else n for d, n in enumerate(dims)]
    args = (call.argument(0), call.argument(1), dim, call.node.index)
    annotation = f"{_written(dims, {dim: '^'})} -> {' '.join(right)}"
    return [call.statement(f"topk_part({call.tensor(0)})", annotation, sizes=sizes, op="topk", args=args, kwargs={})]


def _along_one_dim(call: _Call) -> list[Statement]:
    """Operators along one dim, which is needed whole: running sums, sorts, flips."""
    shape = call.shape(0)
    dim = call.dim(1, len(shape), -1)
    if call.node.shape != shape:
        raise _NotKnownError
    dims = _letters(shape)
    return [call.statement(f"along_{call.name}({call.tensor(0)})", f"{_written(dims, {dim: '^'})} -> {' '.join(dims)}")]


def _over_space(call: _Call) -> list[Statement]:
    """Pooling and resampling: batch and channels pass, the rest is needed whole."""
    shape, after = call.shape(0), call.node.shape
    if len(shape) < 3 or len(after) != len(shape) or len(call.node.operands()) != 1:
        raise _NotKnownError
    dims = _letters(shape)
    space = list(range(2, len(shape)))
    made, sizes = _result_axes(after, space)
    annotation = f"{_written(dims, dict.fromkeys(space, '^'))} -> {' '.join([*dims[:2], *made])}"
    return [call.statement(f"space_{call.name}({call.tensor(0)})", annotation, sizes=sizes)]


_RULES: dict[str, Callable[[_Call], list[Statement]]] = {
    **dict.fromkeys(_SAME_ELEMENTS, _same_elements),
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(("transpose", "t", "mT", "swapaxes"), _transpose),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _pieces),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("cumsum", "cumprod", "flip"), _along_one_dim),
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(
        (
            "max_pool2d",
            "avg_pool2d",
            "adaptive_avg_pool2d",
            "upsample_nearest2d",
            "upsample_bilinear2d",
            "pad",
            "constant_pad_nd",
        ),
        _over_space,
    ),
    "permute": _permute,
    "expand": _expand,
    "repeat_interleave": _repeat_interleave,
    "slice": _slice,
    "select": _select,
    "cat": _cat,
    "linear": _linear,
    "addmm": _addmm,
    "einsum": _einsum,
    "embedding": _embedding,
    "group_norm": _group_norm,
    "scaled_dot_product_attention": _attention,
    "cross_entropy_loss": _cross_entropy,
    "topk": _topk,
}
