"""Samples of a serving engine: steps that were timed, sums over ranks, and what its host takes between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from topology.codec import JsonObject, to_json
from topology.profile.samples import Sample

PHASES = ("decode", "prefill", "all_reduce", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSample(Sample):
    """Seconds of a serving engine, in its slowest rank.

    `decode` is a step in which `batch` answers go on with `context` tokens cached each, `prefill` one that reads
    `batch` prompts of `context` tokens: `seconds` with the host waiting for each, `queued_s` with the host ahead of the
    device, `issued_s` what it took to issue. `all_reduce` is one sum over the ranks of `batch` tokens' hidden vectors
    with the residual and the norm that follow, replayed from a graph. `host` is what the device waits for the host
    between two steps of a load in which `batch` answers went on in the mean. Fields that a phase does not have are 0.
    `model` has the fields of the simulator's type as plain data; `all_reduce` names the kernel, `own` or `nccl`.
    """

    engine: str
    phase: str
    model: JsonObject
    tp: int = 1
    batch: float = 1.0
    context: int = 0
    all_reduce: str = ""
    seconds: float
    queued_s: float = 0.0
    issued_s: float = 0.0

    @property
    def times(self) -> dict[str, float]:
        return {"seconds": self.seconds}

    @property
    def key(self) -> tuple[Any, ...]:
        return self.engine, self.phase, to_json(self.model), self.tp, self.batch, self.context, self.all_reduce
