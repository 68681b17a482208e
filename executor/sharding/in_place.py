"""Writes in place that autograd treats in a way of its own: `detach_`, and writes through `detach()`.

torch.export turns writes into new tensors by what aliases what, and does not know where gradients end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from topology.errors import UserError

_DETACHES = torch.ops.aten.detach.default


def writes_in_place(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable  # noqa: SLF001


def line_of(node: torch.fx.Node) -> str:
    """Return the line of the user's code that a node is from, as the end of a sentence, or an empty string."""
    trace = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip()]
    return f", at {trace[-1][:120]}" if trace else ""


def detach_in_place(nodes: Sequence[torch.fx.Node]) -> None:
    """Make `detach_` a `detach` that all later nodes read."""
    for number, node in enumerate(nodes):
        if node.target is torch.ops.aten.detach_.default:
            node.target = _DETACHES
            later = set(nodes[number + 1 :])
            _operand(node).replace_all_uses_with(node, delete_user_cb=later.__contains__)


def separate_detached_writes(nodes: Sequence[torch.fx.Node]) -> None:
    """Let writes through `detach()` go into a copy, as nothing reads what was detached afterwards.

    Raises UserError where something does: autograd differentiates it as if nothing was written.
    """
    for number, node in enumerate(nodes):
        detached = root_of(node.args[0], _DETACHES) if writes_in_place(node.target) else None
        if not isinstance(detached, torch.fx.Node) or detached.target is not _DETACHES:
            continue
        of, later = root_of(detached), set(nodes[number + 1 :])
        if of.op == "placeholder":  # a buffer, or refused as an argument
            continue
        if any(root_of(one, _DETACHES) is of and later & set(one.users) for one in nodes[:number]):
            raise UserError(
                f"{node.name} writes through detach() or data into {of.name}, which is read again{line_of(node)}",
                why="gradients would end at what is written",
                remedy="y = y + (new - y).detach() for what is read again, else a write into y.detach().clone()",
            )
        _copied(detached)


def _copied(detached: torch.fx.Node) -> None:
    with detached.graph.inserting_after(detached):
        copy = detached.graph.call_function(torch.ops.aten.clone.default, (detached,))
    copy.meta = dict(detached.meta)
    detached.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def detach_operands(node: torch.fx.Node) -> None:
    """Detach what a node writes into the tensor of its first operand."""
    for one in node.all_input_nodes:
        value = one.meta.get("val")
        if one is not node.args[0] and isinstance(value, torch.Tensor) and value.is_floating_point():
            with node.graph.inserting_before(node):
                detached = node.graph.call_function(_DETACHES, (one,))
            detached.meta = dict(one.meta)
            node.replace_input_with(one, detached)


def _operand(node: torch.fx.Node) -> torch.fx.Node:
    first = node.args[0]
    assert isinstance(first, torch.fx.Node)  # noqa: S101 - of an operator on one tensor
    return first


def root_of(node: Any, until: Any = None) -> Any:
    """Return the node whose memory a view shows, or on the way to it the first call of `until`."""
    while isinstance(node, torch.fx.Node) and is_view(node) and node.target is not until:
        node = node.args[0]
    return node


def is_view(node: torch.fx.Node) -> bool:
    """Return whether a node's result lies in the memory of its first operand, or may do so."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], torch.fx.Node):
        return False
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    if not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001
        return False
    mine, other = node.meta.get("val"), node.args[0].meta.get("val")
    same = not (isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor)) or mine.dtype == other.dtype
    return same and any(one.alias_info is not None for one in node.target._schema.returns)  # noqa: SLF001
