"""A serving plan's latencies, throughput and memory, each with the range it is expected in."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from simulator.config.estimate import Interval
from simulator.config.model import Model
from simulator.legality.rule import divisors
from simulator.serving.crowd import latency_of
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of
from simulator.serving.kv_cache import CacheCapacity, cache_capacity
from simulator.serving.latency import Latency, latency
from simulator.serving.server import serve
from simulator.serving.traffic import Traffic, with_clients
from topology.cluster import Cluster, Source

# Batches that the engines of a pool work on: from how many on a part is simulated, and how many it has at least.
MANY, BATCHES = 128, 16


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
    parts = equal_parts(deployment, traffic)
    part, sent = one_part(deployment, traffic, parts)

    def simulated(clients: int) -> Latency:
        asked = with_clients(sent, clients) if clients != sent.concurrency else sent
        return latency(serve(model, cluster, part, asked, until_s=until_s), ttft_s=ttft_s, tpot_s=tpot_s)

    engine = engine_of(deployment.engine)
    seen = latency_of(0 if traffic.trace else sent.concurrency, simulated)
    seen = replace(
        seen,
        output_tokens_per_s=parts * seen.output_tokens_per_s,
        requests_per_s=parts * seen.requests_per_s,
        preempted=parts * seen.preempted,
    )
    source = Source.DATASHEET if deployment.measured is None else Source.FITTED
    return ServingEstimate(
        ttft_s=_interval(seen.ttft_s.mean, engine.spread_ttft, source),
        tpot_s=_interval(seen.tpot_s.mean, engine.spread_tpot, source),
        e2e_s=_interval(seen.e2e_s.mean, engine.spread_tpot, source),
        output_tokens_per_s_per_gpu=_interval(
            seen.output_tokens_per_s / deployment.gpus, engine.spread_throughput, source
        ),
        latency=seen,
        room=cache_capacity(model, cluster, deployment, deployment.pool, length=traffic.usual),
    )


def equal_parts(deployment: Deployment, traffic: Traffic) -> int:
    """Return in how many parts a large deployment is divided that serve as many clients each: one tells of all.

    What a client sees depends on the engine that it meets and on how evenly engines are loaded, which `BATCHES` show
    within 2 % of what hundreds do. So few are only simulated in the place of `MANY`.
    """
    pools = [deployment.pool, *([] if deployment.prefill is None else [deployment.prefill])]
    batches = min(pool.engines * pool.pp for pool in pools)
    if traffic.trace or not traffic.concurrency or batches < MANY:
        return 1
    common = math.gcd(traffic.concurrency, *(pool.engines for pool in pools))
    return max(parts for parts in divisors(common) if parts == 1 or parts <= batches // BATCHES)


def one_part(deployment: Deployment, traffic: Traffic, parts: int) -> tuple[Deployment, Traffic]:
    """Return one of `parts` equal parts of a deployment, and what its clients send."""
    if parts == 1:
        return deployment, traffic
    fewer = replace(traffic, concurrency=traffic.concurrency // parts, requests=traffic.requests // parts)
    prefill = None if deployment.prefill is None else _fewer(deployment.prefill, parts)
    return replace(deployment, pool=_fewer(deployment.pool, parts), prefill=prefill), fewer


def _fewer(pool: Pool, parts: int) -> Pool:
    return replace(pool, engines=pool.engines // parts)


def _interval(value: float, spread: float, source: Source) -> Interval:
    return Interval(value=value, low=value / (1 + spread), high=value * (1 + spread), source=source)
