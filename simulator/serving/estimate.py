"""A serving plan's latencies, throughput and memory, with their ranges."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from simulator.config.estimate import Interval
from simulator.config.model import Model
from simulator.legality.rule import divisors
from simulator.serving.crowd import MOST, latency_of
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of
from simulator.serving.kv_cache import CacheCapacity, cache_capacity
from simulator.serving.latency import Latency, latency
from simulator.serving.server import Served, serve
from simulator.serving.steady import loop_latency, most_answered, steady_latency
from simulator.serving.traffic import Traffic, with_clients
from topology.cluster import Cluster, Source

# Batches in progress on the engines of a pool: with MANY or more only a part of the pool is simulated, which has at
# least BATCHES. With so many clients for each batch of a crowd one is enough: their queues are as long on all engines.
MANY, BATCHES, CROWDED = 128, 16, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEstimate:
    """Figures that clients of a deployment see. Intervals are of means over requests; `latency` has percentiles."""

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
    judged: bool = False,
    until_s: float = math.inf,
) -> ServingEstimate:
    """Simulate `traffic` on a deployment; a target of 0 is no target. If only whether targets hold is asked (`judged`),
    figures of a deployment that misses one may be too low.

    Raises Infeasible where nothing fits, OutOfTime at `until_s` of `time.monotonic`.
    """
    parts = equal_parts(deployment, traffic)
    part, sent = one_part(deployment, traffic, parts)

    def simulated(clients: int) -> Latency:
        asked = with_clients(sent, clients) if clients != sent.concurrency else sent
        served = serve(model, cluster, part, asked, begun=asked.steady, until_s=until_s)
        if asked.steady:
            return loop_latency(served, clients, ttft_s=ttft_s, tpot_s=tpot_s)
        return latency(served, ttft_s=ttft_s, tpot_s=tpot_s)

    def sent_on(count: int) -> Served:
        return serve(model, cluster, deployment, replace(traffic, requests=count), until_s=until_s)

    engine = engine_of(deployment.engine)
    if traffic.steady and traffic.request_rate:
        most = most_answered(model, cluster, deployment, traffic)
        seen = steady_latency(traffic, sent_on, most, ttft_s=ttft_s, tpot_s=tpot_s, judged=judged)
    else:
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
    """Return the number of equal parts into which a large deployment is divided, one of which is simulated.

    What a client sees depends on its engine and on how evenly engines are loaded; with `BATCHES` batches this is within
    2 % of the figures with hundreds. Parts are only used from `MANY` batches on.
    """
    pools = [deployment.pool, *([] if deployment.prefill is None else [deployment.prefill])]
    batches = min(pool.engines * pool.pp for pool in pools)
    crowd = traffic.concurrency >= max(MOST, CROWDED * sum(pool.engines * pool.pp for pool in pools))
    if traffic.trace or not traffic.concurrency or (batches < MANY and not crowd):
        return 1
    common = math.gcd(traffic.concurrency, *(pool.engines for pool in pools))
    most = batches if crowd else batches // BATCHES
    return max(parts for parts in divisors(common) if parts == 1 or parts <= most)


def one_part(deployment: Deployment, traffic: Traffic, parts: int) -> tuple[Deployment, Traffic]:
    """Return one of `parts` equal parts of a deployment, and its share of the traffic."""
    if parts == 1:
        return deployment, traffic
    fewer = replace(traffic, concurrency=traffic.concurrency // parts, requests=traffic.requests // parts)
    prefill = None if deployment.prefill is None else _fewer(deployment.prefill, parts)
    return replace(deployment, pool=_fewer(deployment.pool, parts), prefill=prefill), fewer


def _fewer(pool: Pool, parts: int) -> Pool:
    return replace(pool, engines=pool.engines // parts)


def _interval(value: float, spread: float, source: Source) -> Interval:
    return Interval(value=value, low=value / (1 + spread), high=value * (1 + spread), source=source)
