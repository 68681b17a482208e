"""Flags given with a saved serving plan override the file, and every change is listed."""

from __future__ import annotations

from dataclasses import replace

from planner.serving.explain import differences
from planner.serving.plan_file import ServingFile
from planner.serving.question.from_flags import (
    ServingFlags,
    arrival_shape,
    measured_serving,
    refuse_unknown_to,
    settings_of,
)
from planner.serving.question.question import ServingQuestion
from planner.serving.question.releases import split_engine
from planner.serving.stated import read_pool, require_pool
from simulator.serving.deployment import Deployment, made_even
from simulator.serving.traffic import Lengths, Traffic, steady_requests, with_clients
from topology.errors import UserError

_MADE_FOR = ("model", "cluster", "gpu", "gpus", "requests")


def with_serving_flags(
    content: ServingFile, flags: ServingFlags
) -> tuple[ServingQuestion, Deployment, tuple[str, ...]]:
    """Return the question and the deployment of a file changed by `flags`, and the changes.

    Raises UserError for flags that a saved plan does not allow: its model, its machine, its file of requests.
    """
    stated = [name for name in _MADE_FOR if getattr(flags, name) is not None]
    if stated:
        names = ", ".join("--" + name for name in stated)
        raise UserError(
            f"{names} cannot be combined with a saved plan",
            why="the plan was made for the model, the machine and the requests that it holds",
            remedy="plan again with planner suggest --task serve",
        )
    engine, release = content.question.engine, content.question.release
    if flags.engine is not None:
        engine, release = split_engine(flags.engine)
    notes: list[str] = []
    measured = measured_serving(flags, content.question.cluster, engine, notes)
    if flags.profile is None and engine == content.question.engine:
        measured = content.question.measured
    question = replace(
        content.question,
        measured=measured,
        traffic=_traffic(content.question.traffic, flags),
        engine=engine,
        release=release,
        **settings_of(flags, content.question.model),
    )
    refuse_unknown_to(question)
    before = content.deployment
    pool = replace(
        before.pool,
        engines=flags.replicas or before.pool.engines,
        tp=flags.tp or before.pool.tp,
        pp=flags.pp or before.pool.pp,
        ep=flags.ep or before.pool.ep,
        dp_attention=flags.dp_attention or before.pool.dp_attention,
    )
    require_pool(pool, "the plan with its flags")
    prefill = before.prefill if flags.prefill is None else read_pool(flags.prefill, "--prefill")
    if moe := question.model.moe:
        pool, prefill = made_even(pool, moe.experts), prefill and made_even(prefill, moe.experts)
    deployment = question.deployment(pool, prefill)
    changed = [*differences(content.question, question), *differences(before, deployment)]
    return question, deployment, tuple(dict.fromkeys([*changed, *notes]))


def _traffic(before: Traffic, flags: ServingFlags) -> Traffic:
    if before.trace and any((flags.isl, flags.osl, flags.vary, flags.concurrency, flags.request_rate)):
        raise UserError("the plan was made for a file of requests", remedy="plan again with planner suggest")
    if flags.concurrency is not None and flags.request_rate is not None:
        raise UserError("--concurrency and --request-rate exclude each other", remedy="give one of them")
    traffic = replace(
        before,
        prompt=_lengths(before.prompt, flags.isl, flags.vary),
        output=_lengths(before.output, flags.osl, flags.vary),
        shape=before.shape if flags.arrivals is None else arrival_shape(flags.arrivals),
        cached_prompt=before.cached_prompt if flags.cached_prompt is None else flags.cached_prompt,
    )
    if flags.concurrency is not None:
        return with_clients(replace(traffic, steady=True), flags.concurrency)
    if flags.request_rate is not None:
        rate = flags.request_rate
        return replace(traffic, concurrency=0, request_rate=rate, steady=True, requests=steady_requests(0))
    return traffic


def _lengths(before: Lengths, mean: int | None, vary: float | None) -> Lengths:
    low, high = (before.low, before.high) if vary is None else (1 - vary, 1 + vary)
    return Lengths(mean=mean or before.mean, low=low, high=high)
