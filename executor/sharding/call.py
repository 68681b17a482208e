"""A call of a sharded module: checks that it has the form that was captured, takes this rank's pieces of it, and runs
the program as one function for autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.utils import _pytree as pytree

from executor.sharding.places import Place
from executor.sharding.run_program import State
from simulator.sharded.program import Buffer
from topology.errors import BadInput, UserError


@dataclass(frozen=True, slots=True)
class Signature:
    """How a module is called: the structure of its arguments and, for each, shape and dtype, or its value if it is not
    a tensor.
    """

    tree: Any
    leaves: tuple[Any, ...]

    def differs_in_sizes(self, other: Signature) -> bool:
        """Return whether two signatures differ, and only in sizes of tensors."""
        if self.tree != other.tree:
            return False
        both = list(zip(self.leaves, other.leaves, strict=True))
        tensors = [(one, two) for one, two in both if is_shaped(one) and is_shaped(two)]
        alike = all(len(one[0]) == len(two[0]) and one[1] == two[1] for one, two in tensors)
        rest = all(one is two or one == two for one, two in both if not (is_shaped(one) and is_shaped(two)))
        return alike and rest and any(one != two for one, two in tensors)


def is_shaped(leaf: Any) -> bool:
    """Return whether a leaf of a signature is a tensor's."""
    return (
        isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[0], tuple) and isinstance(leaf[1], torch.dtype)
    )


def of_one_batch(call: Signature, micro_batches: int) -> Signature | None:
    """Return the signature of one of `micro_batches`, along the first dim; None if they do not divide it."""
    if micro_batches == 1:
        return call
    leaves = []
    for one in call.leaves:
        if is_shaped(one) and (not one[0] or one[0][0] % micro_batches):
            return None
        leaves.append(((one[0][0] // micro_batches, *one[0][1:]), one[1]) if is_shaped(one) else one)
    return Signature(call.tree, tuple(leaves))


def signature_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """Return the signature of a call. DTensors have the shape of the whole tensor."""
    leaves, tree = pytree.tree_flatten((list(args), dict(kwargs)))
    return Signature(tree, tuple(_seen(leaf) for leaf in leaves))


def _seen(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def autocast_of(args: Sequence[Any]) -> torch.dtype | None:
    """Return the dtype of the autocast around this call, on the device of its tensors; None without autocast."""
    devices = {leaf.device.type for leaf in pytree.tree_leaves(list(args)) if isinstance(leaf, torch.Tensor)}
    return ambient_autocast(next(iter(devices), "cpu"))


def ambient_autocast(device: str) -> torch.dtype | None:
    """Return the dtype to which autocast casts at the moment, or None if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def check_call(
    found: Signature, wanted: Signature, micro_batches: int, autocast: tuple[torch.dtype | None, torch.dtype | None]
) -> None:
    """Raise BadInput if a call differs from the captured one, which is of one micro batch; `autocast` is that
    of each.
    """
    if found.tree != wanted.tree:
        raise BadInput("a call with other arguments than were captured", remedy=f"arguments as in {wanted.tree}")
    for number, (mine, one) in enumerate(zip(found.leaves, wanted.leaves, strict=True)):
        if is_shaped(one) and one[0]:
            (first, *rest), dtype = one
            one = ((first * micro_batches, *rest), dtype)  # noqa: PLW2901 - of all micro batches
        if mine is not one and mine != one:
            raise BadInput(
                f"argument {number + 1} is {_said(mine)}, and was captured as {_said(one)}",
                why="a program is of the shapes, dtypes and values that its module was captured with",
                remedy="shard the module once more with these arguments",
            )
    if autocast[0] != autocast[1]:
        raise BadInput(
            f"a call with autocast to {autocast[0]}, of a module captured with {autocast[1]}",
            why="casts are operators of the program",
            remedy="the same autocast around shard and around the call",
        )


def _said(leaf: Any) -> str:
    """Return a description of an argument."""
    if is_shaped(leaf):
        return f"a tensor of {list(leaf[0])}, {leaf[1]}"
    return repr(leaf)[:60]


class Piece(torch.autograd.Function):
    """A rank's piece of a tensor that all ranks have whole; its gradient is made whole again, on all ranks."""

    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, place: Place, buffer: Buffer, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        ctx.place, ctx.buffer, ctx.group, ctx.like = place, buffer, group, whole.new_empty(0)
        ctx.set_materialize_grads(False)
        return place.piece(whole, buffer)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> Any:
        (gradient,), place, buffer = incoming, ctx.place, ctx.buffer
        if gradient is None:  # no gradient on any rank
            return None, None, None, None
        whole = ctx.like.new_zeros(buffer.shape)
        cut = {item for spec in buffer.dims for item in spec}
        if all(place.at[axis] == 0 for axis in place.sizes if axis not in cut):  # one of several copies counts
            indices = [place.indices(buffer, dim).to(whole.device) for dim in range(whole.ndim)]
            whole[torch.meshgrid(*indices, indexing="ij") if indices else ...] = gradient
        if dist.is_initialized():
            dist.all_reduce(whole, group=ctx.group)
        return whole, None, None, None


def micro_batches_of(leaf: Any, number: int) -> Sequence[Any]:
    """Return the parts of an argument's first dim. Raises UserError if they are not equal."""
    if number == 1 or not isinstance(leaf, torch.Tensor):
        return [leaf] * number
    if leaf.ndim == 0 or leaf.shape[0] % number:
        raise UserError(
            f"an argument of shape {tuple(leaf.shape)} does not divide into {number} micro batches",
            remedy="micro batches that divide the first dim of every argument",
        )
    return leaf.chunk(number)


class Run(torch.autograd.Function):
    """The program's forward and backward pass as one function of pieces."""

    @staticmethod
    def forward(ctx: Any, sharded: Any, names: tuple[str, ...], *pieces: torch.Tensor) -> Any:
        values = dict(zip(names, (piece.detach() for piece in pieces), strict=True)) | sharded.weights.fixed()
        state = sharded.ranks.forward(values)
        ctx.sharded, ctx.state, ctx.names = sharded, state, names
        found = tuple(sharded.ranks.everywhere(name, state) for name in sharded.program.outputs)
        ctx.mark_non_differentiable(*(one for one, graded in zip(found, sharded.graded, strict=True) if not graded))
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
        sharded, state, program = ctx.sharded, ctx.state, ctx.sharded.program
        seeds, given = {}, set()
        for name, output, gradient in zip(program.seeds, program.outputs, incoming, strict=True):
            if gradient is not None:
                given.add(name)
            # a gradient shared by copies of an output counts once
            first = all(sharded.ranks.place.at[axis] == 0 for axis in program.buffers[name].pending)
            seeds[name] = gradient if first and gradient is not None else sharded.ranks.zeros(name, output)
        sharded.ranks.backward(state, seeds, given)
        of_input = {
            program.inputs[tensor]: None if buffer in state.without_loss else state.at.get(buffer)
            for tensor, buffer in program.gradients.items()
        }
        ctx.state = State(at={})
        return (None, None, *(of_input.get(name) for name in ctx.names))
