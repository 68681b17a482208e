"""The fewest GPUs of a machine that serve a load within its targets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from planner.serving.question.from_flags import ServingFlags, serving_question
from planner.serving.question.question import ServingQuestion
from planner.serving.search import search_serving
from simulator.serving.server import OutOfTime
from topology.errors import Infeasible, UserError

MOST_NODES = 8  # nodes up to which are tried


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
