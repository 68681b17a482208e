"""What the formula of an operator says about sharding it. Formulas are parsed, never run.

Two properties decide how an operator treats reductions:

- *Linearity.* A pending sum may pass through an operator only if the result is linear in it (scaling, a matrix product, a
  view), and through an addition only if every term is pending: a finished tensor added on each of n ranks would count n
  times. A formula is therefore split into terms, each with the tensors it is linear in and the other ones it depends
  on.
- *Kind of reduction.* If a reduced axis is sharded, the result is pending a sum, a maximum, ..., or the operator must
  merge the pieces itself: attention merges (maximum, sum of exponentials, weighted values), top-k its candidates.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import product

from topology.errors import BadInput

MAX_CHARACTERS = 2000
MAX_TERMS = 64

COPIES = frozenset(
    ["set", "contiguous", "clone", "detach", "identity", "requires_grad_", "alias"]
)  # same elements, same dtype
CASTS = frozenset(["to", "float", "double", "half", "bfloat16", "type", "type_as"])
IDENTITIES = COPIES | CASTS
VIEWS = frozenset(  # functions that rearrange, repeat or take elements of one tensor
    [
        "reshape",
        "view",
        "permute",
        "transpose",
        "swapaxes",
        "t",
        "flatten",
        "unflatten",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "broadcast_to",
        "movedim",
        "narrow",
        "select",
        "flip",
        "roll",
        "repeat_interleave",
    ]
)
_REARRANGED = (  # all that is linear in the tensors whose elements it rearranges
    VIEWS
    | COPIES
    | frozenset(["chunk", "split", "cat", "concat", "stack", "repeat", "rearrange", "index_select", "pad"])
)
_LINEAR_METHODS = CASTS | frozenset(["neg", "sum", "mean", "cumsum"])
_PRODUCTS = frozenset(
    [
        "einsum",
        "matmul",
        "mm",
        "bmm",
        "dot",
        "outer",
        "mul",
        "multiply",
        "grouped_mm",
        "scaled_mm",
        "baddbmm_",
        "conv1d",
        "conv2d",
        "conv3d",
    ]
)
_LINEAR_LAYERS = frozenset(["linear", "addmm_"])
_REDUCER_OF_FUNCTION = {
    **dict.fromkeys(("amax", "max"), "max"),
    **dict.fromkeys(("amin", "min"), "min"),
    "prod": "product",
    "mean": "avg",
}
WITHOUT_SLOPE = frozenset(  # elementwise functions whose derivative is zero wherever they have one
    [
        "sign",
        "floor",
        "ceil",
        "round",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "isnan",
        "logical_xor",
        "trunc",
        "floor_divide",
        "isfinite",
        "isinf",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bitwise_xor",
        "bool",
        "long",
    ]
)
ELEMENTWISE = WITHOUT_SLOPE | frozenset(
    [
        "gelu",
        "relu",
        "relu6",
        "silu",
        "swish",
        "tanh",
        "sigmoid",
        "softplus",
        "softsign",
        "mish",
        "elu",
        "leaky_relu",
        "celu",
        "selu",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "logsigmoid",
        "exp",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sqrt",
        "rsqrt",
        "square",
        "reciprocal",
        "pow",
        "abs",
        "sin",
        "cos",
        "tan",
        "atan",
        "erf",
        "neg",
        "clamp",
        "clip",
        "mul",
        "multiply",
        "add",
        "sub",
        "div",
        "true_divide",
        "where",
        "maximum",
        "minimum",
        "fmod",
        "remainder",
        "masked_fill",
        "dropout",
        "lerp",
        "nan_to_num",
        "acos",
        "asin",
        "atan2",
        "sinh",
        "cosh",
        "addcmul",
        "clamp_max",
        "clamp_min",
        "log_sigmoid",
        "rsub",
        "tanhshrink",
        "threshold",
    ]
)
ATTENTION = frozenset(
    ["attn", "attention", "sdpa", "sdpfa", "scaled_dot_product_attention", "flash_attention", "mha", "gqa"]
)
# kinds of formula that are computed from statistics of pieces
MERGEABLE = frozenset(
    ["softmax", "rmsnorm", "layernorm", "logsumexp", "cross_entropy", "attention", "topk", "arg", "attention_rows"]
)
MODULES = frozenset(["torch", "F", "nn", "np", "jnp", "functional", "numpy"])
_ATTRIBUTES = frozenset(["T", "mT", "H", "values", "indices", "data"])


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a sum: the tensors that it is linear in, and those that it depends on in another way."""

    linear: frozenset[str]
    other: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A parsed formula.

    `tensors` are in order of appearance, with repetitions; `functions` are the names of all calls. `kind` says how
    pieces over a sharded axis are combined: `sum`, `avg`, `max`, `min`, `product` leave a pending reduction, other
    kinds are merged by the operator itself.
    """

    tree: ast.expr = field(repr=False)
    tensors: tuple[str, ...]
    terms: tuple[Term, ...]
    functions: frozenset[str]
    kind: str
    is_view: bool
    bias: str = ""  # the bias of a linear layer


def parse_formula(text: str, tensor_names: Collection[str]) -> Formula:
    """Parse the formula `text` over the tensors `known`. Raises BadInput if it is not an expression."""
    if len(text) > MAX_CHARACTERS:
        raise BadInput(f"a formula of {len(text)} characters", why=f"at most {MAX_CHARACTERS} are read")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadInput(f"{text[:60]!r} is not an expression", why=type(error).__name__) from error
    reader = _LinearityReader(frozenset(tensor_names))
    try:
        terms = reader.terms(tree)
        is_view = reader.is_view(tree)
    except RecursionError as error:
        raise BadInput(f"{text[:60]!r} is nested too deep") from error
    tensors = tuple(
        node.id
        for node in sorted(
            (n for n in ast.walk(tree) if isinstance(n, ast.Name)), key=lambda node: (node.lineno, node.col_offset)
        )
        if node.id in reader.tensor_names
    )
    functions = frozenset(name for n in ast.walk(tree) if isinstance(n, ast.Call) and (name := called_name(n)))
    return Formula(
        tree=tree,
        tensors=tensors,
        terms=tuple(terms),
        functions=functions,
        kind=_reduction_kind(tree, functions),
        is_view=is_view,
        bias=_bias_name(tree, reader.tensor_names),
    )


def called_name(node: ast.Call) -> str:
    """Return the last part of the name of the called function: `softmax` of `torch.softmax(...)`."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _outermost_call(tree: ast.expr) -> str:
    """Return the name of the outermost call, looking through attributes, subscripts and dtype casts."""
    while True:
        match tree:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner):
                tree = inner
            case ast.Call() if called_name(tree) in CASTS - {"type", "type_as"}:
                if not isinstance(tree.func, ast.Attribute):
                    return called_name(tree)
                tree = tree.func.value
            case ast.Call():
                return called_name(tree)
            case _:
                return ""


def _reduction_kind(tree: ast.expr, functions: frozenset[str]) -> str:
    last = _outermost_call(tree)
    if last in _REDUCER_OF_FUNCTION:
        return _REDUCER_OF_FUNCTION[last]
    if last in ATTENTION or functions & ATTENTION:
        return "attention"
    for words, kind in (
        (("log_softmax", "softmax"), "softmax"),
        (("logsumexp",), "logsumexp"),
        (("attention_rows",), "attention_rows"),
        (("attention_bwd_q", "attention_bwd_k", "attention_bwd_v"), "attention_bwd"),
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


def _bias_name(tree: ast.expr, tensor_names: frozenset[str]) -> str:
    match tree:
        case ast.Call(args=[_, _, ast.Name(id=bias)]) if called_name(tree) == "linear" and bias in tensor_names:
            return bias
    return ""


class _LinearityReader:
    """Splits formulas into terms, and finds which tensors each is linear in."""

    def __init__(self, tensor_names: frozenset[str]) -> None:
        self.tensor_names = tensor_names

    def terms(self, node: ast.expr) -> list[Term]:
        """Return the terms of an expression."""
        match node:
            case ast.Name(id=name):
                return [Term(frozenset({name} & self.tensor_names))]
            case ast.Constant():
                return [Term(frozenset())]
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=inner):
                return self.terms(inner)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                return self._check_count([*self.terms(left), *self.terms(right)])
            case ast.BinOp(left=left, op=ast.Mult() | ast.MatMult(), right=right):
                return self._product([left, right])
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                denominator = frozenset(self._names_in(right))
                return [Term(t.linear - denominator, t.other | denominator) for t in self.terms(left)]
            case ast.Attribute(value=inner, attr=attr) if attr in _ATTRIBUTES:
                return self.terms(inner)
            case ast.Subscript(value=inner, slice=index) if not self._names_in(index):
                return self.terms(inner)
            case ast.Call():
                return self._call(node)
        return [Term(frozenset(), frozenset(self._names_in(node)))]

    def is_view(self, node: ast.expr) -> bool:
        """Return whether a formula only rearranges the elements of one tensor."""
        match node:
            case ast.Name(id=name):
                return name in self.tensor_names
            case ast.Attribute(value=inner, attr=attr):
                return attr in _ATTRIBUTES and self.is_view(inner)
            case ast.Subscript(value=inner, slice=index):
                return not self._names_in(index) and self.is_view(inner)
            case ast.Call(func=ast.Attribute(value=inner)) if not self._is_module(inner):
                return called_name(node) in _REARRANGED and self.is_view(inner)
            case ast.Call(args=[inner, *_]):
                return called_name(node) in _REARRANGED and self.is_view(inner)
        return False

    def _call(self, node: ast.Call) -> list[Term]:
        name, arguments = called_name(node), list(node.args)
        if isinstance(node.func, ast.Attribute) and not self._is_module(node.func.value):
            arguments.insert(0, node.func.value)
        values = [a for a in arguments if self._names_in(a)]
        if name in _REARRANGED | _LINEAR_METHODS and values:
            listed = values[0].elts if isinstance(values[0], ast.List | ast.Tuple) else [values[0]]
            return self._check_count([term for value in listed for term in self.terms(value)])
        if name in _LINEAR_LAYERS and len(values) in {2, 3}:
            added = self.terms(values[2]) if len(values) == 3 else []
            return self._check_count([*self._product(values[:2]), *added])
        if name in _PRODUCTS and values:
            counts = 2 if name == "grouped_mm" else len(values)  # group offsets are indices
            indices = frozenset(n for v in values[counts:] for n in self._names_in(v))
            return [Term(t.linear, t.other | indices) for t in self._product(values[:counts])]
        if name == "embedding" and len(values) == 2:
            ids = frozenset(self._names_in(values[0]))
            return [Term(t.linear, t.other | ids) for t in self.terms(values[1])]
        if name in {"index_add", "scatter_add"} and len(values) >= 2:
            indices = frozenset(n for v in values[:-1] for n in self._names_in(v))
            return [Term(t.linear, t.other | indices) for t in self.terms(values[-1])]
        if name.endswith(("_bwd", "_backward")) and values:  # a gradient is linear in the incoming gradient
            saved = frozenset(n for v in values[1:] for n in self._names_in(v))
            return [Term(t.linear - saved, t.other | saved) for t in self.terms(values[0])]
        return [Term(frozenset(), frozenset(self._names_in(node)))]

    def _product(self, factors: Sequence[ast.expr]) -> list[Term]:
        terms = []
        for parts in product(*(self.terms(factor) for factor in factors)):
            linear: frozenset[str] = frozenset()
            other = frozenset().union(*(part.other for part in parts))
            for part in parts:  # a tensor times itself is not linear in it
                other |= linear & part.linear
                linear |= part.linear
            terms.append(Term(linear - other, other))
            self._check_count(terms)
        return terms

    def _names_in(self, node: ast.AST) -> set[str]:
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in self.tensor_names}

    def _is_module(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in MODULES and name not in self.tensor_names
            case ast.Attribute(value=inner):
                return self._is_module(inner)
        return False

    def _check_count(self, terms: list[Term]) -> list[Term]:
        if len(terms) > MAX_TERMS:
            raise BadInput("a formula of too many terms", why=f"at most {MAX_TERMS} are read", remedy="split it")
        return terms
