"""What is asked of a serving plan: the model, the machine, the requests, and what counts."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.config.model import Model
from simulator.serving.traffic import Traffic
from topology.cluster import Cluster

OBJECTIVES = ("latency", "throughput", "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingQuestion:
    """One question. Targets in seconds, 0 where there is none; `gpu_price_per_hour` in any currency, 0 if not told.

    `objective` is one of OBJECTIVES: the mean time to a whole answer, output tokens a second and GPU, or the price of
    a million output tokens.
    """

    model: Model
    cluster: Cluster
    traffic: Traffic
    engine: str = "vllm"
    weights: str = "bfloat16"
    kv_cache: str = "bfloat16"
    objective: str = "throughput"
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    gpu_price_per_hour: float = 0.0
    separate: bool = False
    assumed: tuple[str, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(request.prompt + request.output for request in self.traffic.draw())
