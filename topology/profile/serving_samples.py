"""Samples of a serving engine: timed steps, all-reduces over the ranks, and host time between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from topology.codec import JsonObject, to_json
from topology.profile.samples import Sample

PHASES = ("decode", "prefill", "all_reduce", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSample(Sample):
    """Seconds of a serving engine, in its slowest rank.

    `decode` is a step that generates one token for each of `batch` answers, with `context` tokens cached each,
    `prefill` one that reads `batch` prompts of `context` tokens. `seconds` is with the host waiting for each step,
    `queued_s` with the host ahead of the device, `issued_s` the host's time to issue a step. `all_reduce` is one sum
    over the ranks of `batch` tokens' hidden vectors with the residual and the norm that follow, replayed from a graph.
    `host` is the time for which the device waits for the host between two steps under load, with `batch` answers in
    progress on average. Fields that a phase does not have are 0. `model` has the fields of the simulator's type as
    plain data; `all_reduce` names the kernel, `own` or `nccl`.
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
