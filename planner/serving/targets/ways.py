"""Changes that meet targets which no deployment meets: single changes, each simulated before it is listed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from planner.serving.question.question import ServingQuestion
from planner.serving.search import ServingPlan, ServingResult, search_serving
from planner.serving.targets.most_load import MostLoad, load_flag, most_load
from simulator.serving.deployment import CACHE_BYTES, WEIGHT_BYTES
from simulator.serving.engine import COMPARED, engine_of
from topology.cluster import Cluster
from topology.errors import Infeasible, UserError

HALVINGS = 6  # how often the lengths of prompts and answers are halved at most
GROWTHS = (2, 4, 8)  # factors of the number of GPUs
NARROWER = ("float8", "float4")  # formats of weights tried if they are smaller

Change = tuple[str, ServingQuestion]
Machine = Callable[[int], Cluster]  # (n): the machine with this number of GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Flags to add, the question with them, and its best deployment, which meets the targets."""

    flags: str
    question: ServingQuestion
    plan: ServingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """`most` is the most load within the targets over all deployments; `ways` meet targets that do not hold.

    `whole`: all changes were tried within the time.
    """

    most: MostLoad | None = None
    ways: tuple[Way, ...] = ()
    whole: bool = True


NOTHING = WayOut()


def way_out(result: ServingResult, machine: Machine, *, until_s: float = math.inf) -> WayOut:
    """Return the most load within the targets and, if they do not hold, the nearest change of each kind with which they
    do. If none does alone, changes are tried together with less load.

    Changes not simulated by `until_s` of `time.monotonic` are left out.
    """
    question = result.question
    if not (question.ttft_s or question.tpot_s):
        return NOTHING
    first = result.plans[0]
    holds = first if first.meets else None
    most = most_load(question, [plan.deployment for plan in result.plans], holds=holds, until_s=until_s)
    if first.meets:
        return WayOut(most=most, whole=time.monotonic() < until_s)
    found = [] if most is None else [Way(flags=most.flag, question=most.question, plan=most.plan)]
    for changes in _changes(question, machine):
        for flags, asked in changes:
            searched = _searched(asked, until_s)
            if searched is not None and searched.plans[0].meets:
                found.append(Way(flags=flags, question=asked, plan=searched.plans[0]))
                break
    for changes in [] if found else _changes(question, machine):
        for flags, asked in changes:
            searched = _searched(asked, until_s)
            less = searched and most_load(asked, [plan.deployment for plan in searched.plans], until_s=until_s)
            if less:
                alone = flags.removesuffix(load_flag(question)).strip()
                found.append(Way(flags=f"{alone} {less.flag}", question=less.question, plan=less.plan))
                break
    return WayOut(most=most, ways=tuple(found), whole=time.monotonic() < until_s)


def _searched(question: ServingQuestion, until_s: float) -> ServingResult | None:
    limit = None if until_s == math.inf else max(0.0, until_s - time.monotonic())
    try:
        return None if limit == 0.0 else search_serving(question, judged=True, time_limit_s=limit)
    except (UserError, Infeasible):
        return None


def _changes(question: ServingQuestion, machine: Machine) -> Iterator[Iterator[Change]]:
    """Yield changes of one kind, the nearest first."""
    yield _more_gpus(question, machine)
    yield _narrower(question)
    if CACHE_BYTES[question.kv_cache] > CACHE_BYTES["float8"]:
        yield iter([("--kv-cache float8", replace(question, kv_cache="float8"))])
    for change in _other_engines(question):
        yield iter([change])
    if not question.separate:
        yield iter([("--separate", replace(question, separate=True))])
    if not question.traffic.trace:
        yield _shorter(question, "prompt", "--isl")
        yield _shorter(question, "output", "--osl")


def _narrower(question: ServingQuestion) -> Iterator[Change]:
    for weights in NARROWER:
        if WEIGHT_BYTES[weights] < WEIGHT_BYTES[question.weights]:
            yield f"--weights {weights}", replace(question, weights=weights)


def _other_engines(question: ServingQuestion) -> Iterator[Change]:
    """Yield the other engines that have every setting of the question; for others a command would be refused."""
    settings = question.eager, question.two_batches, question.receive_every
    for name in COMPARED:
        other = question.of_engine(name)
        if name != engine_of(question.engine).program and settings == (
            other.eager,
            other.two_batches,
            other.receive_every,
        ):
            yield f"--engine {name}", other


def _more_gpus(question: ServingQuestion, machine: Machine) -> Iterator[Change]:
    """Yield larger machines with the question's load, which is stated since it may have been assumed per GPU."""
    load = "" if question.traffic.trace else f" {load_flag(question)}"
    for factor in GROWTHS:
        gpus = question.gpu_count * factor
        try:
            yield f"--gpus {gpus}{load}", replace(question, cluster=machine(gpus), gpus=0)
        except (UserError, ValueError):
            continue  # the machine does not exist in this size


def _shorter(question: ServingQuestion, name: str, flag: str) -> Iterator[Change]:
    """Yield half the mean length of `name`, prompt or output, a quarter of it, and so on."""
    lengths = getattr(question.traffic, name)
    for halving in range(1, HALVINGS + 1):
        if tokens := lengths.mean >> halving:
            traffic = replace(question.traffic, **{name: replace(lengths, mean=tokens)})
            yield f"{flag} {tokens}", replace(question, traffic=traffic)
