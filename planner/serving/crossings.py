"""The number of clients, context length or link rate at which another deployment becomes the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt

from planner.serving.answer import estimate_of, meets
from planner.serving.question.question import ServingQuestion
from planner.serving.search import TIE, ServingPlan, ServingResult, value_of
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.estimate import ServingEstimate
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.server import OutOfTime
from simulator.serving.traffic import Lengths, with_clients
from topology.cluster import Cluster
from topology.errors import Infeasible

# Number of deployments that are followed: the best by each objective for the given question.
FOLLOWED = 3
MOST_CLIENTS = 1024
CLOSE = 1.15  # a crossing is found when its two sides are this close


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The best of the deployments followed at one value of a quantity."""

    value: float
    deployment: Deployment
    estimate: ServingEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The approximate value at which the best of the deployments changes from `below` to `above`."""

    at: float
    below: Deployment
    above: Deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One varied quantity: `quantity` and `unit` name it, `now` is the question's value."""

    quantity: str
    unit: str
    now: float
    rows: tuple[Row, ...]
    crossings: tuple[Crossing, ...]


def over_clients(result: ServingResult, *, cross: bool = False, until_s: float = math.inf) -> Sweep:
    """Follow the best deployments over clients in a closed loop, from 1 on; no rows for open loops.

    Only deployments that are best for latency or throughput in the question itself are followed, so a row is the best
    of few, not of all; those that meet the targets come first. `cross` looks for the crossings between rows too. Rows
    that are not simulated by `until_s` of `time.monotonic` are left out.
    """
    question = result.question
    asked = question.traffic.concurrency
    powers = [4**power for power in range(6) if asked and 4**power <= min(MOST_CLIENTS, 16 * asked)]
    values = [float(clients) for clients in sorted({*powers, *([asked] if asked else [])})]

    def at(clients: float) -> ServingQuestion:
        return replace(question, traffic=with_clients(question.traffic, round(clients)))

    values = [] if question.traffic.trace else values
    return _sweep(result, "clients", "clients", float(asked), values, at, cross=cross, until_s=until_s)


def over_context(result: ServingResult) -> Sweep:
    """Follow the best deployments over the length of prompts, from a quarter of the question's to 16 times."""
    question = result.question
    now = question.traffic.prompt

    def at(tokens: float) -> ServingQuestion:
        prompt = Lengths(mean=max(1, round(tokens)), low=now.low, high=now.high)
        return replace(question, traffic=replace(question.traffic, prompt=prompt))

    values = [now.mean * 4.0**power for power in range(-1, 3)]
    values = [] if question.traffic.trace else values
    return _sweep(result, "prompt", "tokens", float(now.mean), values, at, cross=True)


def over_links(result: ServingResult, name: str, now: float, scale: Callable[[Cluster, float], Cluster]) -> Sweep:
    """Follow the best deployments over the rate of one kind of link, in bytes/s; `scale` returns the cluster for a
    factor.
    """
    question = result.question

    def at(rate: float) -> ServingQuestion:
        return replace(question, cluster=scale(question.cluster, rate / now))

    return _sweep(result, name, "bytes/s", now, [now * 4.0**power for power in range(-3, 2)], at, cross=True)


def _sweep(
    result: ServingResult,
    quantity: str,
    unit: str,
    now: float,
    values: Sequence[float],
    ask: Callable[[float], ServingQuestion],
    *,
    cross: bool,
    until_s: float = math.inf,
) -> Sweep:
    followed = _followed(result)
    rows: list[Row] = []
    crossings: list[Crossing] = []
    for value in values:
        try:
            before = result.plans[0].deployment if value == now else rows[-1].deployment if rows else None
            row = _best_at(ask(value), followed, value, before, until_s)
        except OutOfTime:
            break
        if row is None:
            continue
        if cross and rows and row.deployment != rows[-1].deployment:
            crossings.append(_between(rows[-1], row, ask, followed))
        rows.append(row)
    return Sweep(quantity=quantity, unit=unit, now=now, rows=tuple(rows), crossings=tuple(crossings))


def _between(low: Row, high: Row, ask: Callable[[float], ServingQuestion], followed: list[Deployment]) -> Crossing:
    """Halve the interval in which the best changes until its ends are close."""
    while high.value / low.value > CLOSE:
        value = sqrt(low.value * high.value)
        row = _best_at(ask(value), followed, value, low.deployment)
        if row is None or row.deployment != low.deployment:
            high = replace(row or high, value=value)
        else:
            low = row
    return Crossing(at=sqrt(low.value * high.value), below=low.deployment, above=high.deployment)


def _followed(result: ServingResult) -> list[Deployment]:
    found = [result.plans[0].deployment]
    for objective in ("latency", "throughput"):
        question = replace(result.question, objective=objective)
        ranked = sorted(result.plans, key=partial(value_of, question))
        found += [plan.deployment for plan in ranked[:FOLLOWED]]
    found += [plan.deployment for plan in result.plans if _is_plain(plan)][:FOLLOWED]
    return list(dict.fromkeys(found))


def _is_plain(plan: ServingPlan) -> bool:
    """Whether engines have the fewest GPUs or use one kind of parallelism: such deployments win at the ends of the
    load.
    """
    pool = plan.deployment.pool
    return plan.deployment.prefill is None and pool.pp == 1 and (pool.tp == 1 or pool.engines == 1)


def _best_at(
    question: ServingQuestion,
    followed: list[Deployment],
    value: float,
    incumbent: Deployment | None,
    until_s: float = math.inf,
) -> Row | None:
    """Return the best at one value; an advantage smaller than a tie does not replace the previous best."""
    found: dict[Deployment, tuple[bool, float, Row]] = {}
    for deployment in followed:
        try:
            estimate = estimate_of(question, deployment, until_s=until_s)
        except OutOfTime:
            raise
        except Infeasible:
            continue
        plan = ServingPlan(deployment=deployment, estimate=estimate, meets=meets(question, estimate))
        row = Row(value=value, deployment=deployment, estimate=estimate)
        found[deployment] = (not plan.meets, value_of(question, plan), row)
    if not found:
        return None
    late, least, best = min(found.values(), key=lambda one: one[:2])
    if incumbent in found and found[incumbent][:2] <= (late, least * (1 + TIE)):
        return found[incumbent][2]
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Tensor parallelism of `tp` compared with `fewer` GPUs, for a token of a single answer, in seconds. `all_reduce_s`
    is the predicted time of an all-reduce, `limit_s` the time up to which `tp` is faster; negative if even free
    communication would not help.
    """

    tp: int
    fewer: int
    token_s: float
    fewer_token_s: float
    all_reduce_s: float
    limit_s: float

    @property
    def pays(self) -> bool:
        return self.token_s < self.fewer_token_s


def break_even(
    question: ServingQuestion, tp: int, fewer: int = 1, *, context: int = 0, all_reduce_s: float | None = None
) -> BreakEven:
    """Return when `tp` GPUs answer a single request faster than `fewer`. `all_reduce_s` is a measured time."""
    keys = float(context or question.traffic.prompt.mean + question.traffic.output.mean / 2)

    def costs(degree: int) -> ForwardPass:
        pool = Pool(tp=degree)
        return ForwardPass(question.model, question.cluster, question.deployment(pool), pool)

    def token_s(costs: ForwardPass) -> float:
        return costs.seconds(prompt_tokens=0, pairs=0.0, sequences=1, keys=keys)

    many, few = costs(tp), costs(fewer)
    reductions = many.reductions()
    found = BreakEven(
        tp=tp,
        fewer=fewer,
        token_s=token_s(many),
        fewer_token_s=token_s(few),
        all_reduce_s=many.reduced_s(1) / reductions,
        limit_s=0.0,
    )
    alone = found.token_s - found.all_reduce_s * reductions
    taken = found.all_reduce_s if all_reduce_s is None else all_reduce_s
    limit = (found.fewer_token_s - alone) / reductions
    return replace(found, token_s=alone + taken * reductions, all_reduce_s=taken, limit_s=limit)
