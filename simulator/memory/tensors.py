"""The allocations and frees of a block's passes, tensor by tensor, as its operators run one after the other.

A runtime's description states what every operator reads, writes and saves, by shape. Tensors are matched by size: a
saved tensor is an existing one of that size, else a new one; a tensor that was read is freed unless it is saved or is
the residual stream. Autograd frees what an operator saved when its backward pass has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simulator.kernels.operators import TOKEN_AXES, OperatorSpec, parse_matmul, product
from simulator.memory.tape import NOTHING, Act, Event, Tape
from simulator.passes.block import running
from simulator.runtimes.parts import RecomputeSpec
from simulator.step.context import CostContext
from simulator.step.held import head_tensor_bytes

STREAM_AXES = frozenset(["t", "u", "h", "hr"])  # axes of the residual stream; other tensors may have its size by chance
RESIDUAL = "residual"
NORM = "norm"  # how the names of operators end whose vector of weights has a gradient


class Weight(NamedTuple):
    """A matrix of a block: its elements, whether it has a gradient, and whether it is packed."""

    elements: float
    trained: bool = True
    packed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Events of a block's passes. `inward` and `incoming` are the slots of the inputs of the forward and the backward
    pass, `outward` and `gradient` those of their outputs. `weights` are the block's matrices, in the order of their
    use.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    inward: int
    outward: int
    incoming: int
    gradient: int
    weights: tuple[Weight, ...]


class BlockTensors:
    """The tensors of blocks under the single plan of `context`."""

    def __init__(self, context: CostContext) -> None:
        self.context = context

    def passes(self, operators: Sequence[OperatorSpec], mode: RecomputeSpec) -> Passes:
        """Return the passes of a block with recomputation as `mode` states; an empty mode recomputes nothing."""
        runs = running(operators, self.context, {"": mode})
        active = [run.operator for run in runs]
        weights = self._weights(active)
        again = [bool(run.again[""][0]) for run in runs] if mode.recomputes else []
        tape = Tape()
        stream = self._size("u hr")
        inward = tape.given(stream)
        if mode.recomputes:
            outward = self._forward_wrapped(tape, active, mode, again, inward)
        else:
            outward = self._forward(tape, active, inward, lambda _: True)
        forward = tape.take_events()
        tape.live.pop(outward, None)
        tape.held.discard(outward)
        incoming = tape.given(stream)
        tape.held.add(incoming)
        if mode.recomputes:
            self._again(tape, active, again, inward)
        gradient = self._backward(tape, active, incoming)
        return Passes(
            forward=forward,
            backward=tape.take_events(),
            inward=inward,
            outward=outward,
            incoming=incoming,
            gradient=gradient,
            weights=tuple(weights),
        )

    def head_passes(
        self,
        operators: Sequence[OperatorSpec],
        peaks: Sequence[Sequence[str]],
        *,
        kept: bool = False,
        at_once: bool = False,
    ) -> Passes:
        """Return the passes of the network's end: products as in any block, then the loss. The backward pass of the
        loss begins with the tensors of the largest of `peaks` alive together. The outputs are the logits. Logits that
        are `kept` outlive the backward pass. A loss that computes its gradient `at_once` has the tensors of the largest
        moment in its forward pass as well.
        """
        active = [run.operator for run in running(operators, self.context, {})]
        split = 1 + max(place for place, operator in enumerate(active) if operator.matmul)
        body, loss = active[:split], active[split:]
        peak = max(([*self.sizes(moment)] for moment in peaks), key=sum, default=[])
        tape = Tape()
        inward = tape.given(self._size("u hr"))
        logits = self._forward(tape, body, inward, lambda _: True)
        saved: list[int] = []
        in_pieces = [nbytes for moment in peaks for x in moment if _axes(x) == ["one"] for nbytes in self.sizes([x])]
        passing = [tape.allocate(nbytes) for nbytes in (peak if at_once else in_pieces)]
        for operator in loss:
            before = list(tape.live)
            outs = [] if in_pieces else [tape.allocate(nbytes) for nbytes in self._results(operator)]
            saved += [tape.claim(nbytes) for nbytes in self.sizes(operator.saves)]
            tape.free_read(self._operands(operator), before, {logits, *outs, *passing})
        tape.free_rest({logits})
        forward = tape.take_events()
        alive = [tape.live[slot] for slot in saved]
        # Logits saved by the loss belong to it; others are freed by its caller.
        given = NOTHING if logits in saved and not kept else logits
        tape.live.pop(given, None)
        for nbytes in alive:
            if nbytes in peak:
                peak.remove(nbytes)
        turning = [tape.allocate(nbytes) for nbytes in peak]
        width = self._results(body[-1])[0]
        slope = next((s for s in turning if tape.live[s] == width), None)
        *gone, last = slots = [*saved, *turning]
        if slope is None and logits in saved:  # a loss that saves the logits writes their gradient over them
            slope = logits
        elif slope is None:  # a copy of the last of them, at a moment when nothing else is alive
            for slot in gone:
                tape.free(slot)
            slope, slots = tape.allocate(width), [last]
        for slot in slots:
            if slot != slope:
                tape.free(slot)
        tape.held.add(slope)
        gradient = self._backward(tape, body, slope)
        weights = self._weights(body)
        return Passes(
            forward=forward,
            backward=tape.take_events(),
            inward=inward,
            outward=given,
            incoming=NOTHING,
            gradient=gradient,
            weights=tuple(weights),
        )

    # --- forward ------------------------------------------------------------------------------------------------

    def _forward(self, tape: Tape, active: Sequence[OperatorSpec], inward: int, saving: Callable[[int], bool]) -> int:
        """Run operators; those whose index satisfies `saving` hold what they save. Return the slot of the result."""
        stream = last = inward
        for place, operator in enumerate(active):
            before = list(tape.live)
            outs = [tape.allocate(nbytes) for nbytes in self._results(operator)]
            if saving(place):
                tape.saved_by[place] = [
                    tape.claim(nbytes, NOTHING if STREAM_AXES.issuperset(_axes(tensor)) else inward)
                    for tensor in operator.saves
                    for nbytes in self.sizes([tensor])
                ]
            stream, last = self._passed(tape, operator, before, outs, stream, last)
        tape.free_rest({last})
        return last

    def _passed(
        self, tape: Tape, operator: OperatorSpec, before: list[int], outs: list[int], stream: int, last: int
    ) -> tuple[int, int]:
        """Free what is not needed after an operator. Return the slots of the residual stream and of the last result."""
        last = outs[0] if outs else last
        keep = {stream, last, *outs}
        if operator.attention:
            tape.free_rest(keep)
        else:
            tape.free_read(self._operands(operator), before, keep)
        if operator.name == RESIDUAL:
            passed, stream = stream, last
            if passed not in tape.held:
                tape.free(passed)
        return stream, last

    def _forward_wrapped(
        self, tape: Tape, active: Sequence[OperatorSpec], mode: RecomputeSpec, again: Sequence[bool], inward: int
    ) -> int:
        """Run a block and hold only what `mode` keeps."""
        if mode.drops:  # operators that save the rest hold the inputs of those that run again
            return self._forward(tape, active, inward, lambda place: not mode.lets_go(active[place].name))
        tape.held.add(inward)
        results = (tensor for operator in active for tensor in mode.keeps_of.get(operator.name, ()))
        wanted = self.sizes([*mode.keeps, *results])
        if tape.live[inward] in wanted:
            wanted.remove(tape.live[inward])
        # A kept tensor is the result of an operator that does not run again, so it is held from its creation. The
        # result of the last operator belongs to the next block.
        stream = last = inward
        for place, operator in enumerate(active):
            before = list(tape.live)
            outs = [tape.allocate(nbytes) for nbytes in self._results(operator)]
            for slot in outs:
                if not again[place] and place + 1 < len(active) and tape.live[slot] in wanted:
                    wanted.remove(tape.live[slot])
                    tape.held.add(slot)
            stream, last = self._passed(tape, operator, before, outs, stream, last)
        for nbytes in wanted:
            tape.held.add(tape.allocate(nbytes))
        tape.free_rest({last})
        return last

    def _again(self, tape: Tape, active: Sequence[OperatorSpec], again: Sequence[bool], inward: int) -> None:
        """Run operators again so that everything the backward pass needs is held, besides what was kept."""
        kept = [slot for slot in tape.held if slot != inward]
        # A kept tensor counts as saved by an operator that saves its size, and is freed after that operator's backward
        # pass.
        tape.held -= {inward, *kept}
        protected = {inward, *kept}
        stream = last = inward
        for place, operator in enumerate(active):
            before = list(tape.live)
            outs = [tape.allocate(nbytes) for nbytes in self._results(operator)] if again[place] else []
            if place not in tape.saved_by:
                tape.saved_by[place] = [tape.claim(nbytes) for nbytes in self.sizes(operator.saves)]
            if not again[place]:
                continue
            last = outs[0] if outs else last
            keep = {stream, last, *outs, *protected}
            if operator.attention:
                tape.free_rest(keep | {s for s in tape.live if s in protected})
            else:
                tape.free_read(self._operands(operator), before, keep)
            if operator.name == RESIDUAL:
                stream = last
        tape.free_rest({inward})

    # --- backward -----------------------------------------------------------------------------------------------

    def _backward(self, tape: Tape, active: Sequence[OperatorSpec], incoming: int) -> int:
        """Run the backward passes of operators; return the slot of the gradient of the block's input."""
        stream = last = incoming
        weights = sum(1 for operator in active if self._weight(operator))
        residuals = 0
        for place in reversed(range(len(active))):
            operator = active[place]
            if operator.name == RESIDUAL:
                residuals += 1
                if residuals == 1:  # the gradient goes to both branches unchanged
                    continue
            before = list(tape.live)
            if (operator.weight_gradient and self._weight(operator)) or operator.name.endswith(NORM):
                tape.events.append((Act.NEEDED, self._output_gradient(tape, operator, last, stream), 0))
            outs = [tape.allocate(nbytes) for nbytes in self._gradients(operator)]
            if operator.attention:  # gradients of queries are summed in float32
                tape.free(tape.allocate(round(2 * self._size("t q"))))
            if self._weight(operator):
                weights -= 1
                if operator.weight_gradient and operator.weight_gradient_dtype == "compute":
                    tape.events.append((Act.GRADIENT, weights, 0))
            for slot in tape.saved_by.pop(place, ()):
                tape.free(slot)
            last = outs[0] if outs else last
            keep = {stream, last, *outs}
            if operator.attention:
                tape.free_rest(keep)
            else:
                tape.free_read(self._gradient_operands(operator), before, keep)
            if operator.name == RESIDUAL:
                tape.held.discard(stream)
                tape.free(stream)
                stream = last
        tape.held.clear()
        tape.free_rest({last})
        return last

    def _output_gradient(self, tape: Tape, operator: OperatorSpec, last: int, stream: int) -> int:
        """Return the slot of the gradient of an operator's result: the earliest that its backward pass may read."""
        sizes = self._results(operator)
        unsaved = (slot for slot in tape.live if slot not in tape.held and slot != stream)
        return next((slot for slot in (*unsaved, last, stream) if tape.live.get(slot) in sizes), NOTHING)

    # --- sizes --------------------------------------------------------------------------------------------------

    def _size(self, tensor: str) -> int:
        return sum(self.sizes([tensor]))

    def sizes(self, tensors: Iterable[str]) -> list[int]:
        """Return the sizes of tensors in bytes; `3*t h` stands for three tensors."""
        found: list[int] = []
        for tensor in tensors:
            axes, _, dtype = tensor.partition(":")
            count, _, rest = axes.rpartition("*") if "*" in axes.split(" ", maxsplit=1)[0] else ("", "", axes)
            if rest == "one":  # a piece of the logits
                found.append(round(float(head_tensor_bytes(tensor, self.context)[0])))
                continue
            one = self._elements(rest.split()) * self.context.dtype_bytes(dtype or "compute")
            times = float(count) if count else 1.0
            whole = times.is_integer() and times <= MOST_ALIKE
            found += [round(one)] * int(times) if whole else [round(one * times)]
        return [nbytes for nbytes in found if nbytes]

    def _elements(self, axes: Sequence[str]) -> float:
        return float(np.asarray(product(axes, self.context.sizes)).flat[0])

    def _weight(self, operator: OperatorSpec) -> float:
        """Return the elements of the matrix that an operator multiplies with, or looks up; 0 without one."""
        if operator.matmul:
            return self._elements(operator.weight) if operator.weight else 0.0
        if operator.transient or _casts_weights(operator):
            return 0.0
        weights = [axes for x in operator.backward_writes if not TOKEN_AXES & set(axes := _axes(x))]
        return sum(self._elements(axes) for axes in weights)

    def _weights(self, operators: Sequence[OperatorSpec]) -> list[Weight]:
        return [
            Weight(elements, bool(operator.weight_gradient), operator.packed)
            for operator in operators
            if (elements := self._weight(operator))
        ]

    def _ranks(self, operator: OperatorSpec) -> float:
        return float(np.asarray(self.context.groups.extent(operator.over)[0]).flat[0])

    def _results(self, operator: OperatorSpec) -> list[int]:
        """Return the sizes of an operator's results."""
        if operator.allocates is not None:
            return self.sizes(operator.allocates)
        if operator.matmul:
            return self.sizes([" ".join(parse_matmul(operator.matmul)[2])])
        if operator.attention:
            return self.sizes(["t vv" if "vv" in self.context.sizes else "t q"])
        if operator.collective:
            return self._moved(operator, operator.collective)
        return [] if _casts_weights(operator) else self.sizes(operator.writes)

    def _operands(self, operator: OperatorSpec) -> list[int]:
        """Return the sizes of what an operator reads."""
        if operator.matmul:
            return self.sizes([" ".join(parse_matmul(operator.matmul)[0]), *operator.reads])
        if operator.collective:
            back = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
            return self._moved(operator, back.get(operator.collective, operator.collective))
        return self.sizes(operator.reads)

    def _moved(self, operator: OperatorSpec, kind: str) -> list[int]:
        """Return the size of a collective's result: none with one rank, as the identity, or in place."""
        ranks = self._ranks(operator)
        if ranks <= 1 or kind in {"copy", "ring", "pass_back"}:
            return []
        whole = self.sizes([operator.tensor])
        return [round(nbytes / ranks) for nbytes in whole] if kind == "reduce_scatter" else whole

    def _gradients(self, operator: OperatorSpec) -> list[int]:
        """Return the sizes of the gradients that an operator's backward pass computes, without those of weights."""
        if operator.matmul and operator.backward_allocates is None:
            left, right, _ = parse_matmul(operator.matmul)
            both = [" ".join(left)] + ([" ".join(right)] if TOKEN_AXES & set(right) else [])
            return self.sizes(both)
        if operator.attention:
            latent = "vv" in self.context.sizes
            return self.sizes(["2*t qk", "t vv"] if latent else ["t q", "2*t kv"])
        if operator.collective:
            back = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "copy": "all_reduce"}
            kind = back.get(operator.collective, operator.collective)
            none = operator.collective == "all_reduce" or not operator.gradient
            return [] if none else self._moved(operator, kind)
        if operator.backward_allocates is not None:
            return self.sizes(operator.backward_allocates)
        if _casts_weights(operator):
            return []
        return self.sizes(x for x in operator.backward_writes if TOKEN_AXES & set(_axes(x)))

    def _gradient_operands(self, operator: OperatorSpec) -> list[int]:
        """Return the sizes of the gradients that an operator's backward pass reads."""
        if operator.matmul or operator.attention:
            return self._results(operator) + self.sizes(operator.reads if operator.matmul else ())
        if operator.collective:
            none = operator.collective == "all_reduce" or not operator.gradient
            return [] if none else self._moved(operator, operator.collective)
        if operator.backward_allocates == ():  # the gradient that it reads is overwritten by its result
            return []
        return self.sizes(operator.backward_reads)


# More tensors of the same shape than this are one large tensor in pieces.
MOST_ALIKE = 8


def _axes(tensor: str) -> list[str]:
    return [axis.rpartition("*")[2] for axis in tensor.partition(":")[0].split()]


def _casts_weights(operator: OperatorSpec) -> bool:
    """Whether an operator makes 16-bit copies of weights, which autocast keeps and `rank` counts."""
    moves = not (operator.matmul or operator.attention or operator.collective)
    return moves and bool(operator.writes) and not any(TOKEN_AXES & set(_axes(x)) for x in operator.writes)
