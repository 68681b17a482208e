"""Parse the formula of an operator, without running it: its tensors, its functions, and how results of pieces are
combined.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass, field

from planner.sharding.layouts.layout import REDUCERS
from planner.sharding.ops.annotation import arguments_of, called_name, outermost_call
from planner.sharding.ops.table import FUNCTIONS
from topology.errors import BadInput

MAX_CHARACTERS = 2000
_ATTRIBUTES = frozenset(["T", "mT", "H", "values", "indices", "data"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A parsed formula.

    `tensors` are in order of appearance, with repetitions; `functions` are the names of all calls. `kind` says how
    pieces over a sharded axis are combined: `sum`, `avg`, `max`, `min`, `product` leave a pending reduction, other
    kinds are merged by the operator itself. A view only rearranges the elements of one tensor.
    """

    tree: ast.expr = field(repr=False)
    tensors: tuple[str, ...]
    functions: frozenset[str]
    kind: str
    is_view: bool
    bias: str = ""  # the bias of a linear layer

    @property
    def merges(self) -> str:
        """The kind of statistics from which it may be computed if its axes are sharded; empty for none."""
        return self.kind if self.kind in _MERGED else ""


_MERGED = frozenset(op.kind for op in FUNCTIONS.values() if op.merges)


def parse_formula(text: str, tensor_names: Collection[str]) -> Formula:
    """Parse the formula `text` over the tensors `tensor_names`. Raises BadInput if it is not an expression."""
    if len(text) > MAX_CHARACTERS:
        raise BadInput(f"a formula of {len(text)} characters", why=f"at most {MAX_CHARACTERS} are read")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadInput(f"{text[:60]!r} is not an expression", why=type(error).__name__) from error
    names = sorted(
        (n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in tensor_names),
        key=lambda node: (node.lineno, node.col_offset),
    )
    functions = frozenset(name for n in ast.walk(tree) if isinstance(n, ast.Call) and (name := called_name(n)))
    try:
        is_view = _is_view(tree, tensor_names)
    except RecursionError as error:
        raise BadInput(f"{text[:60]!r} is nested too deep") from error
    return Formula(
        tree=tree,
        tensors=tuple(node.id for node in names),
        functions=functions,
        kind=_kind(tree, functions),
        is_view=is_view,
        bias=_bias_name(tree, tensor_names),
    )


def _kind(tree: ast.expr, functions: frozenset[str]) -> str:
    """Return the kind of the outermost function; `attention` if the formula contains attention."""
    kinds = {name: FUNCTIONS[name].kind for name in functions if name in FUNCTIONS}
    kind = kinds.get(outermost_call(tree), "sum")
    reduces = kind in REDUCERS and kind != "sum"
    return "attention" if "attention" in kinds.values() and not reduces else kind


def _bias_name(tree: ast.expr, tensor_names: Collection[str]) -> str:
    match tree:
        case (
            ast.Call(args=[_, _, ast.Name(id=bias)], keywords=[])
            | ast.Call(args=[_, _], keywords=[ast.keyword(arg="bias", value=ast.Name(id=bias))])
        ) if called_name(tree) == "linear" and bias in tensor_names:
            return bias
    return ""


def _is_view(node: ast.expr, tensors: Collection[str]) -> bool:
    match node:
        case ast.Name(id=name):
            return name in tensors
        case ast.Attribute(value=inner, attr=attr):
            return attr in _ATTRIBUTES and _is_view(inner, tensors)
        case ast.Subscript(value=inner, slice=index):
            numbers = not any(isinstance(n, ast.Name) and n.id in tensors for n in ast.walk(index))
            return numbers and _is_view(inner, tensors)
        case ast.Call():
            op, arguments = FUNCTIONS.get(called_name(node)), arguments_of(node, tensors)
            return op is not None and op.rearranges and bool(arguments) and _is_view(arguments[0], tensors)
    return False
