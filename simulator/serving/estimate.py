"""A serving plan's latencies, throughput and memory, each with the range it is expected in."""

from __future__ import annotations

import math
from dataclasses import dataclass

from simulator.config.estimate import Interval
from simulator.config.model import Model
from simulator.serving.deployment import Deployment
from simulator.serving.engine import engine_of
from simulator.serving.kv_cache import CacheCapacity, cache_capacity
from simulator.serving.latency import Latency, latency
from simulator.serving.server import serve
from simulator.serving.traffic import Traffic
from topology.cluster import Cluster, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEstimate:
    """What clients of a deployment see. Intervals are of means over requests; `latency` has percentiles."""

    ttft_s: Interval
    tpot_s: Interval
    e2e_s: Interval
    output_tokens_per_s_per_gpu: Interval
    latency: Latency
    room: CacheCapacity


def estimate_serving(
    model: Model,
    cluster: Cluster,
    deployment: Deployment,
    traffic: Traffic,
    *,
    ttft_s: float = 0.0,
    tpot_s: float = 0.0,
    until_s: float = math.inf,
) -> ServingEstimate:
    """Simulate `traffic` on a deployment; targets of 0 are none.

    Raises Infeasible where nothing fits, OutOfTime at `until_s` of `time.monotonic`.
    """
    served = serve(model, cluster, deployment, traffic, until_s=until_s)
    engine = engine_of(deployment.engine)
    seen = latency(served, ttft_s=ttft_s, tpot_s=tpot_s)
    source = Source.DATASHEET if deployment.measured is None else Source.FITTED
    return ServingEstimate(
        ttft_s=_interval(seen.ttft_s.mean, engine.spread_ttft, source),
        tpot_s=_interval(seen.tpot_s.mean, engine.spread_tpot, source),
        e2e_s=_interval(seen.e2e_s.mean, engine.spread_tpot, source),
        output_tokens_per_s_per_gpu=_interval(
            seen.output_tokens_per_s / deployment.gpus, engine.spread_throughput, source
        ),
        latency=seen,
        room=cache_capacity(model, cluster, deployment, deployment.pool),
    )


def _interval(value: float, spread: float, source: Source) -> Interval:
    return Interval(value=value, low=value / (1 + spread), high=value * (1 + spread), source=source)
