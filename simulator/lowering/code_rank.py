"""A pipeline rank that writes what it is issued as instructions: `simulator.step.rank.Rank` for one plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from simulator.kernels.roofline import Packing
from simulator.lowering.block_code import BlockCode, Detail, block_code, merged
from simulator.lowering.steps import KernelStep, Step, TransferStep
from simulator.lowering.writing import StepWriter
from simulator.overlap.combined import DELAY_WGRAD
from simulator.passes.steps import EXCHANGED_OVER
from simulator.program.cost_model import Cost
from simulator.program.program import COMPUTE, CodeWriter, Instruction, RecordEvent
from simulator.runtimes.model_operators import ModelOperators
from simulator.runtimes.parts import RecomputeSpec
from simulator.step.context import CostContext
from simulator.step.host import again_host_s, unit_host_s
from simulator.step.offload import update_bytes_per_s
from simulator.step.rank import Pass, Rank, Value
from simulator.step.units import Unit
from simulator.step.update import update_rate

MARK = "pass "  # prefix of the name of the event at the end of a unit's pass


class CodeOfUnits:
    """The steps of every pass of a plan's units at the requested detail, and the sizes of its groups. Blocks run at the
    clocks of `context`, copies and updates at those of `sustained`, which long products sustain.
    """

    def __init__(
        self, operators: ModelOperators, steps: StepWriter, context: CostContext, sustained: CostContext, detail: Detail
    ) -> None:
        self.operators, self.steps, self.context, self.detail = operators, steps, context, detail
        self.sustained = sustained
        self._blocks: dict[tuple[str, str], BlockCode] = {}
        self._merged: dict[tuple[str, Pass], list[Step]] = {}
        self._parts: dict[tuple[str, Pass], Parts] = {}
        self._ranks: dict[str, int] = {}

    def block_of(self, unit: Unit) -> BlockCode:
        """Return the code of a unit's passes."""
        word = str(unit.words[0]) if unit.wrapped else ""
        if (unit.code, word) not in self._blocks:
            context, modes = self.context, self.operators.modes(unit.code)
            forward_s, backward_s = unit_host_s(context, unit)
            self._blocks[unit.code, word] = block_code(
                f"{unit.code} {word}".strip(),
                self.operators.blocks[unit.code],
                context.in_layers if unit.is_layer else context,
                replace(modes[word], layers=1.0) if word else RecomputeSpec(),
                host_s=(_number(forward_s), _number(backward_s)),
                again_s=_number(again_host_s(context.spec, context.table, sparse=unit.sparse)),
            )
        return self._blocks[unit.code, word]

    def parts(self, unit: Unit, which: Pass) -> Parts:
        """Return a pass of a unit, divided at its exchanges of tokens."""
        block = self.block_of(unit)
        key = (block.name, which)
        if key not in self._parts:
            steps = block.forward if which is Pass.FORWARD else block.backward
            later = which is Pass.BACKWARD and str(self.context.table.ep_overlap[0]) == DELAY_WGRAD
            self._parts[key] = parts_of(steps, f"{block.name} {which}", self.detail, weights_later=later)
        return self._parts[key]

    def passed(self, unit: Unit, which: Pass) -> list[Step]:
        """Return the steps of a pass of a unit."""
        block = self.block_of(unit)
        key = (block.name, which)
        if key not in self._merged:
            steps = block.forward if which is Pass.FORWARD else block.backward
            if which in {Pass.INPUT, Pass.WEIGHT}:
                of_weight = which is Pass.WEIGHT
                steps = tuple(s for s in steps if (isinstance(s, KernelStep) and s.weight) is of_weight)
            self._merged[key] = merged(steps, f"{block.name} {which}", self.detail)
        return self._merged[key]

    def ranks_in(self, family: str) -> int:
        """Return the number of ranks in a group of a family."""
        if family not in self._ranks:
            axis = "pipeline" if family == "pp" else family
            self._ranks[family] = round(_number(self.context.groups.extent(axis)[0]))
        return self._ranks[family]


@dataclass(slots=True)
class IssuedPass:
    """One pass of a pair: its units, each with the instructions issued before it, and the instructions after
    the last.
    """

    runs: list[tuple[list[Instruction], Unit, Pass]]
    rest: list[Instruction]

    @property
    def in_layer(self) -> bool:
        """Whether the next unit is a layer."""
        return bool(self.runs) and self.runs[0][1].is_layer


@dataclass(slots=True)
class CodeRank(Rank):
    """Writes the code of one rank."""

    code: CodeWriter
    units: CodeOfUnits
    marks: bool = False  # record an event at the end of every pass of a unit
    _passes: int = 0
    _remaining: dict[tuple[str, str], float] = field(default_factory=dict)  # shares of collectives not yet issued
    _paired: bool = False
    _start: int = 0
    _runs: list[tuple[int, Unit, Pass]] = field(default_factory=list)  # of one pass of a pair, and where they belong
    _backward: IssuedPass | None = None

    def begin_pair(self) -> None:
        self._paired, self._start = True, self.code.length

    def next_of_pair(self) -> None:
        self._backward = self._issued_pass()

    def end_pair(self) -> None:
        forward, backward = self._issued_pass(), self._backward
        self._paired, self._backward = False, None
        if backward is not None:
            self._interleave(forward, backward)

    def host_work(self, name: str, seconds: Value) -> None:
        self.code.host_work(name, _number(seconds))

    def run(self, unit: Unit, which: Pass) -> None:
        if self._paired:
            self._runs.append((self.code.length, unit, which))
        else:
            self._write(unit, which)

    def _write(self, unit: Unit, which: Pass) -> None:
        self.units.steps.write(self.code, self.units.passed(unit, which))
        self._mark()

    def _mark(self) -> None:
        if self.marks:
            self.code.add(RecordEvent(event=f"{MARK}{self._passes}", stream=COMPUTE))
            self._passes += 1

    def _issued_pass(self) -> IssuedPass:
        """Remove the instructions of one pass of a pair from the code and return them."""
        start, runs = self._start, self._runs
        written = self.code.cut(start)
        edges = [0, *(at - start for at, _, _ in runs), len(written)]
        issued = [written[one:other] for one, other in pairwise(edges)]
        self._runs = []
        return IssuedPass(
            [(before, unit, which) for before, (_, unit, which) in zip(issued, runs, strict=False)], issued[-1]
        )

    def _interleave(self, forward: IssuedPass, backward: IssuedPass) -> None:
        """Write both passes: their layers in turns; the head and the embedding separately."""
        code, pair = self.code, PairWriter(self.code, self.units.steps)
        for issued in (backward, forward):
            while issued.runs and not issued.in_layer:
                self._alone(issued)
        while forward.in_layer or backward.in_layer:
            parts = {}
            for issued in (backward, forward):
                parts[id(issued)] = NOTHING
                if issued.in_layer:
                    before, unit, which = issued.runs.pop(0)
                    code.extend(before)
                    parts[id(issued)] = self.units.parts(unit, which)
            pair.layer(parts[id(forward)], parts[id(backward)])
            for written in parts.values():
                if written is not NOTHING:
                    self._mark()
        pair.end()
        for issued in (forward, backward):
            while issued.runs:
                self._alone(issued)
            code.extend(issued.rest)

    def _alone(self, issued: IssuedPass) -> None:
        before, unit, which = issued.runs.pop(0)
        self.code.extend(before)
        self._write(unit, which)

    def copy(self, name: str, moved_bytes: Value, *, packing: Packing | None = None, stream: str = COMPUTE) -> None:
        moved, roofline = _number(moved_bytes), self.units.sustained.roofline
        rate = roofline.memory_bytes_per_s if packing is None else _number(roofline.packing_bytes_per_s(packing))
        if stream == COMPUTE:
            cost = Cost(seconds=moved / rate, sms=0.0, hbm_bytes_per_s=rate)
            self._launch(KernelStep(key=(name, (round(moved),), "copy"), cost=cost, host_s=0.0))
        elif size := round(moved):
            self.units.steps.copy(self.code, name.split(" ", maxsplit=1)[0], size, size / rate, stream=stream)

    def update(self, moved_bytes: Value, elements: Value) -> None:
        context = self.units.context
        seconds = _number(moved_bytes) / update_rate(context.runtime, context.roofline)
        key = ("optimizer", (round(_number(elements)),), "float32")
        self._launch(KernelStep(key=key, cost=Cost(seconds=seconds), host_s=0.0))

    def orthogonalise(self, seconds: Value, elements: Value) -> None:
        key = ("optimizer", (round(_number(elements)),), "bfloat16")
        self._launch(KernelStep(key=key, cost=Cost(seconds=_number(seconds)), host_s=0.0))

    def host_copy(self, name: str, nbytes: Value, *, stream: str) -> None:
        size = round(_number(nbytes))
        if size:
            self.code.copy(size, name.split(" ", maxsplit=1)[0], stream=stream)

    def on_host(self, name: str, moved_bytes: Value, *, after: str) -> None:
        self.code.synchronize(after)
        if np.any(moved_bytes):
            self.code.host_work(name, _number(moved_bytes) / float(update_bytes_per_s(self.units.context)[0]))

    def collective(self, op: str, family: str, nbytes: Value, *, stream: str, times: Value = 1.0) -> None:
        size = _number(nbytes)
        if self.units.ranks_in(family) > 1 and size > 0:
            # A bucket that several units fill is sent by the last of them.
            remaining = self._remaining.get((op, family), 0.0) + _number(times)
            count = math.floor(remaining + 0.5)
            self._remaining[op, family] = remaining - count
            for _ in range(count):
                self.code.collective(op, family, max(1, round(size)), stream=stream)

    def blocking(self, op: str, family: str, nbytes: float, *, stream: str) -> None:
        if self.units.ranks_in(family) > 1:
            self.code.after(stream, COMPUTE)
            self.collective(op, family, nbytes, stream=stream)
            self.code.after(COMPUTE, stream)

    def after(self, stream: str, other: str) -> None:
        self.code.after(stream, other)

    def record(self, stream: str) -> str:
        return self.code.record(stream)

    def wait(self, stream: str, event: str) -> None:
        self.code.wait(stream, event)

    def synchronize(self) -> None:
        self.code.synchronize(COMPUTE)

    def _launch(self, step: KernelStep) -> None:
        self.units.steps.launch(self.code, step)


def _number(value: Value) -> float:
    return float(np.asarray(value, dtype=np.float64).flat[0])


# Code of a forward and a backward pass that run side by side, layer by layer; see `simulator.overlap.combined`.


WIRE = "ep comm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A pass of a layer, divided at its exchanges of tokens: before, between and after them. `weights` are the weight
    gradients that may be delayed. An exchange is one transfer or several in a row (tokens and their weights). A pass
    without exchanges has only the first part.
    """

    steps: tuple[list[Step], ...]
    weights: tuple[list[Step], ...]
    exchanges: tuple[list[TransferStep], ...]


def parts_of(steps: Sequence[Step], name: str, detail: Detail, *, weights_later: bool) -> Parts:
    """Return the parts of a pass, merged to the level of `detail`."""
    exchanges: list[list[TransferStep]] = []
    cut: list[list[Step]] = [[]]
    for step in steps:
        if not (isinstance(step, TransferStep) and step.group in EXCHANGED_OVER and step.op == "all_to_all"):
            cut[-1].append(step)
        elif exchanges and not cut[-1]:
            exchanges[-1].append(step)
        else:
            exchanges.append([step])
            cut.append([])
    if len(exchanges) != 2:
        exchanges, cut = [], [list(steps), [], []]
    later = [[s for s in part if weights_later and isinstance(s, KernelStep) and s.weight] for part in cut]
    now = [[s for s in part if not any(s is w for w in deferred)] for part, deferred in zip(cut, later, strict=True)]
    return Parts(
        steps=tuple(merged(part, f"{name} {number}", detail) for number, part in enumerate(now)),
        weights=tuple(merged(part, f"{name} weights {number}", detail) for number, part in enumerate(later)),
        exchanges=tuple(exchanges),
    )


NOTHING = Parts(steps=([], [], []), weights=([], [], []), exchanges=())


@dataclass(slots=True)
class PairWriter:
    """Writes layers of two passes in turns. Each pass waits only for its own exchanges."""

    code: CodeWriter
    steps: StepWriter
    _owed: list[Step] = field(default_factory=list)  # weight gradients of the layer before
    _rest: list[Step] = field(default_factory=list)  # steps of the forward layer before that follow its second exchange
    _tokens: str = ""  # the event at the end of that exchange

    def layer(self, forward: Parts, backward: Parts) -> None:
        """Write a layer of each pass; `NOTHING` stands for a missing one."""
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
        """Write the remaining steps of the last layers."""
        self.steps.write(self.code, self._owed)
        self._owed = []
        self._finish()

    def _finish(self) -> None:
        self._wait(self._tokens)
        self.steps.write(self.code, self._rest)
        self._tokens, self._rest = "", []

    def _exchange(self, parts: Parts, number: int, after: str = "") -> str:
        """Begin an exchange after an event, by default after all compute so far; return the event of its end."""
        if not parts.exchanges:
            return ""
        self.code.wait(WIRE, after or self.code.record(COMPUTE))
        for step in parts.exchanges[number]:
            self.code.collective(step.op, step.group, step.nbytes, stream=WIRE)
        return self.code.record(WIRE)

    def _wait(self, event: str) -> None:
        if event:
            self.code.wait(COMPUTE, event)
