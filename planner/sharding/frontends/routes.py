"""Replaces the operators of a captured graph on tokens sorted by expert by one node that can be shared among ranks.

    by_expert, order = ids.sort()                         pairs of a token and an expert, in the order of experts
    ends = histc(by_expert, E, 0, E - 1).cumsum(0)
    inner = act(grouped_mm(x[order // k], up, ends))      rows in that order, each by itself
    made = grouped_mm(inner, down, ends) * shares[order]
    out = made[order.argsort()]                           and back in the order of pairs

All of this computes each pair independently and in any order: so a rank can do it for its own pairs, or for pairs that
others send. The operators alone show whether a graph has this form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from planner.sharding.ops.routed import ROUTED, SENT
from planner.sharding.ops.table import is_elementwise
from simulator.sharded.graph import CapturedGraph, GraphInput, GraphNode

ENDS = "ends"
_PARTS = {"chunk": 2, "split": 2, "split_with_sizes": 2, "slice": 1, "unsqueeze": 1, "squeeze": 1}  # index of the dim


class _OtherFormError(Exception):
    """The sorted tensor is used in another way."""


def with_routes(graph: CapturedGraph, kept: Collection[str], *, send: bool = False) -> CapturedGraph:
    """Return the graph with routed experts as single nodes; tensors in `kept`, which users name, stay in the graph.

    With `send` tokens are sent to experts even if that costs more.
    """
    for node in graph.nodes:
        if _is(node, "sort", "argsort") and node.index in {None, 1} and len(node.shape) == 1:
            try:
                graph = _Region(graph, node, frozenset((*kept, *graph.outputs)), send).replaced()
            except _OtherFormError:
                continue
    return graph


@dataclass(slots=True)
class _Region:
    """The nodes that depend on the order in which one node sorts pairs by expert."""

    graph: CapturedGraph
    order: GraphNode
    kept: frozenset[str]
    send: bool = False
    tensors: dict[str, GraphNode | GraphInput] = field(init=False)
    experts: int = 0
    by_expert: list[str] = field(default_factory=list)
    by_token: list[tuple[str, int]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    body: list[dict[str, Any]] = field(default_factory=list)
    _tokens: dict[str, int] = field(default_factory=dict)  # token numbers: the order divided by pairs per token
    _inverse: set[str] = field(default_factory=set)
    _ids: set[str] = field(default_factory=set)  # sorted expert numbers, of any type
    _counts: dict[str, int] = field(default_factory=dict)
    _ends: set[str] = field(default_factory=set)
    _rows: dict[str, str] = field(default_factory=dict)  # by tensor with a row per pair, its name in the body
    _ended: list[GraphNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tensors = {one.name: one for one in self.graph.inputs} | {one.name: one for one in self.graph.nodes}

    def replaced(self) -> CapturedGraph:
        """Return the graph with one node replacing all that depend on the order. Raises _OtherFormError."""
        ids = _tensor(self.order, 0)
        _hold(len(self._shape(ids)) == 1 and not _is_descending(self.order))
        gone = [self.order.name]
        for node in self.graph.nodes:
            sorts = node.op == self.order.op and node.args == self.order.args and node.kwargs == self.order.kwargs
            if sorts and node.name != self.order.name:
                _hold(node.index == 0)
                self._ids.add(node.name)
                self._rows[node.name] = self._sent(ids, 1)
            elif not self._touches(node):
                continue
            elif node.name != self.order.name:
                self._add(node)
            gone.append(node.name)
        _hold(len(self._ended) == 1 and self.experts > 0 and not self.kept.intersection({*gone} - {self._end.name}))
        named = [ids, *self.by_expert, *(name for name, _ in self.by_token if name != ids), *self.others]
        _hold(max(Counter(named).values()) == 1 and len({every for _, every in self.by_token if every > 1}) <= 1)
        end = self._end
        args = (
            {"tensor": ids},
            [{"tensor": name} for name in self.by_expert],
            [[{"tensor": name}, every] for name, every in self.by_token],
            [{"tensor": name} for name in self.others],
            self.body,
            self._rows[_tensor(end, 0)],
        )
        made = msgspec.structs.replace(end, op=SENT if self.send else ROUTED, args=args, kwargs={}, index=None)
        nodes = tuple(
            made if node.name == end.name else node
            for node in self.graph.nodes
            if node.name == end.name or node.name not in gone
        )
        return msgspec.structs.replace(self.graph, nodes=self._in_order(nodes, made))

    @property
    def _end(self) -> GraphNode:
        return self._ended[0]

    def _in_order(self, nodes: Sequence[GraphNode], made: GraphNode) -> tuple[GraphNode, ...]:
        """Return the nodes, with the new one placed after the nodes it reads."""
        before = nodes[: nodes.index(made)]
        _hold(set(made.operands()) <= {one.name for one in self.graph.inputs} | {one.name for one in before})
        return tuple(nodes)

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape if name in self.tensors else ()

    def _touches(self, node: GraphNode) -> bool:
        known = {self.order.name, *self._tokens, *self._inverse, *self._ids, *self._counts, *self._ends, *self._rows}
        return node.name == self.order.name or not known.isdisjoint(node.operands())

    def _add(self, node: GraphNode) -> None:
        """Add a node that depends on the order."""
        first, name = _tensor(node, 0), node.name
        if first == self.order.name and _is(node, "floor_divide", "div") and _floors(node):
            self._tokens[name] = int(node.args[1])
        elif first == self.order.name and _is(node, "argsort", "sort") and not _is_descending(node):
            _hold(node.index in {None, 1})
            self._inverse.add(name)
        elif _is(node, "index"):
            self._index(node, first)
        elif _is(node, "histc") and first in self._ids:
            _hold(len(node.args) == 4 and tuple(node.args[2:]) == (0, node.args[1] - 1))
            self._counts[name] = int(node.args[1])
        elif _is(node, "cumsum") and first in self._counts and len(node.args) == 2:
            self._groups(self._counts[first])
            self._ends.add(name)
        elif first in self._ends and _is_cast(node):
            self._ends.add(name)
        elif _is_grouped(node):
            self._product(node)
        else:
            self._row_by_row(node)

    def _index(self, node: GraphNode, first: str) -> None:
        _hold(len(node.args) == 2 and isinstance(node.args[1], list | tuple) and len(node.args[1]) == 1)
        by = node.args[1][0]["tensor"] if isinstance(node.args[1][0], dict) else ""
        pairs = self.order.shape[0]
        if by in self._inverse and first in self._rows and node.shape[:1] == (pairs,):
            self._ended.append(node)
            return
        _hold(not self._touches_name(first))
        if by == self.order.name or by in self._tokens:
            every = self._tokens.get(by, 1)
            _hold(self._shape(first)[0] * every == pairs)
            self._rows[node.name] = self._sent(first, every)
        else:
            _hold(by in self._ids and by in self._rows)
            self._groups(self._shape(first)[0])
            self._write(node, "routed.picked", (self._of_experts(first), {"local": ENDS}, {"local": self._rows[by]}))

    def _product(self, node: GraphNode) -> None:
        x, weights, ends = (_tensor(node, at) for at in range(3))
        ends = ends or _tensor_in(node.kwargs.get("offs"))
        _hold(x in self._rows and ends in self._ends and not self._touches_name(weights))
        _hold(len(self._shape(weights)) == 3 and self._shape(weights)[0] == self.experts and len(node.shape) == 2)
        args = ({"local": self._rows[x]}, self._of_experts(weights), {"local": ENDS})
        self._write(node, "routed.product", args)

    def _row_by_row(self, node: GraphNode) -> None:
        """Add an operator that computes every row independently, as all elementwise ones do."""
        rank, pairs = len(node.shape), self.order.shape[0]
        _hold(rank > 0 and node.shape[0] == pairs)
        name = _short(node)
        if name in _PARTS:
            first, at = _tensor(node, 0), _PARTS[name]
            dim = node.args[at] if at < len(node.args) else node.kwargs.get("dim", 0)
            before = len(self._shape(first)) + (name == "unsqueeze")
            _hold(isinstance(dim, int) and -before <= dim < before and dim % before > 0)
        else:
            _hold(is_elementwise(node.op) and not name.startswith(("__", "detach")))
            for operand in node.operands():
                shape = self._shape(operand)
                along = len(shape) == rank and shape[0] > 1
                _hold(len(shape) == rank and shape[0] == pairs if operand in self._rows else not along)
        if _tensor(node, 0) in self._ids and (_is_cast(node) or self._clamps(node)):
            self._ids.add(node.name)
        args, kwargs = self._localized(list(node.args)), self._localized(dict(node.kwargs))
        self._write(node, node.op, tuple(args), kwargs)

    def _clamps(self, node: GraphNode) -> bool:
        """Return whether expert numbers stay unchanged except those beyond the last expert."""
        low = node.args[1] if len(node.args) > 1 else node.kwargs.get("min")
        high = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
        return _is(node, "clamp") and low in {None, 0} and isinstance(high, int) and self._has_experts(high + 1)

    def _has_experts(self, number: int) -> bool:
        return self.experts in {0, number}

    def _groups(self, number: int) -> None:
        _hold(self._has_experts(number))
        self.experts = number

    def _touches_name(self, name: str) -> bool:
        known = {self.order.name, *self._tokens, *self._inverse, *self._ids, *self._counts, *self._ends, *self._rows}
        return name in known or name not in self.tensors

    def _localized(self, value: Any) -> Any:
        """Return arguments with tensors replaced by their names in the body."""
        if isinstance(value, dict):
            if "tensor" in value:
                name = value["tensor"]
                if name in self._rows:
                    return {"local": self._rows[name]}
                _hold(not self._touches_name(name))
                self.others += [name] if name not in self.others else []
                return {"local": f"p{self.others.index(name)}"}
            return {key: self._localized(one) for key, one in value.items()}
        return [self._localized(one) for one in value] if isinstance(value, list | tuple) else value

    def _sent(self, name: str, every: int) -> str:
        if (name, every) not in self.by_token:
            self.by_token.append((name, every))
        return f"u{self.by_token.index((name, every))}"

    def _of_experts(self, name: str) -> dict[str, str]:
        if name not in self.by_expert:
            self.by_expert.append(name)
        return {"local": f"w{self.by_expert.index(name)}"}

    def _write(self, node: GraphNode, op: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
        self._rows[node.name] = node.name
        line = {"name": node.name, "op": op, "args": list(args), "kwargs": dict(kwargs or {}), "index": node.index}
        if op.startswith("routed."):
            line["index"] = None
        self.body.append({**line, "shape": list(node.shape), "dtype": node.dtype})


def _hold(true: bool) -> None:
    if not true:
        raise _OtherFormError


def _short(node: GraphNode) -> str:
    return node.op.removeprefix("aten.").split(".")[0]


def _is(node: GraphNode, *names: str) -> bool:
    return node.op.startswith("aten.") and _short(node) in names


def _is_grouped(node: GraphNode) -> bool:
    return node.op.startswith(("aten._grouped_mm.", "transformers.grouped_mm_fallback."))


def _is_cast(node: GraphNode) -> bool:
    return _is(node, "to", "_to_copy") and len(node.operands()) == 1


def _is_descending(node: GraphNode) -> bool:
    return True in node.args[2:] or node.kwargs.get("descending", False) is not False


def _floors(node: GraphNode) -> bool:
    rounds = _is(node, "floor_divide") or node.kwargs.get("rounding_mode") == "floor"
    return rounds and len(node.args) == 2 and isinstance(node.args[1], int) and node.args[1] > 0


def _tensor_in(value: Any) -> str:
    return str(value["tensor"]) if isinstance(value, dict) and isinstance(value.get("tensor"), str) else ""


def _tensor(node: GraphNode, at: int) -> str:
    return _tensor_in(node.args[at] if at < len(node.args) else None)
