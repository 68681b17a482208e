"""Tokens per second of a GPU against those of a user: every legal deployment under several engines and loads."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.serving.answer import estimate_of, meets
from planner.serving.candidates import deployments
from planner.serving.question.question import ServingQuestion
from planner.serving.search import ServingPlan, ways_to_fit
from simulator.config.estimate import Interval
from simulator.serving.deployment import Deployment
from simulator.serving.engine import COMPARED
from simulator.serving.server import OutOfTime
from simulator.serving.traffic import with_clients
from topology.cluster import Cluster, Source
from topology.errors import Infeasible, UserError

MOST_A_GPU, MOST_CLIENTS = 128, 1024  # clients up to which loads go, by powers of four
# (middle, low, high) of a GPU's power over its limit, by architecture: median and 80 % of the servers of the ML.ENERGY
# leaderboard (ml-energy/leaderboard, benchmark v3 of 2025-12: vLLM, models of 8 to 480 billion parameters, one to eight
# GPUs, 8 to 4,096 answers at once), 173 on H100 SXM and 227 on B200. These servers are always busy.
DRAWN = {"Hopper": (0.74, 0.60, 0.90), "Blackwell": (0.77, 0.53, 0.95)}


def token_energy_j(cluster: Cluster, deployment: Deployment, output_tokens_per_s: float) -> Interval | None:
    """Return the joules of all GPUs per output token; None for GPUs without published power, and without answers."""
    kind = cluster.slowest_kind
    drawn = DRAWN.get(kind.architecture.split()[0].capitalize())
    if drawn is None or not kind.power_w or not output_tokens_per_s:
        return None
    middle, low, high = (share * kind.power_w * deployment.gpus / output_tokens_per_s for share in drawn)
    return Interval(value=middle, low=low, high=high, source=Source.FITTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """One deployment under one engine and load.

    Rates are output tokens a second; `best`: Pareto-optimal in these two; `best_of_engine`: the same among its engine's
    points.
    """

    question: ServingQuestion
    plan: ServingPlan
    user_tokens_per_s: float
    gpu_tokens_per_s: float
    token_j: Interval | None
    best_of_engine: bool = False
    best: bool = False

    @property
    def clients(self) -> int:
        return self.question.traffic.concurrency

    @property
    def engine(self) -> str:
        return self.question.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto:
    """Points of all engines, those of the fastest users first. `whole`: all were simulated within the time."""

    question: ServingQuestion
    points: tuple[ParetoPoint, ...]
    rejected: Counter[str]
    seconds: float
    whole: bool

    @property
    def best(self) -> tuple[ParetoPoint, ...]:
        return tuple(point for point in self.points if point.best)


def pareto(
    question: ServingQuestion,
    engines: Sequence[str] = COMPARED,
    *,
    progress: Callable[[str], None] = lambda _: None,
    until_s: float = math.inf,
) -> Pareto:
    """Return all deployments of a closed loop under each engine, from one client on.

    Points not simulated by `until_s` of `time.monotonic` are left out. Raises UserError for requests that are no closed
    loop or whose answers have one token, Infeasible if nothing fits.
    """
    begin = time.monotonic()
    if question.traffic.trace or not question.traffic.concurrency:
        raise UserError(
            "rates of users are compared over clients of a closed loop",
            remedy="leave out --requests and --request-rate",
        )
    if question.traffic.output.longest <= 1:
        raise UserError("answers of one token have no rate of tokens for a user", remedy="--osl of two or more")
    points: list[ParetoPoint] = []
    rejected: Counter[str] = Counter()
    whole = True
    for engine in engines:
        asked = question if engine == question.engine else question.of_engine(engine)
        try:
            points.extend(_points(asked, rejected, progress, until_s))  # includes those made before the time ended
        except OutOfTime:
            whole = False
    if not points:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in rejected.most_common(5))
        raise Infeasible(
            f"{question.model.name} cannot be served on {question.gpu_count} GPUs"
            + ("" if whole else " within the time"),
            why=reasons,
            remedy=", or ".join(ways_to_fit(question)) if whole else "a longer --time-limit",
        )
    return Pareto(
        question=question,
        points=tuple(_marked(points)),
        rejected=rejected,
        seconds=time.monotonic() - begin,
        whole=whole,
    )


def loads(question: ServingQuestion) -> list[int]:
    """Return the numbers of clients to compare: powers of four, and the question's."""
    most = min(MOST_CLIENTS, MOST_A_GPU * question.gpu_count)
    powers = {4**power for power in range(6) if 4**power <= most}
    return sorted(powers | {question.traffic.concurrency})


def _points(
    question: ServingQuestion, rejected: Counter[str], progress: Callable[[str], None], until_s: float
) -> Iterator[ParetoPoint]:
    found, why = deployments(question)
    rejected.update(why)
    for clients in loads(question):
        asked = replace(question, traffic=with_clients(question.traffic, clients))
        for number, deployment in enumerate(found):
            progress(f"{question.engine}, {clients} clients: deployment {number + 1} of {len(found)}")
            try:
                estimate = estimate_of(asked, deployment, until_s=until_s)
            except OutOfTime:
                raise
            except Infeasible as problem:
                rejected[str(problem).splitlines()[0]] += 1
                continue
            yield ParetoPoint(
                question=asked,
                plan=ServingPlan(deployment=deployment, estimate=estimate, meets=meets(asked, estimate)),
                user_tokens_per_s=1 / estimate.tpot_s.value,
                gpu_tokens_per_s=estimate.output_tokens_per_s_per_gpu.value,
                token_j=token_energy_j(question.cluster, deployment, estimate.latency.output_tokens_per_s),
            )


def _marked(points: list[ParetoPoint]) -> list[ParetoPoint]:
    """Return points by users' rates, with the Pareto-optimal ones among all and of each engine marked."""
    ordered = sorted(points, key=lambda point: (-point.user_tokens_per_s, -point.gpu_tokens_per_s))
    most: dict[str, float] = {}
    marked = []
    for point in ordered:
        rate = point.gpu_tokens_per_s
        mine, all_ = rate > most.get(point.engine, 0.0), rate > max(most.values(), default=0.0)
        most[point.engine] = max(rate, most.get(point.engine, 0.0))
        marked.append(replace(point, best_of_engine=mine, best=all_))
    return marked
