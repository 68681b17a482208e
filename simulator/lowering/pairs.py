"""A forward and a backward pass written down side by side, layer by layer: `simulator.overlap.combined` as
instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.lowering.block_code import Detail, merged
from simulator.lowering.steps import KernelStep, Step, TransferStep
from simulator.lowering.writing import StepWriter
from simulator.program.program import COMPUTE, CodeWriter

WIRE = "ep comm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A pass of a layer, cut where tokens are exchanged: before, between and after. `weights` are those gradients of
    weights that may wait. A pass without exchanges is all before.
    """

    steps: tuple[list[Step], ...]
    weights: tuple[list[Step], ...]
    exchanges: tuple[TransferStep, ...]


def parts_of(steps: Sequence[Step], name: str, detail: Detail, *, weights_later: bool) -> Parts:
    """Return the parts of a pass, as coarse as `detail` asks for."""
    exchanges = tuple(step for step in steps if isinstance(step, TransferStep) and step.group == "ep")
    if len(exchanges) != 2:
        exchanges = ()
    cut: list[list[Step]] = [[]]
    for step in steps:
        if any(step is exchange for exchange in exchanges):
            cut.append([])
        else:
            cut[-1].append(step)
    cut += [[] for _ in range(3 - len(cut))]
    later = [[s for s in part if weights_later and isinstance(s, KernelStep) and s.weight] for part in cut]
    now = [[s for s in part if not any(s is w for w in deferred)] for part, deferred in zip(cut, later, strict=True)]
    return Parts(
        steps=tuple(merged(part, f"{name} {number}", detail) for number, part in enumerate(now)),
        weights=tuple(merged(part, f"{name} weights {number}", detail) for number, part in enumerate(later)),
        exchanges=exchanges,
    )


NOTHING = Parts(steps=([], [], []), weights=([], [], []), exchanges=())


@dataclass(slots=True)
class PairWriter:
    """Writes layers of two passes in turns. Each waits for its own exchanges only."""

    code: CodeWriter
    steps: StepWriter
    _owed: list[Step] = field(default_factory=list)  # gradients of weights of the layer before
    _rest: list[Step] = field(default_factory=list)  # what the forward layer before computes once its tokens are back
    _tokens: str = ""  # when they are

    def layer(self, forward: Parts, backward: Parts) -> None:
        """Write a layer of each pass, or `NOTHING` of one."""
        code, write = self.code, self.steps.write
        write(code, backward.steps[0])
        combined = self._exchange(backward, 0)
        write(code, self._owed)
        self._finish()
        write(code, forward.steps[0])
        attended = code.record(COMPUTE)
        self._wait(combined)
        write(code, backward.steps[1])
        experts_end = code.record(COMPUTE)
        dispatched = self._exchange(forward, 0, attended)
        write(code, backward.weights[1])
        returned = self._exchange(backward, 1, experts_end)
        self._wait(dispatched)
        write(code, forward.steps[1])
        self._tokens = self._exchange(forward, 1)
        self._rest = forward.steps[2]
        self._wait(returned)
        write(code, backward.steps[2])
        self._owed = [*backward.weights[0], *backward.weights[2]]

    def end(self) -> None:
        """Write what is left of the last layers."""
        self.steps.write(self.code, self._owed)
        self._owed = []
        self._finish()

    def _finish(self) -> None:
        self._wait(self._tokens)
        self.steps.write(self.code, self._rest)
        self._tokens, self._rest = "", []

    def _exchange(self, parts: Parts, number: int, after: str = "") -> str:
        """Begin an exchange after an event, or what has been computed so far; return the event of its end."""
        if not parts.exchanges:
            return ""
        step = parts.exchanges[number]
        self.code.wait(WIRE, after or self.code.record(COMPUTE))
        self.code.collective(step.op, step.group, step.nbytes, stream=WIRE)
        return self.code.record(WIRE)

    def _wait(self, event: str) -> None:
        if event:
            self.code.wait(COMPUTE, event)
