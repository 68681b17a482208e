"""What the formula of an operator says about sharding it. Formulas are read, never run.

Two questions decide what a pending reduction may do. *Linear in what?* A sum that is still pending goes through an
operator only where the result is linear in it: scaling, a matrix product, a view; and through a sum only if every term
is pending, since adding a finished tensor on every rank would count it n times. So a formula is taken apart into terms,
each with the tensors it is linear in and those it depends on otherwise. *Reduced with what?* A sharded reduced axis leaves
a sum, a maximum, ..., or what only the operator itself can merge: attention's (maximum, sum of exponentials, weighted
values), the best k.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from topology.errors import BadInput

MAX_CHARACTERS = 2000
MAX_TERMS = 64

_VIEWS = frozenset(
    [
        "set",
        "reshape",
        "view",
        "permute",
        "transpose",
        "swapaxes",
        "t",
        "contiguous",
        "flatten",
        "unflatten",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "broadcast_to",
        "movedim",
        "chunk",
        "split",
        "narrow",
        "clone",
        "detach",
        "cat",
        "stack",
        "repeat_interleave",
        "repeat",
        "rearrange",
        "identity",
    ]
)
_LINEAR_METHODS = frozenset(
    ["to", "float", "double", "half", "bfloat16", "type", "neg", "sum", "mean", "cumsum", "type_as"]
)
_PRODUCTS = frozenset(
    ["einsum", "matmul", "mm", "bmm", "dot", "outer", "mul", "grouped_mm", "scaled_mm", "baddbmm_", "conv1d", "conv2d"]
)
_LINEAR_LAYERS = frozenset(["linear", "addmm_"])
_REDUCERS = {
    **dict.fromkeys(("amax", "max"), "max"),
    **dict.fromkeys(("amin", "min"), "min"),
    "prod": "product",
    "mean": "avg",
}
_ATTENTION = frozenset(
    ["attn", "attention", "sdpa", "sdpfa", "scaled_dot_product_attention", "flash_attention", "mha", "gqa"]
)
_MODULES = frozenset(["torch", "F", "nn", "np", "jnp", "functional", "numpy"])
_ATTRIBUTES = frozenset(["T", "mT", "H", "values", "indices", "data"])


@dataclass(frozen=True, slots=True)
class Term:
    """A summand: the tensors that it is linear in, one by one, and those that it depends on in another way."""

    linear: frozenset[str]
    other: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """What is known of a formula.

    `tensors` in order of appearance, repeated; `functions` all that is called; `kind` is what a sharded reduced or kept
    axis means: `sum`, `avg`, `max`, `min`, `product` leave a reduction pending, others are merged by the operator itself.
    """

    tree: ast.expr = field(repr=False)
    tensors: tuple[str, ...]
    terms: tuple[Term, ...]
    functions: frozenset[str]
    kind: str
    is_view: bool
    bias: str = ""  # a tensor that is added to the rest, when it is a linear layer's


def parse(text: str, known: Sequence[str]) -> Formula:
    """Return what the formula `text` over the tensors `known` says. Raises BadInput when it is not an expression."""
    if len(text) > MAX_CHARACTERS:
        raise BadInput(f"a formula of {len(text)} characters", why=f"at most {MAX_CHARACTERS} are read")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadInput(f"{text[:60]!r} is not an expression", why=type(error).__name__) from error
    reader = _Reader(frozenset(known))
    try:
        terms = reader.terms(tree)
        view = reader.is_view(tree)
    except RecursionError as error:
        raise BadInput(f"{text[:60]!r} is nested too deep") from error
    tensors = tuple(
        node.id
        for node in sorted(
            (n for n in ast.walk(tree) if isinstance(n, ast.Name)), key=lambda node: (node.lineno, node.col_offset)
        )
        if node.id in reader.known
    )
    functions = frozenset(name for n in ast.walk(tree) if isinstance(n, ast.Call) and (name := called(n)))
    return Formula(
        tree=tree,
        tensors=tensors,
        terms=tuple(terms),
        functions=functions,
        kind=_kind(tree, functions),
        is_view=view,
        bias=_bias(tree, reader.known),
    )


def called(node: ast.Call) -> str:
    """Return the last name of what a call calls: `softmax` of `torch.softmax(...)`."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _outermost(tree: ast.expr) -> str:
    """Return the function whose value, or a part of whose value, a formula is."""
    while True:
        match tree:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner):
                tree = inner
            case ast.Call() if called(tree) in _LINEAR_METHODS & {"to", "float", "double", "half", "bfloat16"}:
                if not isinstance(tree.func, ast.Attribute):
                    return called(tree)
                tree = tree.func.value
            case ast.Call():
                return called(tree)
            case _:
                return ""


def _kind(tree: ast.expr, functions: frozenset[str]) -> str:
    last = _outermost(tree)
    if last in _REDUCERS:
        return _REDUCERS[last]
    if last in _ATTENTION or functions & _ATTENTION:
        return "attention"
    for words, kind in (
        (("log_softmax", "softmax"), "softmax"),
        (("logsumexp",), "logsumexp"),
        (("cross_entropy", "nll"), "cross_entropy"),
        (("rmsnorm", "rms_norm"), "rmsnorm"),
        (("layernorm", "layer_norm"), "layernorm"),
        (("topk",), "topk"),
        (("argmax", "argmin"), "arg"),
        (("embedding",), "sum"),
        (("index_add", "scatter_add", "index_put", "bincount", "embedding_bwd"), "scatter"),
    ):
        if any(last == word or (word in last and word in functions) for word in words):
            return kind
    return "sum"


def _bias(tree: ast.expr, known: frozenset[str]) -> str:
    match tree:
        case ast.Call(args=[_, _, ast.Name(id=bias)]) if called(tree) == "linear" and bias in known:
            return bias
    return ""


class _Reader:
    """Takes formulas over `known` tensors apart."""

    def __init__(self, known: frozenset[str]) -> None:
        self.known = known

    def terms(self, node: ast.expr) -> list[Term]:
        """Return the summands of an expression."""
        match node:
            case ast.Name(id=name):
                return [Term(frozenset({name} & self.known))]
            case ast.Constant():
                return [Term(frozenset())]
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=inner):
                return self.terms(inner)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                return self._bounded([*self.terms(left), *self.terms(right)])
            case ast.BinOp(left=left, op=ast.Mult() | ast.MatMult(), right=right):
                return self._product([left, right])
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                below = frozenset(self._names(right))
                return [Term(t.linear - below, t.other | below) for t in self.terms(left)]
            case ast.Attribute(value=inner, attr=attr) if attr in _ATTRIBUTES:
                return self.terms(inner)
            case ast.Subscript(value=inner, slice=index) if not self._names(index):
                return self.terms(inner)
            case ast.Call():
                return self._call(node)
        return [Term(frozenset(), frozenset(self._names(node)))]

    def is_view(self, node: ast.expr) -> bool:
        """Return whether a formula only moves the elements of one tensor about."""
        match node:
            case ast.Name(id=name):
                return name in self.known
            case ast.Attribute(value=inner, attr=attr):
                return attr in _ATTRIBUTES and self.is_view(inner)
            case ast.Subscript(value=inner, slice=index):
                return not self._names(index) and self.is_view(inner)
            case ast.Call(func=ast.Attribute(value=inner)) if not self._module(inner):
                return called(node) in _VIEWS and self.is_view(inner)
            case ast.Call(args=[inner, *_]):
                return called(node) in _VIEWS and self.is_view(inner)
        return False

    def _call(self, node: ast.Call) -> list[Term]:
        name, arguments = called(node), list(node.args)
        if isinstance(node.func, ast.Attribute) and not self._module(node.func.value):
            arguments.insert(0, node.func.value)
        values = [a for a in arguments if self._names(a)]
        if name in _VIEWS | _LINEAR_METHODS and values:
            listed = values[0].elts if isinstance(values[0], ast.List | ast.Tuple) else [values[0]]
            return self._bounded([term for value in listed for term in self.terms(value)])
        if name in _LINEAR_LAYERS and len(values) in {2, 3}:
            added = self.terms(values[2]) if len(values) == 3 else []
            return self._bounded([*self._product(values[:2]), *added])
        if name in _PRODUCTS and values:
            counts = 2 if name == "grouped_mm" else len(values)  # group offsets only steer
            steered = frozenset(n for v in values[counts:] for n in self._names(v))
            return [Term(t.linear, t.other | steered) for t in self._product(values[:counts])]
        if name == "embedding" and len(values) == 2:
            ids = frozenset(self._names(values[0]))
            return [Term(t.linear, t.other | ids) for t in self.terms(values[1])]
        if name in {"index_add", "scatter_add"} and len(values) >= 2:
            steered = frozenset(n for v in values[:-1] for n in self._names(v))
            return [Term(t.linear, t.other | steered) for t in self.terms(values[-1])]
        if name.endswith(("_bwd", "_backward")) and values:  # the chain rule is linear in what comes from above
            saved = frozenset(n for v in values[1:] for n in self._names(v))
            return [Term(t.linear - saved, t.other | saved) for t in self.terms(values[0])]
        return [Term(frozenset(), frozenset(self._names(node)))]

    def _product(self, factors: Sequence[ast.expr]) -> list[Term]:
        out = []
        for parts in product(*(self.terms(factor) for factor in factors)):
            linear: frozenset[str] = frozenset()
            other = frozenset().union(*(part.other for part in parts))
            for part in parts:  # a tensor times itself is not linear in it
                other |= linear & part.linear
                linear |= part.linear
            out.append(Term(linear - other, other))
            self._bounded(out)
        return out

    def _names(self, node: ast.AST) -> set[str]:
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in self.known}

    def _module(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in _MODULES and name not in self.known
            case ast.Attribute(value=inner):
                return self._module(inner)
        return False

    def _bounded(self, terms: list[Term]) -> list[Term]:
        if len(terms) > MAX_TERMS:
            raise BadInput("a formula of too many terms", why=f"at most {MAX_TERMS} are read", remedy="split it")
        return terms
