"""Serving answers as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from planner.io.output import SCHEMA_VERSION
from planner.serving.answer import Account, ServingAnswer
from planner.serving.crossings import Row, Sweep
from planner.serving.explain import ServingComparison, ServingExplanation
from planner.serving.plan_file import TASK
from planner.serving.question.question import ServingQuestion
from planner.serving.search import ServingPlan, ServingResult
from planner.serving.targets.ways import WayOut
from simulator.config.estimate import Interval
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.estimate import ServingEstimate
from simulator.serving.latency import Distribution
from topology import codec
from topology.codec import JsonObject


def serving_document(result: ServingResult, load: Sequence[Row], *, top: int) -> JsonObject:
    """Return the document of `suggest --task serve --json`."""
    question = result.question
    return {
        "schema_version": SCHEMA_VERSION,
        "task": TASK,
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
        "plans": [listed_document(rank, plan, question) for rank, plan in enumerate(result.plans[:top], 1)],
        "by_clients": [{"clients": round(row.value), **_shown(row)} for row in load],
        "rejected": dict(result.rejected),
    }


def estimate_document(name: str, found: ServingAnswer) -> JsonObject:
    """Return the document of `estimate --task serve --json`; `name` is the file's or an empty text."""
    estimate = None
    if found.estimate is not None and found.account is not None:
        estimate = _estimate(found.estimate, found.question) | {"breakdown_s": _account(found.account)}
    return {
        "schema_version": SCHEMA_VERSION,
        "task": TASK,
        "id": name,
        "legal": not found.problems,
        "problems": [{"grade": "illegal", "message": message} for message in found.problems],
        "assumed": list(found.assumed),
        "plan": plan_document(found.deployment),
        "meets_targets": found.meets,
        "estimate": estimate,
    }


def explanation_document(name: str, found: ServingExplanation) -> JsonObject:
    """Return the document of `explain --task serve --json`."""
    question = found.answer.question
    return estimate_document(name, found.answer) | {
        "break_even": [codec.to_builtins(one) for one in found.break_even],
        "runners_up": [listed_document(rank, plan, question) for rank, plan in enumerate(found.runners_up, 2)],
        "sweeps": [_sweep(sweep) for sweep in found.sweeps],
        "rejected": dict(found.result.rejected),
    }


def comparison_document(found: ServingComparison, files: Sequence[str]) -> JsonObject:
    """Return the document of `compare` of two serving plans."""
    first, second = (
        {"file": file, **estimate_document(file, answer)} for file, answer in zip(files, found.answers, strict=True)
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "task": TASK,
        "first": first,
        "second": second,
        "token_s": found.token_s,
        "first_token_s": found.first_token_s,
        "terms": [{**codec.to_builtins(term), "delta": term.delta} for term in found.terms],
        "settings": list(found.settings),
        "question": list(found.question),
    }


def listed_document(rank: int, plan: ServingPlan, question: ServingQuestion) -> JsonObject:
    """Return a deployment of a search with the keys of a listed plan."""
    return {
        "rank": rank,
        "plan": plan_document(plan.deployment),
        "estimate": _estimate(plan.estimate, question),
        "meets_targets": plan.meets,
        "tied": plan.tied,
        "lost_because": plan.lost_because or None,
    }


def _estimate(estimate: ServingEstimate, question: ServingQuestion) -> JsonObject:
    seen = estimate.latency
    return {
        "ttft_s": interval(estimate.ttft_s) | _percentiles(seen.ttft_s),
        "tpot_s": interval(estimate.tpot_s) | _percentiles(seen.tpot_s),
        "e2e_s": interval(estimate.e2e_s) | _percentiles(seen.e2e_s),
        "output_tokens_per_s_per_gpu": interval(estimate.output_tokens_per_s_per_gpu),
        "output_tokens_per_s": seen.output_tokens_per_s,
        "requests_per_s": seen.requests_per_s,
        "price_per_million_tokens": price_per_million(question, estimate),
        "keeps_up": seen.keeps_up,
        "goodput": seen.goodput,
        "kv_blocks": estimate.room.blocks,
        "kv_tokens": estimate.room.tokens,
        "preempted": seen.preempted,
        "memory": {
            "capacity_bytes": estimate.room.capacity_bytes,
            "fits": estimate.room.fits,
            "by_category": estimate.room.by_category,
        },
    }


def _account(account: Account) -> JsonObject:
    return {
        "sequences": account.sequences,
        "context_tokens": account.context,
        "token": account.token_s,
        "first_token": account.first_s,
        "reading": account.reading_s,
    }


def _shown(row: Row | ServingPlan) -> JsonObject:
    return {
        "plan": plan_document(row.deployment),
        "ttft_s": interval(row.estimate.ttft_s),
        "tpot_s": interval(row.estimate.tpot_s),
        "output_tokens_per_s_per_gpu": interval(row.estimate.output_tokens_per_s_per_gpu),
    }


def way_out_document(out: WayOut) -> JsonObject:
    """Return what the targets allow: the most load within them and, if they do not hold, changes that meet them."""
    most = None
    if out.most is not None:
        quantity = "clients" if out.most.question.traffic.concurrency else "requests_per_s"
        most = {quantity: out.most.load, "more_not_tried": out.most.more, "flag": out.most.flag}
        most |= _shown(out.most.plan)
    return {
        "most_load": most,
        "ways": [way.flags for way in out.ways],
        "way_estimates": [{"flags": way.flags, **_shown(way.plan)} for way in out.ways],
    }


def _sweep(sweep: Sweep) -> JsonObject:
    return {
        "quantity": sweep.quantity,
        "unit": sweep.unit,
        "now": sweep.now,
        "rows": [{"value": row.value, **_shown(row)} for row in sweep.rows],
        "crossings": [
            {"at": one.at, "below": plan_document(one.below), "above": plan_document(one.above)}
            for one in sweep.crossings
        ],
    }


def price_per_million(question: ServingQuestion, estimate: ServingEstimate) -> float | None:
    """Return the price of a million output tokens, or None without a price of a GPU."""
    if not question.gpu_price_per_hour:
        return None
    return question.gpu_price_per_hour / 3600 / estimate.output_tokens_per_s_per_gpu.value * 1e6


def plan_document(deployment: Deployment) -> JsonObject:
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
        **({"two_batch_overlap": True} if deployment.two_batches else {}),
        **({"receive_every": deployment.receive_every} if deployment.receive_every > 1 else {}),
        **({"speculation": codec.to_builtins(deployment.speculation)} if deployment.speculation else {}),
    }


def _degrees(pool: Pool) -> dict[str, int]:
    twice = {"redundant_experts": pool.redundant_experts} if pool.redundant_experts else {}
    return {"tp": pool.tp, "pp": pool.pp, "ep": pool.ep, "dp_attention": pool.dp_attention, **twice}


def _pool(pool: Pool) -> dict[str, int]:
    return {"engines": pool.engines, **_degrees(pool)}


def interval(value: Interval) -> JsonObject:
    return {"value": value.value, "low": value.low, "high": value.high, "source": value.source.value}


def _percentiles(seen: Distribution) -> JsonObject:
    return {"p50": seen.p50, "p95": seen.p95, "p99": seen.p99}
