"""A question about serving: the model, the machine, the requests, the engine, and the objective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from simulator.config.model import Model
from simulator.serving.deployment import Deployment, EngineSettings, Pool
from simulator.serving.engine import OVERLAPS_BATCHES, RECEIVES, engine_of
from simulator.serving.traffic import Traffic
from topology.cluster import Cluster
from topology.rates.reach import require_plannable

OBJECTIVES = ("latency", "throughput", "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingQuestion(EngineSettings):
    """One question, for an engine as it is set. Targets in seconds, 0 where there is none; `gpu_price_per_hour` in any
    currency, 0 if not given.

    `objective` is one of OBJECTIVES: the mean time to a whole answer, output tokens a second and GPU, or the price of
    a million output tokens.
    """

    model: Model
    cluster: Cluster
    traffic: Traffic
    gpus: int = 0  # of the cluster, in the order of its nodes, to be used; 0: all
    release: str = ""  # release of the engine; empty: the one that is described
    objective: str = "throughput"
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    gpu_price_per_hour: float = 0.0
    separate: bool = False
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise BadCluster if rates of the GPUs are unknown, so that nothing can be predicted."""
        require_plannable(self.cluster)

    def of_engine(self, engine: str) -> Self:
        """Return the question for another engine, without settings that it lacks and without the profile of the
        previous engine.
        """
        known = engine_of(engine)
        return replace(
            self,
            engine=engine,
            release="",
            measured=None,
            eager=self.eager and known.may_be_eager,
            two_batches=self.two_batches and known.program in OVERLAPS_BATCHES,
            receive_every=self.receive_every if known.program in RECEIVES else 1,
        )

    @property
    def gpu_count(self) -> int:
        """GPUs to be used; the last node may have fewer than the others."""
        return self.gpus or self.cluster.gpu_count

    def most_engines(self, pool: Pool) -> int:
        """Return how many engines of a kind the GPUs hold. One engine's tensor parallel ranks are on one node or on
        whole nodes, and its stages on one node where they fit.
        """
        node = self.cluster.gpus_per_node
        whole, rest = divmod(self.gpu_count, node)
        together = pool.gpus if pool.gpus <= node else pool.ranks
        if together > node:
            held = 0 if together % node else whole // (together // node)
        else:
            held = whole * (node // together) + rest // together
        return held if together == pool.gpus else held // pool.pp

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return self.traffic.longest

    def stated(self, deployment: Deployment) -> Deployment:
        """Return a deployment of the question with the tokens of a step that its engine takes on these GPUs by default:
        a command has no other way to know them.
        """
        engine, memory = engine_of(deployment.engine), self.cluster.slowest_kind.memory_bytes
        return replace(
            deployment, max_num_batched_tokens=deployment.max_num_batched_tokens or engine.batched_tokens(memory)
        )

    def deployment(self, pool: Pool, prefill: Pool | None = None) -> Deployment:
        """Return a deployment under the question's engine, formats and limits."""
        return Deployment(pool=pool, prefill=prefill, **self.settings())
