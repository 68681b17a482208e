"""Rotary positions: pairs of the last dim are rotated by angles. In a captured graph they become one operator.

    x * cos + cat((-x[..., d/2:], x[..., :d/2]), -1) * sin

is seven operators, of which each reads and writes all of x; the executor has one kernel for them
(`executor/model/rotary.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import msgspec

from planner.sharding.ops.aten import AtenCall, Statement
from planner.sharding.ops.axis_flow import Value
from planner.sharding.ops.op import Op, Saves, Step
from planner.sharding.ops.walker import Call
from simulator.sharded.graph import CapturedGraph, GraphInput, GraphNode

ROTARY = "rotary"  # the operator's name in statements and programs: x, cosines, sines


def _axes(call: Call) -> Value:
    """Rotary embedding: pairs of the last dim are rotated by angles that depend on the position, given or counted."""
    flow, value = call.flow, call.value(0)
    flow.keep_unsharded(value.dims[-1], "a rotation mixes elements of it")
    for angles in call.values()[1:]:
        flow.keep_unsharded(angles.dims[-1], "a rotation mixes elements of it")
        known = {axis for dim in flow.dims(value) for axis in dim}
        if not {axis for dim in flow.dims(angles)[:-1] for axis in dim} <= known:
            flow.broadcast([value.dims[:-1], angles.dims[:-1]], call.name)
    if len(value.dims) > 1 and len(call.values()) == 1:
        flow.positional.update(flow.dim(value.dims[-2]))
    return value


def _gradient(step: Step) -> dict[str, str]:
    """Angles are constants."""
    angles = "".join(f", {name}" for name in step.weights)
    return {step.tensor(0): f"rope_bwd({step.gradient}{angles})"}


def _capture(call: AtenCall) -> list[Statement]:
    return [call.statement(f"rope({', '.join(call.tensor(at) for at in range(3))})")]


def with_rotations(graph: CapturedGraph, kept: Collection[str]) -> CapturedGraph:
    """Return the graph with rotations as single nodes; tensors that users name in `kept` stay in the graph."""
    inputs: dict[str, GraphNode | GraphInput] = {one.name: one for one in graph.inputs}
    finder = _Finder(
        tensors=inputs | {node.name: node for node in graph.nodes},
        uses=Counter([*(name for node in graph.nodes for name in node.operands()), *graph.outputs]),
        kept=frozenset(kept),
    )
    found: dict[str, GraphNode] = {}
    gone: set[str] = set()
    for node in reversed(graph.nodes):  # a cast of the sum before the sum
        if node.name in gone:
            continue
        rotation = finder.rotation(node)
        if rotation is not None:
            found[node.name], inner = rotation
            gone |= inner
    nodes = tuple(found.get(node.name, node) for node in graph.nodes if node.name not in gone)
    return msgspec.structs.replace(graph, nodes=nodes)


@dataclass(frozen=True, slots=True)
class _Finder:
    tensors: Mapping[str, GraphNode | GraphInput]
    uses: Counter[str]
    kept: frozenset[str]

    def rotation(self, node: GraphNode) -> tuple[GraphNode, set[str]] | None:
        """Return the rotation that ends with a node, and the tensors inside it that nothing else uses; None for other
        nodes.
        """
        last, inner = node, set[str]()
        if _is(node, "to"):
            cast = self._inside(_tensor(node, 0))
            if cast is None:
                return None
            last, inner = cast, {cast.name}
        if not _is(last, "add") or last.kwargs or len(last.args) != 2:
            return None
        for straight, rotated in permutations([self._inside(_tensor(last, at)) for at in (0, 1)]):
            parts = None if straight is None or rotated is None else self._parts(straight, rotated)
            if parts is None:
                continue
            x, cos, sin, more = parts
            source = self.tensors[x]
            angles = [self.tensors[name] for name in (cos, sin)]
            if isinstance(source, GraphNode) and _is(source, "to") and x not in self.kept and self._all_uses(x, more):
                before = self.tensors[_tensor(source, 0)]
                if before.dtype == node.dtype and source.dtype == angles[0].dtype:
                    more, x, source = more | {x}, before.name, before
            same = angles[0].shape == angles[1].shape and angles[0].dtype == angles[1].dtype
            if same and source.shape == node.shape == last.shape and source.dtype == node.dtype:
                args = tuple({"tensor": name} for name in (x, cos, sin))
                return msgspec.structs.replace(node, op=ROTARY, args=args, kwargs={}, index=None), inner | more
        return None

    def _parts(self, straight: GraphNode, rotated: GraphNode) -> tuple[str, str, str, set[str]] | None:
        """Return x, cosines, sines and the inner tensors of x * cos + rotated(x) * sin."""
        if not (_is(straight, "mul") and _is(rotated, "mul")):
            return None
        for joined, sin in permutations((_tensor(rotated, 0), _tensor(rotated, 1))):
            cat = self._inside(joined)
            halves = None if cat is None else self._halves(cat)
            if cat is None or halves is None:
                continue
            x, more = halves
            for value, cos in permutations((_tensor(straight, 0), _tensor(straight, 1))):
                if value == x and cos and sin and cos != x:
                    return x, cos, sin, {straight.name, rotated.name, cat.name} | more
        return None

    def _halves(self, cat: GraphNode) -> tuple[str, set[str]] | None:
        """Return x and the inner tensors of cat((-second half of x, first half of x), -1)."""
        parts = cat.args[0] if _is(cat, "cat") and isinstance(cat.args[0], list | tuple) else ()
        if len(parts) != 2 or len(cat.args) != 2 or cat.args[1] not in {-1, len(cat.shape) - 1}:
            return None
        negated, first = (self._inside(part.get("tensor", "") if isinstance(part, dict) else "") for part in parts)
        second = self._inside(_tensor(negated, 0)) if negated is not None and _is(negated, "neg") else None
        if negated is None or first is None or second is None:
            return None
        halves = [_half(one, self.tensors) for one in (first, second)]
        if (
            halves[0] is None
            or halves[1] is None
            or halves[0][0] != halves[1][0]
            or (halves[0][1], halves[1][1]) != (0, 1)
        ):
            return None
        return halves[0][0], {negated.name, first.name, second.name}

    def _inside(self, name: str) -> GraphNode | None:
        """Return the node of a tensor that is used once and that the user has not named."""
        node = self.tensors.get(name)
        return node if isinstance(node, GraphNode) and self.uses[name] == 1 and name not in self.kept else None

    def _all_uses(self, name: str, inside: Collection[str]) -> bool:
        nodes = [self.tensors[one] for one in inside]
        return self.uses[name] == sum(name in node.operands() for node in nodes if isinstance(node, GraphNode))


def _half(node: GraphNode, tensors: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the tensor of whose last dim a node is one half, and which half."""
    name = _tensor(node, 0)
    whole = tensors[name].shape if name in tensors else ()
    if not whole or len(node.shape) != len(whole) or 2 * node.shape[-1] != whole[-1] or node.shape[:-1] != whole[:-1]:
        return None
    numbers = list(_numbers(node))
    if _is(node, "chunk", "split", "split_with_sizes"):
        return (name, node.index) if node.index is not None and numbers[-1:] in ([-1], [len(whole) - 1]) else None
    if _is(node, "slice") and len(numbers) == 3 and numbers[0] in {-1, len(whole) - 1}:
        return (name, 0) if numbers[1] == 0 else (name, 1) if numbers[1] == node.shape[-1] else None
    return None


def _numbers(node: GraphNode) -> Iterator[int]:
    """Yield the arguments of a node that are whole numbers."""
    return (value for value in node.args[1:] if isinstance(value, int) and not isinstance(value, bool))


def _is(node: GraphNode, *names: str) -> bool:
    return node.op.startswith(tuple(f"aten.{name}." for name in names))


def _tensor(node: GraphNode, at: int) -> str:
    value: Sequence[Any] | Any = node.args[at] if at < len(node.args) else None
    return value["tensor"] if isinstance(value, dict) and isinstance(value.get("tensor"), str) else ""


OPS = (
    Op(
        names="rope rotary apply_rotary",
        axes=_axes,
        gradient=_gradient,
        gradient_axes=_axes,
        aten=ROTARY,
        capture=_capture,
        kernels=ROTARY,
        saves=Saves.OTHERS,
    ),
)
