"""The environment that a plan's prediction assumes: variables that every launcher sets, each with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.config.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One environment variable of every rank."""

    name: str
    value: str
    reason: str


# Source: torchtitan's run_train.sh sets it. With fixed segments a third of a full GPU's memory can be fragmented.
SEGMENTS = Variable(
    name="PYTORCH_ALLOC_CONF",
    value="expandable_segments:True",
    reason="memory is predicted for torch's growing segments, which are hardly fragmented",
)
# Keys are sent while attention runs: at the same priority a transfer waits for attention's last wave of blocks.
PRIORITY = Variable(
    name="TORCH_NCCL_HIGH_PRIORITY",
    value="1",
    reason="context parallelism is predicted with NCCL's kernels ahead of attention's",
)


def assumed_environment(plan: Plan) -> tuple[Variable, ...]:
    """Return the variables with which step time and memory of `plan` are predicted."""
    return (SEGMENTS, PRIORITY) if plan.cp > 1 else (SEGMENTS,)
