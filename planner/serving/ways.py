"""What would meet targets that no deployment meets: changes of one thing, each simulated before it is listed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

from planner.serving.question.question import ServingQuestion
from planner.serving.search import ServingResult, search_serving
from simulator.config.runtime import LOW_PRECISION
from simulator.serving.server import OutOfTime
from simulator.serving.traffic import steady_requests
from topology.errors import UserError
from topology.rates.scaling import with_gpus

HALVINGS = 6  # of the load and of the prompt that are tried
GROWTHS = (2, 4, 8)  # factors of the number of GPUs that are tried


def ways_to_meet(result: ServingResult, *, until_s: float = math.inf) -> list[str]:
    """Return flags with which a deployment meets the targets: a lower load, more GPUs, other weights, a shorter prompt.

    The nearest change of each is returned; those that are not simulated by `until_s` of `time.monotonic` are left out.
    """
    if result.plans[0].meets:
        return []
    found: list[str] = []
    for changes in _changes(result.question):
        for flags, asked in changes:
            if time.monotonic() >= until_s:
                return found
            if _meets(asked, until_s):
                found.append(flags)
                break
    return found


def _meets(question: ServingQuestion, until_s: float) -> bool:
    limit = None if until_s == math.inf else max(0.0, until_s - time.monotonic())
    try:
        return search_serving(question, time_limit_s=limit).plans[0].meets
    except (UserError, OutOfTime):
        return False


def _changes(question: ServingQuestion) -> Iterator[Iterator[tuple[str, ServingQuestion]]]:
    if not question.traffic.trace:
        yield _lower_loads(question)
    yield _more_gpus(question)
    if question.weights not in LOW_PRECISION:
        yield iter([("--weights float8", replace(question, weights="float8"))])
    if not question.traffic.trace:
        yield _shorter_prompts(question)


def _lower_loads(question: ServingQuestion) -> Iterator[tuple[str, ServingQuestion]]:
    traffic = question.traffic
    for halving in range(1, HALVINGS + 1):
        if traffic.concurrency:
            clients = traffic.concurrency >> halving
            if not clients:
                return
            fewer = replace(traffic, concurrency=clients, requests=steady_requests(clients))
            yield f"--concurrency {clients}", replace(question, traffic=fewer)
        else:
            rate = traffic.request_rate / 2**halving
            yield (
                f"--request-rate {rate:.3g}",
                replace(question, traffic=replace(traffic, request_rate=float(f"{rate:.3g}"))),
            )


def _more_gpus(question: ServingQuestion) -> Iterator[tuple[str, ServingQuestion]]:
    for factor in GROWTHS:
        gpus = question.cluster.gpu_count * factor
        try:
            yield f"--gpus {gpus}", replace(question, cluster=with_gpus(question.cluster, gpus))
        except (UserError, ValueError):
            continue  # the machine does not come in this size


def _shorter_prompts(question: ServingQuestion) -> Iterator[tuple[str, ServingQuestion]]:
    traffic = question.traffic
    for halving in range(1, HALVINGS + 1):
        if tokens := traffic.prompt.mean >> halving:
            shorter = replace(traffic, prompt=replace(traffic.prompt, mean=tokens))
            yield f"--isl {tokens}", replace(question, traffic=shorter)
