"""Functions that worker processes run (`planner.jobs.fork_server`): searches and simulated steps, as on the command
line.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from planner.answers.check import check_configuration
from planner.configs.formats.configuration import CheckFlags
from planner.explain.traffic import Traffic, traffic_of
from planner.question.flags import Flags
from planner.question.question import Question
from planner.requests.tools import Check
from planner.search.answer import answer, search_question
from planner.search.result import RankedPlan, SearchResult
from planner.search.search import SearchOptions
from planner.search.size_grid import Size, size_grid
from planner.serving import (
    Account,
    ServingFlags,
    ServingResult,
    Sweep,
    over_clients,
    search_serving,
    serving_account,
    serving_question,
)
from planner.serving.pareto import Pareto
from planner.serving.pareto import pareto as compare_deployments
from planner.serving.question.from_flags import machine_of
from planner.serving.targets.ways import WayOut, way_out
from simulator.config.plan import Plan
from simulator.engine.simulate import Run
from simulator.lowering.simulation import drawn_micro_batches
from simulator.memory.replay import with_memory
from simulator.program.chrome_trace import to_chrome
from simulator.program.critical_path import critical_path, path_parts_s
from simulator.serving.engine import COMPARED
from topology import codec
from topology.cluster import Cluster
from topology.codec import JsonObject
from ui.charts.timeline import Timeline, samples, timeline

Progress = Callable[[str], None]
SERVING_LISTED = 10
Samples = tuple[tuple[float, float], ...]
MOST_SAMPLES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A simulated step, reduced to what its page shows: `memory` is (seconds, bytes) on `memory_rank`.

    `path` has the positions in `line` of the spans that the step waits for, `path_s` how long they last by category.
    `links` are the busiest link of each kind over time, in bytes/s of one direction, by its name.
    """

    line: Timeline
    step_s: float
    micro_batches: tuple[int, int]  # those drawn, and those of the whole step
    path: tuple[int, ...]
    path_s: dict[str, float]
    memory: Samples
    memory_rank: int | None
    links: dict[str, Samples]
    traffic: Traffic | None
    trace: bytes  # the file for Perfetto, compressed by zlib

    def trace_text(self) -> str:
        """Return the trace file that `planner trace --out` would write."""
        return zlib.decompress(self.trace).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingAnswers:
    """A serving search: `accounts` of its first SERVING_LISTED plans, the best over clients, what targets allow."""

    result: ServingResult
    accounts: tuple[Account, ...]
    load: Sweep
    out: WayOut


def search(progress: Progress, flags: Flags, framework: str | None, options: SearchOptions) -> SearchResult:
    """Return the result of `planner suggest`, and before it that of the analytical model."""
    return answer(flags, framework, options, progress=progress, early=getattr(progress, "early", None))


def simulate(progress: Progress, question: Question, plan: Plan) -> SimulatedStep:
    """Return the simulated step of a plan, as `planner trace` writes it."""
    drawn = drawn_micro_batches(question.model, question.workload, plan)
    found = question.simulate(plan, micro_batches=drawn, progress=progress)
    run = found.run
    progress("following what the step waits for")
    trace = with_memory(question, plan, run, drawn)
    counters = [c for c in trace.counters if c.name == "memory"]
    counter = max(counters, key=lambda c: max(nbytes for _, nbytes in c.samples), default=None)
    path = critical_path(trace)
    return SimulatedStep(
        line=timeline(trace),
        step_s=run.step_s,
        micro_batches=(drawn, plan.micro_batches(question.workload.global_batch_size)),
        path=path,
        path_s=path_parts_s([trace.spans[i] for i in path], run.step_s),
        memory=tuple(samples(counter, end_s=run.step_s, most=MOST_SAMPLES)) if counter else (),
        memory_rank=counter.rank if counter else None,
        links=_busiest_links(run, question.cluster),
        traffic=traffic_of(question, plan, found.estimate),
        trace=zlib.compress(codec.to_json(to_chrome(trace), indent=None).encode(), level=1),
    )


def _busiest_links(run: Run, cluster: Cluster) -> dict[str, Samples]:
    """Return the rates of the busiest GPU port and of the busiest share of the NICs over time, if they send
    anything.
    """
    names = {"port": "NVLink, out" if cluster.slowest_kind.nvlink_links else "PCIe, out", "nic": "network, out"}
    best: dict[str, tuple[float, Samples]] = {}
    for counter in run.trace.counters:
        medium = next((word for word in names if counter.name.startswith(f"link ('{word}', 'out'")), None)
        if medium is None:
            continue
        ends = [*(time for time, _ in counter.samples[1:]), run.step_s]
        carried = sum(rate * (end - at) for (at, rate), end in zip(counter.samples, ends, strict=True))
        if carried > best.get(medium, (0.0, ()))[0]:
            best[medium] = carried, counter.samples
    return {names[medium]: kept for medium, (_, kept) in sorted(best.items(), reverse=True)}


def sizes(progress: Progress, question: Question, ranked: RankedPlan) -> tuple[Size, ...]:
    """Return the plan with other sequence lengths and micro batches, powers of two around its own."""
    progress("other lengths and micro batches")
    length, size = question.workload.seq_len, ranked.plan.micro_batch_size
    lengths = [found for power in range(-2, 3) if (found := int(length * 2.0**power)) * 2.0**-power == length]
    return size_grid(question, ranked.plan, ranked.estimate, lengths, sorted({1, 2, 4, 8, size, 2 * size}))


def check(progress: Progress, text: str, name: str, flags: CheckFlags) -> JsonObject:
    """Return what `planner check --json` answers."""
    return check_configuration(text, name, Check(file=name), flags, progress).to_dict()


def numbers(progress: Progress, flags: Flags, framework: str | None, options: SearchOptions) -> SearchResult:
    """Return what `planner suggest --gpus 8,16,32` answers, with the same batch on all numbers of GPUs."""
    if flags.global_batch is None:
        asked, _ = search_question(flags, framework)
        flags = replace(flags, global_batch=asked.workload.global_batch_size)
    return answer(flags, framework, options, progress=progress)


def serve(progress: Progress, flags: ServingFlags) -> ServingAnswers:
    """Return what `planner suggest --task serve` answers, with where each listed deployment's time goes."""
    result = search_serving(serving_question(flags), progress=progress)
    progress("the best over numbers of clients")
    listed = result.plans[:SERVING_LISTED]
    accounts = tuple(serving_account(result.question, plan.deployment, plan.estimate) for plan in listed)
    load = over_clients(result)
    progress("what would meet the targets")
    return ServingAnswers(result=result, accounts=accounts, load=load, out=way_out(result, partial(machine_of, flags)))


def pareto(progress: Progress, flags: ServingFlags) -> Pareto:
    """Return what `planner suggest --task serve --objective pareto` compares."""
    question = serving_question(replace(flags, objective="throughput"))
    return compare_deployments(question, tuple(dict.fromkeys((question.engine, *COMPARED))), progress=progress)


WORK: dict[str, Callable[..., Any]] = {
    "search": search,
    "fastest": search,
    "other": search,
    "check": check,
    "numbers": numbers,
    "simulate": simulate,
    "sizes": sizes,
    "serve": serve,
    "pareto": pareto,
}
