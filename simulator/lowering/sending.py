"""A pipeline rank that writes what it sends and nothing else, for counting bytes."""

from __future__ import annotations

from typing import Any

from simulator.lowering.code_rank import CodeOfUnits, CodeRank
from simulator.program.program import CodeWriter, Instruction, Launch
from simulator.step.rank import Pass, Value
from simulator.step.units import Unit


class SendingWriter(CodeWriter):
    """Keeps collectives, messages and copies; kernels, events and the host's work are not written."""

    def add(self, instruction: Instruction) -> None:
        if not isinstance(instruction, Launch):
            super().add(instruction)

    def recv(self, *_: object, **__: object) -> None:
        """Its other half is the sender's."""

    def host_work(self, name: str, duration_s: float) -> None:
        """Not sent."""

    def record(self, stream: str, event: str = "") -> str:  # noqa: ARG002 - nothing waits for it
        return event

    def wait(self, stream: str, event: str) -> None:
        """Not sent."""

    def after(self, stream: str, other: str) -> None:
        """Not sent."""


class SendingUnits(CodeOfUnits):
    """What every pass of a plan's units sends, written once for each kind of unit."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sent: dict[tuple[str, Pass], list[Instruction]] = {}

    def sent(self, unit: Unit, which: Pass) -> list[Instruction]:
        """Return what a pass of a unit sends."""
        key = (self.network.code_of(unit).name, which)
        if key not in self._sent:
            writer = SendingWriter()
            self.steps.write(writer, self.passed(unit, which))
            self._sent[key] = writer.cut(0)
        return self._sent[key]


class SendingRank(CodeRank):
    """Issues to a `SendingWriter` what a rank sends."""

    __slots__ = ()
    units: SendingUnits

    def run(self, unit: Unit, which: Pass) -> None:
        self.code.extend(self.units.sent(unit, which))

    def copy(self, name: str, moved_bytes: Value, *, module_bytes: Value | None = None) -> None:
        """Within the GPU."""

    def update(self, moved_bytes: Value, elements: Value) -> None:
        """Within the GPU."""

    def orthogonalise(self, seconds: Value, elements: Value) -> None:
        """Within the GPU."""
