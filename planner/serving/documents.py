"""A serving search as JSON: the keys that other programs read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.io.output import SCHEMA_VERSION
from planner.serving.crossings import LoadRow
from planner.serving.search import ServingPlan, ServingResult
from simulator.config.estimate import Interval
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.latency import Distribution


def serving_document(result: ServingResult, load: Sequence[LoadRow], *, top: int) -> dict[str, Any]:
    """Return the document of `suggest --task serve --json`."""
    question = result.question
    return {
        "schema_version": SCHEMA_VERSION,
        "task": "serve",
        "search": {
            "candidates": len(result.plans) + sum(result.rejected.values()),
            "legal": len(result.plans),
            "pruned": 0,
            "simulated": len(result.plans),
            "seconds": result.seconds,
            "status": "optimal within the model",
            "gap": 0.0,
        },
        "objective": question.objective,
        "assumed": list(question.assumed),
        "plans": [_plan(rank, plan) for rank, plan in enumerate(result.plans[:top], 1)],
        "by_clients": [
            {
                "clients": row.clients,
                "plan": plan_document(row.deployment),
                "ttft_s": interval(row.estimate.ttft_s),
                "tpot_s": interval(row.estimate.tpot_s),
                "output_tokens_per_s_per_gpu": interval(row.estimate.output_tokens_per_s_per_gpu),
            }
            for row in load
        ],
        "rejected": dict(result.rejected),
    }


def _plan(rank: int, plan: ServingPlan) -> dict[str, Any]:
    estimate = plan.estimate
    seen = estimate.latency
    return {
        "rank": rank,
        "plan": plan_document(plan.deployment),
        "estimate": {
            "ttft_s": interval(estimate.ttft_s) | _percentiles(seen.ttft_s),
            "tpot_s": interval(estimate.tpot_s) | _percentiles(seen.tpot_s),
            "e2e_s": interval(estimate.e2e_s) | _percentiles(seen.e2e_s),
            "output_tokens_per_s_per_gpu": interval(estimate.output_tokens_per_s_per_gpu),
            "output_tokens_per_s": seen.output_tokens_per_s,
            "requests_per_s": seen.requests_per_s,
            "goodput": seen.goodput,
            "kv_blocks": estimate.room.blocks,
            "kv_tokens": estimate.room.tokens,
            "preempted": seen.preempted,
            "memory": {"capacity_bytes": estimate.room.capacity_bytes, "by_category": estimate.room.by_category},
        },
        "meets_targets": plan.meets,
        "tied": plan.tied,
        "lost_because": plan.lost_because or None,
    }


def plan_document(deployment: Deployment) -> dict[str, Any]:
    """Return a deployment by the names of its parts."""
    pool = deployment.pool
    return {
        "engine": deployment.engine,
        "replicas": pool.engines,
        **_degrees(pool),
        "prefill": None if deployment.prefill is None else _pool(deployment.prefill),
        "decode": None if deployment.prefill is None else _pool(pool),
        "weights": deployment.weights,
        "kv_cache": deployment.kv_cache,
    }


def _degrees(pool: Pool) -> dict[str, int]:
    return {"tp": pool.tp, "pp": pool.pp, "ep": pool.ep, "dp_attention": pool.dp_attention}


def _pool(pool: Pool) -> dict[str, int]:
    return {"engines": pool.engines, **_degrees(pool)}


def interval(value: Interval) -> dict[str, Any]:
    return {"value": value.value, "low": value.low, "high": value.high, "source": value.source.value}


def _percentiles(seen: Distribution) -> dict[str, Any]:
    return {"p50": seen.p50, "p95": seen.p95, "p99": seen.p99}
