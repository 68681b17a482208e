"""Walk a formula from the outside in: the value of a node in axes, and a call as rules see it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from planner.sharding.ops.annotation import Dim, arguments_of, called_name, is_true, number_of, outermost_call
from planner.sharding.ops.axis_flow import SCALAR, AxisFlow, NotUnderstood, Value

Made = Value | list[Value]
Rule = Callable[["Call"], Made]
Rules = Callable[[str], Rule | None]  # the rule of a function by its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call: its arguments, positional and by keyword, with the tensor of a method first."""

    name: str
    arguments: Sequence[ast.expr]
    keywords: Mapping[str, ast.expr]
    walker: Walker

    @property
    def flow(self) -> AxisFlow:
        return self.walker.flow

    def value(self, at: int, keyword: str = "") -> Value:
        """Return the value of an argument. Raises NotUnderstood where it is missing or no tensor."""
        node = self.node(at, keyword)
        if node is None:
            raise NotUnderstood(f"{self.name} without argument {at}")
        return self.walker.value(node)

    def node(self, at: int, keyword: str = "") -> ast.expr | None:
        if keyword in self.keywords:
            return self.keywords[keyword]
        return self.arguments[at] if at < len(self.arguments) else None

    def number(self, at: int, keyword: str, default: int) -> int:
        """Return an integer argument. Raises NotUnderstood where it is no literal."""
        node = self.node(at, keyword)
        found = default if node is None else number_of(node)
        if found is None:
            raise NotUnderstood(f"{self.name} whose {keyword} is no number")
        return found

    def numbers(self, at: int, keyword: str) -> list[int] | None:
        """Return the integers from argument `at` on, written apart or as one list; None where there are none."""
        nodes: Sequence[ast.expr] = [self.keywords[keyword]] if keyword in self.keywords else self.arguments[at:]
        if len(nodes) == 1 and isinstance(nodes[0], ast.Tuple | ast.List):
            nodes = nodes[0].elts
        found = [number_of(node) for node in nodes if not (isinstance(node, ast.Constant) and node.value is None)]
        if any(number is None for number in found):
            raise NotUnderstood(f"{self.name} whose {keyword} are no numbers")
        return [number for number in found if number is not None] or None

    def values(self) -> list[Value]:
        """Return the values of all arguments that contain tensors; those of lists one by one."""
        out: list[Value] = []
        for node in (*self.arguments, *self.keywords.values()):
            parts = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
            out += [self.walker.value(each) for each in parts if self.walker.names_in(each)]
        return out

    def listed(self, at: int) -> list[Value]:
        """Return the values of all elements of an argument that is a list, also of those without tensors, as
        `zeros(2)`.
        """
        node = self.node(at)
        return [self.walker.value(each) for each in node.elts] if isinstance(node, ast.List | ast.Tuple) else []

    def flag(self, at: int, keyword: str) -> bool:
        return is_true(self.node(at, keyword))


class Walker:
    """Walks a formula and returns what it computes, in axes."""

    def __init__(self, flow: AxisFlow, tree: ast.expr, merges: str, rules: Rules) -> None:
        """`merges` is the kind of statistics from which the whole formula may be computed if its axes are sharded."""
        self.flow, self.merges, self.rules = flow, merges, rules
        self.outermost = outermost_call(tree)

    def value(self, node: ast.expr) -> Value:
        made = self.made(node)
        if isinstance(made, list):
            raise NotUnderstood("several results in the place of one")
        return made

    def names_in(self, node: ast.AST) -> bool:
        return any(isinstance(n, ast.Name) and n.id in self.flow.tensors for n in ast.walk(node))

    def made(self, node: ast.expr) -> Made:
        """Return the value of a node, or its values if it has several. Raises NotUnderstood."""
        flow = self.flow
        match node:
            case ast.Name(id=name) if name in flow.tensors:
                return flow.tensors[name]
            case ast.Constant():
                return SCALAR
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=inner):
                return self.value(inner)
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(self.value(left), op, self.value(right), right)
            case ast.Compare(left=left, comparators=[right]):
                return flow.elementwise([self.value(left), self.value(right)], "a comparison")
            case ast.Attribute(value=inner, attr=attr):
                return self._attribute(inner, attr)
            case ast.Subscript(value=inner, slice=index):
                return self._subscript(inner, index)
            case ast.Call():
                return self._call(node)
        raise NotUnderstood(f"a {type(node).__name__.lower()}")

    def _binary(self, left: Value, op: ast.operator, right: Value, divisor: ast.expr) -> Value:
        flow = self.flow
        match op:
            case ast.Add() | ast.Sub():
                return flow.add([left, right])
            case ast.Mult():
                return flow.multiply([left, right])
            case ast.Div():
                finished = flow.finish(right, "a division needs the finished divisor") if divisor else right
                return flow.multiply([left, finished], "the quotient")
            case ast.MatMult():
                return product_of_matrices(flow, left, right)
        return flow.elementwise([left, right], type(op).__name__.lower())

    def _attribute(self, inner: ast.expr, attr: str) -> Made:
        made = self.made(inner)
        if isinstance(made, list):
            if attr in {"values", "indices"}:
                return made[int(attr == "indices")]
            raise NotUnderstood(f".{attr} of several results")
        match attr:
            case "T":
                return Value(made.dims[::-1], made.pending)
            case "mT" | "H":
                return Value((*made.dims[:-2], made.dims[-1], made.dims[-2]), made.pending)
            case "values" | "data":
                return made
        raise NotUnderstood(f".{attr}")

    def _subscript(self, inner: ast.expr, index: ast.expr) -> Made:
        made = self.made(inner)
        if isinstance(made, list):
            at = number_of(index)
            if at is None or not -len(made) <= at < len(made):
                raise NotUnderstood("an index of several results")
            return made[at]
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        return indexed(self.flow, made, parts, lambda node: self.value(node) if self.names_in(node) else None)

    def _call(self, node: ast.Call) -> Made:
        name, arguments = called_name(node), arguments_of(node, self.flow.tensors)
        if any(isinstance(a, ast.Starred) for a in arguments) or any(k.arg is None for k in node.keywords):
            raise NotUnderstood("arguments that are not written out")
        keywords = {k.arg: k.value for k in node.keywords if k.arg is not None}
        call = Call(name=name, arguments=arguments, keywords=keywords, walker=self)
        rule = self.rules(name)
        if rule is None:
            raise NotUnderstood(f"{name or 'a call'} is not known")
        return rule(call)

    def may_merge(self, call: Call, kind: str) -> bool:
        """Return whether `call` is the formula's result, so that collectives can run inside it."""
        return self.merges == kind and self.outermost == call.name


def product_of_matrices(flow: AxisFlow, left: Value, right: Value) -> Value:
    """Return `left @ right`."""
    if not left.dims or not right.dims:
        raise NotUnderstood("a product of matrices without dims")
    over = flow.unify(left.dims[-1], right.dims[-2] if len(right.dims) > 1 else right.dims[0], "a product of matrices")
    pending = flow.pending_of_product([left, right], "the product")
    if len(right.dims) == 1:
        return flow.contract([over], Value(left.dims[:-1], pending), "sum", "a product of matrices")
    batch = flow.broadcast([left.dims[:-2], right.dims[:-2]], "a product of matrices")
    rows = left.dims[-2:-1] if len(left.dims) > 1 else ()
    return flow.contract([over], Value((*batch, *rows, right.dims[-1]), pending), "sum", "a product of matrices")


def indexed(
    flow: AxisFlow, value: Value, parts: Sequence[ast.expr], index_of: Callable[[ast.expr], Value | None]
) -> Value:
    """Return a value indexed by integers, slices, None, an ellipsis or a tensor, whose value `index_of` returns."""
    out, at = list[Dim](), 0
    taken = sum(1 for p in parts if not (isinstance(p, ast.Constant) and (p.value is None or p.value is ...)))
    if taken > len(value.dims):
        raise NotUnderstood("more indices than dims")
    for part in parts:
        match part:
            case ast.Constant(value=None):
                out.append(())
            case ast.Constant(value=value_) if value_ is ...:
                skipped = len(value.dims) - taken
                out += value.dims[at : at + skipped]
                at += skipped
            case ast.Slice():
                out.append(_sliced(flow, value.dims[at], part))
                at += 1
            case _ if number_of(part) is not None:
                flow.keep_unsharded(value.dims[at], "an index takes one element of it", contradicts=True)
                at += 1
            case _:
                numbers = index_of(part)
                if numbers is None:
                    raise NotUnderstood("an index that is no number")
                flow.keep_unsharded(value.dims[at], "an index takes elements of it by number", contradicts=True)
                out += numbers.dims
                at += 1
    return Value((*out, *value.dims[at:]), value.pending)


def _sliced(flow: AxisFlow, dim: Dim, part: ast.Slice) -> Dim:
    ends = [None if end is None else number_of(end) for end in (part.lower, part.upper, part.step)]
    if any(e is not None and n is None for e, n in zip((part.lower, part.upper, part.step), ends, strict=True)):
        raise NotUnderstood("a slice whose ends are no numbers")
    size = flow.size(dim)
    length = len(range(*slice(*ends).indices(size)))
    if length == size and (ends[2] or 1) > 0:
        return dim
    return part_of(flow, dim, length, "a slice takes a part of it")


def part_of(flow: AxisFlow, dim: Dim, length: int, why: str) -> Dim:
    """Return a dim of `length` that depends on all of `dim`."""
    flow.keep_unsharded(dim, why, contradicts=True)
    made = flow.new_dim(length)
    flow.keep_unsharded(made, why)
    return made


def position(at: int, value: Value) -> int:
    """Return the index of a dim, counted from 0. Raises NotUnderstood."""
    if not -len(value.dims) <= at < len(value.dims):
        raise NotUnderstood(f"dim {at} of {len(value.dims)}")
    return at % len(value.dims)


def merge_or_keep(call: Call, kind: str, dim: Dim, why: str) -> None:
    """Note that `call` can be computed from statistics of pieces along `dim` if it is the formula's result."""
    if call.walker.may_merge(call, kind):
        call.flow.merged.update(dict.fromkeys(call.flow.dim(dim), kind))
    else:
        call.flow.keep_unsharded(dim, why)
