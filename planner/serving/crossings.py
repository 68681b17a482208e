"""At which number of clients another deployment is the better one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from planner.serving.question import ServingQuestion
from planner.serving.search import ServingPlan, ServingResult, value_of
from simulator.serving.deployment import Deployment
from simulator.serving.estimate import ServingEstimate, estimate_serving
from topology.errors import Infeasible

# Deployments that are followed over the load: the best few at the load asked about, by each objective.
FOLLOWED = 3
MOST_CLIENTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """The best of the deployments followed, with so many clients in a closed loop."""

    clients: int
    deployment: Deployment
    estimate: ServingEstimate


def over_load(result: ServingResult) -> tuple[LoadRow, ...]:
    """Return the best deployment at numbers of clients from 1 on, four times as many in each row; none for open loops.

    Only the objective decides, not the targets. Deployments are those that were best for latency or for throughput at
    the load asked about, so a row is the best of few, not of all.
    """
    question = result.question
    if not question.traffic.concurrency or question.traffic.trace:
        return ()
    followed = _followed(result)
    rows = []
    clients = 1
    while clients <= min(MOST_CLIENTS, 16 * question.traffic.concurrency):
        best = _best_at(question, followed, clients)
        if best is not None:
            rows.append(best)
        clients *= 4
    return tuple(rows)


def _followed(result: ServingResult) -> list[Deployment]:
    found: list[Deployment] = []
    for objective in ("latency", "throughput"):
        question = replace(result.question, objective=objective)
        ranked = sorted(result.plans, key=partial(value_of, question))
        found += [plan.deployment for plan in ranked[:FOLLOWED]]
    found += [plan.deployment for plan in result.plans if _is_plain(plan)][:FOLLOWED]
    return list(dict.fromkeys(found))


def _is_plain(plan: ServingPlan) -> bool:
    """Whether engines have the fewest GPUs or use one kind of parallelism: what wins at the ends of the load."""
    pool = plan.deployment.pool
    return plan.deployment.prefill is None and pool.pp == 1 and (pool.tp == 1 or pool.engines == 1)


def _best_at(question: ServingQuestion, followed: list[Deployment], clients: int) -> LoadRow | None:
    traffic = replace(question.traffic, concurrency=clients, requests=max(100, 3 * clients))
    at = replace(question, traffic=traffic)
    best: LoadRow | None = None
    for deployment in followed:
        try:
            estimate = estimate_serving(question.model, question.cluster, deployment, traffic)
        except Infeasible:
            continue
        row = LoadRow(clients=clients, deployment=deployment, estimate=estimate)
        if best is None or _value(at, row) < _value(at, best):
            best = row
    return best


def _value(question: ServingQuestion, row: LoadRow) -> float:
    return value_of(question, ServingPlan(deployment=row.deployment, estimate=row.estimate, meets=True))
