"""The interface of a pipeline rank to the walk through a step; its methods are called in the order in which its host
issues work.

Amounts have shape (plans,) for all plans walked at once. `simulator.lowering` writes instructions for one plan,
`simulator.analytical.rank_timeline` counts clocks and bytes for many.
"""

from __future__ import annotations

from enum import StrEnum

from simulator.columns.plan_table import Floats
from simulator.kernels.roofline import Packing
from simulator.pipeline.schedules.table import Kind
from simulator.program.program import COMPUTE
from simulator.step.units import Unit

Value = Floats | float


class Pass(StrEnum):
    """Which pass of a block runs: forward, whole backward, or one of its halves (gradients of inputs, of weights)."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input"
    WEIGHT = "weight"


# What the actions of a schedule run.
RUNS = {
    Kind.FORWARD: Pass.FORWARD,
    Kind.BACKWARD: Pass.BACKWARD,
    Kind.INPUT_GRAD: Pass.INPUT,
    Kind.WEIGHT_GRAD: Pass.WEIGHT,
}


class Rank:
    """Work runs on the compute stream unless another is named; streams run their work in order. Kinds of ranks leave
    out what they do nothing for.
    """

    def begin(self, unit: Unit) -> None:
        """Begin a pass of a unit, before anything of it is issued."""

    def ended(self, unit: Unit) -> None:
        """End the pass of a unit; the other units that it stands for (`Unit.repeats`) do the same."""

    def begin_pair(self) -> None:
        """Begin a backward and a forward pass that run at the same time, layer by layer."""

    def next_of_pair(self) -> None:
        """End the backward pass of the pair; the forward pass follows."""

    def end_pair(self) -> None:
        """End with both."""

    def host_work(self, name: str, seconds: Value) -> None:
        """Keep the host busy for `seconds`."""

    def run(self, unit: Unit, which: Pass) -> None:
        """Run a pass of a unit's block: its kernels and its own collectives."""

    def copy(self, name: str, moved_bytes: Value, *, packing: Packing | None = None, stream: str = COMPUTE) -> None:
        """Move bytes within the GPU, as one of FSDP's copies if `packing` says how."""

    def update(self, moved_bytes: Value, elements: Value) -> None:
        """Clip and update the `elements` of parameters that a rank owns."""

    def orthogonalise(self, seconds: Value, elements: Value) -> None:
        """Orthogonalise, on the compute stream, the momentum of matrices with `elements` on the rank."""

    def host_copy(self, name: str, nbytes: Value, *, stream: str) -> None:
        """Copy bytes between host and GPU on a stream."""

    def on_host(self, name: str, moved_bytes: Value, *, after: str) -> None:
        """Let the host wait for a stream, then read and write bytes of its own memory."""

    def collective(self, op: str, family: str, nbytes: Value, *, stream: str, times: Value = 1.0) -> None:
        """Run a collective on a stream, `times` in a row; nothing in groups of one rank."""

    def blocking(self, op: str, family: str, nbytes: float, *, stream: str) -> None:
        """Run a collective on a stream, after the compute so far and before the compute that follows."""

    def after(self, stream: str, other: str) -> None:
        """Let a stream wait for all work issued to another so far."""

    def record(self, stream: str) -> str:
        """Mark a point of a stream; return the event's name."""
        raise NotImplementedError

    def wait(self, stream: str, event: str) -> None:
        """Let a stream wait for an event."""

    def synchronize(self) -> None:
        """Let the host wait for the compute stream."""
