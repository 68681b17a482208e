"""The most load under which a deployment holds the targets of a question, and the fewest GPUs that serve a load so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from planner.serving.answer import estimate_of, meets
from planner.serving.question.from_flags import ServingFlags, serving_question
from planner.serving.question.question import ServingQuestion
from planner.serving.search import ServingPlan, search_serving
from simulator.serving.deployment import Deployment
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.server import OutOfTime
from simulator.serving.steady import most_answered
from simulator.serving.traffic import with_clients
from topology.errors import Infeasible, UserError

STEP = 1.03  # loads closer than this are not distinguished
MOST_TIMES, MOST_CLIENTS = 16, 1024  # largest load tried, as a multiple of the question's, and in clients
LEAST_PART = 64  # the smallest rate that is tried is the question's divided by this
MOST_NODES = 8  # nodes up to which are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class MostLoad:
    """`load` is the number of clients of a closed loop, or requests per second; `more`: larger loads were not tried."""

    question: ServingQuestion
    plan: ServingPlan
    load: float
    more: bool

    @property
    def flag(self) -> str:
        """The flag for this load."""
        return load_flag(self.question)


def load_flag(question: ServingQuestion) -> str:
    """Return the flag of a question's load."""
    traffic = question.traffic
    return f"--concurrency {traffic.concurrency}" if traffic.concurrency else f"--request-rate {traffic.request_rate:g}"


def asked_load(question: ServingQuestion) -> float:
    """Return the clients or the requests a second of a question."""
    return float(question.traffic.concurrency or question.traffic.request_rate)


def at_load(question: ServingQuestion, load: float) -> ServingQuestion:
    """Return the question with so many clients or, where it asks of a rate, requests a second of three digits."""
    traffic = question.traffic
    if traffic.concurrency:
        return replace(question, traffic=with_clients(traffic, max(1, math.floor(load))))
    return replace(question, traffic=replace(traffic, request_rate=float(f"{load:.3g}")))


def most_load(
    question: ServingQuestion,
    deployments: Iterable[Deployment],
    *,
    holds: ServingPlan | None = None,
    until_s: float = math.inf,
) -> MostLoad | None:
    """Return the most load under which one of the deployments holds the targets, and that deployment. `holds` is a plan
    that is known to hold them under the question's own load.

    None for a file of requests, a question without targets, and if even one client, or a 64th of the rate, is too much.
    Returns what is known at `until_s` of `time.monotonic`.
    """
    if question.traffic.trace or not (question.ttft_s or question.tpot_s):
        return None
    best = None
    if holds is not None:
        best = MostLoad(question=question, plan=holds, load=asked_load(question), more=False)
    for deployment in deployments:
        try:
            best = _more(question, deployment, best, until_s) or best
        except OutOfTime:
            break
    return best


def _more(question: ServingQuestion, deployment: Deployment, best: MostLoad | None, until_s: float) -> MostLoad | None:
    """Return the most load that a deployment holds if it exceeds the best of the others, or None."""
    if _never_holds(question, deployment):
        return None
    asked, whole = asked_load(question), bool(question.traffic.concurrency)
    begin = asked if best is None else max(best.load * STEP, best.load + whole)
    found = _holds(question, deployment, begin, until_s)
    if found is None:
        return None if best else _less(question, deployment, asked, until_s)
    most = _limit(question, deployment)
    while found.load * STEP < most:
        high = min(most, 2 * found.load)
        further = _holds(question, deployment, high, until_s)
        if further is None:
            return _between(found, high, until_s)
        found = further
    return replace(found, more=whole)


def _never_holds(question: ServingQuestion, deployment: Deployment) -> bool:
    """Return whether one answer alone, with its shortest prompt in the cache, already takes longer for a token than the
    target. No load makes steps shorter (tests/simulator/serving/test_monotone.py).
    """
    if not question.tpot_s:
        return False
    costs = ForwardPass(question.model, question.cluster, deployment, deployment.pool)
    keys = float(max(1, int(question.traffic.prompt.low * question.traffic.prompt.mean)))
    return costs.seconds(prompt_tokens=0, pairs=0.0, sequences=1, keys=keys) > question.tpot_s


def _less(question: ServingQuestion, deployment: Deployment, asked: float, until_s: float) -> MostLoad | None:
    """Return the most load below the question's, starting from one client or a part of the rate."""
    low = 1.0 if question.traffic.concurrency else asked / LEAST_PART
    found = _holds(question, deployment, low, until_s) if low < asked else None
    while found is not None:
        high = min(asked, 2 * found.load)
        further = _holds(question, deployment, high, until_s) if high < asked else None
        if further is None:
            return _between(found, high, until_s)
        found = further
    return None


def _between(found: MostLoad, high: float, until_s: float) -> MostLoad:
    """Halve the interval between a load that holds and one that does not."""
    whole = bool(found.question.traffic.concurrency)
    while high > found.load * STEP and not (whole and high <= found.load + 1):
        middle = (high + found.load) / 2
        further = _holds(found.question, found.plan.deployment, middle, until_s)
        if further is None:
            high = math.floor(middle) if whole else middle
        else:
            found = further
    return found


def _limit(question: ServingQuestion, deployment: Deployment) -> float:
    """Return the largest load to try for a deployment: for a rate, what it can answer per second, since beyond that
    requests wait ever longer.
    """
    if question.traffic.concurrency:
        return float(max(MOST_CLIENTS, MOST_TIMES * question.traffic.concurrency))
    return most_answered(question.model, question.cluster, deployment, question.traffic)


def _holds(question: ServingQuestion, deployment: Deployment, load: float, until_s: float) -> MostLoad | None:
    asked = at_load(question, load)
    try:
        estimate = estimate_of(asked, deployment, judged=True, until_s=until_s)
    except OutOfTime:
        raise
    except Infeasible:
        return None
    if not meets(asked, estimate):
        return None
    plan = ServingPlan(deployment=deployment, estimate=estimate, meets=True)
    return MostLoad(question=asked, plan=plan, load=asked_load(asked), more=False)


def on_fewest_gpus(
    flags: ServingFlags, *, progress: Callable[[str], None] = lambda _: None, until_s: float = math.inf
) -> tuple[ServingFlags, str]:
    """Return the flags with the fewest GPUs on which a deployment meets the targets and keeps up with the requests, and
    a sentence that says so.

    Numbers tried are powers of two within a node, then whole nodes. Raises UserError without a load, Infeasible if
    none is enough, OutOfTime at `until_s` of `time.monotonic`.
    """
    if flags.concurrency is None and flags.request_rate is None and flags.requests is None:
        raise UserError(
            "--gpus min needs a load",
            why="without one, the fewest GPUs that hold the model are enough",
            remedy="give --request-rate or --concurrency",
        )
    tried: list[int] = []
    reasons: list[str] = []
    targets = bool(flags.ttft or flags.tpot)
    for gpus in _numbers(flags):
        one = replace(flags, gpus=gpus)
        progress(f"{gpus} GPUs")
        try:
            question = serving_question(one)
        except UserError:  # the machine does not exist in this size
            if not tried:
                raise
            continue
        tried.append(gpus)
        reason = _lacks(question, until_s)
        if not reason:
            return one, f"{gpus} GPUs, the fewest of {', '.join(map(str, tried))} that serve this load as asked"
        reasons.append(f"{gpus}: {reason}")
    raise Infeasible(
        "no number of GPUs that was tried serves this load as asked",
        why="; ".join(reasons[-3:]),
        remedy="fewer requests, another --cluster" + (", or more seconds for --ttft and --tpot" if targets else ""),
    )


def _numbers(flags: ServingFlags) -> Iterator[int]:
    """Yield powers of two within a node of the machine, then whole nodes."""
    node = serving_question(replace(flags, gpus=None)).cluster.gpus_per_node
    power = 1
    while power < node:
        yield power
        power *= 2
    yield from (node * nodes for nodes in range(1, MOST_NODES + 1))


def _lacks(question: ServingQuestion, until_s: float) -> str:
    """Return why no deployment serves a question as asked; empty if one does."""
    limit = None if until_s == math.inf else until_s - time.monotonic()
    if limit is not None and limit <= 0:
        raise OutOfTime("the time limit ended before the fewest GPUs were found", remedy="a longer --time-limit")
    try:
        best = search_serving(question, judged=True, time_limit_s=limit).plans[0]
    except OutOfTime:
        raise
    except Infeasible as problem:
        return problem.why.partition("; ")[0] or str(problem).splitlines()[0]
    if not best.estimate.latency.keeps_up:
        return "requests come faster than they are answered"
    return "" if best.meets else "the targets do not hold"
