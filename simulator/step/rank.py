"""What listens to the walk through a step: one pipeline rank, called in the order in which its host issues things.

Amounts are columns, one entry for each plan that is walked at once. `simulator.lowering` writes them down as
instructions for one plan, `simulator.analytical.rank_timeline` counts clocks and bytes of many.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from simulator.columns.plan_table import Floats
from simulator.step.units import Unit

Value = Floats | float


class Pass(StrEnum):
    """Which pass of a block runs: whole backward, or its gradients of inputs and of weights apart."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input"
    WEIGHT = "weight"


class Rank(Protocol):
    """Work runs on the compute stream unless another is named; streams run what they get in order."""

    def begin(self, unit: Unit) -> None:
        """Begin with all that there is to tell of a pass of a unit."""

    def ended(self, unit: Unit) -> None:
        """End with it: units that are like it do the same."""

    def begin_pair(self) -> None:
        """Begin with a backward and a forward pass that run at the same time, layer by layer."""

    def next_of_pair(self) -> None:
        """End the backward pass of the two; what follows is the forward pass."""

    def end_pair(self) -> None:
        """End with both."""

    def host_work(self, name: str, seconds: Value) -> None:
        """Keep the host busy."""

    def run(self, unit: Unit, which: Pass) -> None:
        """Run a pass of a unit's block: its kernels and its own collectives."""

    def copy(self, name: str, moved_bytes: Value, *, module_bytes: Value | None = None) -> None:
        """Move bytes within the GPU; with `module_bytes` into or out of the flat buffer of a module of that size."""

    def update(self, moved_bytes: Value, elements: Value) -> None:
        """Clip and update the `elements` of parameters that a rank owns."""

    def orthogonalise(self, seconds: Value, elements: Value) -> None:
        """Have the compute stream orthogonalise the momentum of matrices of so many `elements` on the rank."""

    def host_copy(self, name: str, nbytes: Value, *, stream: str) -> None:
        """Have a stream copy bytes between host and GPU."""

    def on_host(self, name: str, moved_bytes: Value, *, after: str) -> None:
        """Have the host wait for a stream, then read and write bytes of its own memory."""

    def collective(self, op: str, family: str, nbytes: Value, *, stream: str, times: Value = 1.0) -> None:
        """Have a stream carry out a collective, `times` in a row; nothing in groups of one."""

    def blocking(self, op: str, family: str, nbytes: float, *, stream: str) -> None:
        """Have a stream carry out a collective between what computes before it and what computes after."""

    def after(self, stream: str, other: str) -> None:
        """Let a stream wait for all that another has got so far."""

    def record(self, stream: str) -> str:
        """Mark a point of a stream; return the event's name."""

    def wait(self, stream: str, event: str) -> None:
        """Let a stream wait for an event."""

    def synchronize(self) -> None:
        """Let the host wait for the compute stream."""
