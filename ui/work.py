"""What worker processes work out (`ui.worker`): searches and simulated steps, by the functions of the command line."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from planner.question.flags import Flags
from planner.question.question import Question
from planner.search.answer import answer, search_question
from planner.search.result import SearchResult
from planner.search.search import SearchOptions
from planner.serving.account import Account, account
from planner.serving.asked import ServingFlags, serving_question
from planner.serving.crossings import Sweep, over_clients
from planner.serving.search import ServingResult, search_serving
from simulator.config.plan import Plan
from simulator.program.chrome_trace import to_chrome
from topology import codec
from ui.charts.timeline import Timeline, samples, timeline

Progress = Callable[[str], None]
SERVING_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A simulated step, reduced to what its page shows: `memory` is (seconds, bytes) on `memory_rank`."""

    line: Timeline
    step_s: float
    detail: str
    memory: tuple[tuple[float, float], ...]
    memory_rank: int | None
    trace: bytes  # the file for Perfetto, compressed by zlib

    def trace_text(self) -> str:
        """Return the trace file that `planner trace --out` would write."""
        return zlib.decompress(self.trace).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingAnswers:
    """A serving search; `accounts` are of its first SERVING_LISTED plans, `load` follows the best over clients."""

    result: ServingResult
    accounts: tuple[Account, ...]
    load: Sweep


def search(progress: Progress, flags: Flags, framework: str, options: SearchOptions) -> SearchResult:
    """Return what `planner suggest` answers."""
    return answer(flags, framework, options, progress=progress)


def simulate(progress: Progress, question: Question, plan: Plan) -> SimulatedStep:
    """Return the simulated step of a plan, as `planner trace` writes it."""
    found = question.simulate(plan, progress=progress)
    counters = [c for c in found.run.trace.counters if c.name == "memory"]
    worst = found.estimate.memory.worst_rank
    counter = next((c for c in counters if c.rank == worst), counters[0] if counters else None)
    return SimulatedStep(
        line=timeline(found.run.trace),
        step_s=found.run.step_s,
        detail=str(found.detail),
        memory=tuple(samples(counter, end_s=found.run.step_s)) if counter else (),
        memory_rank=counter.rank if counter else None,
        trace=zlib.compress(codec.to_json(to_chrome(found.run.trace), indent=None).encode(), level=1),
    )


def numbers(progress: Progress, flags: Flags, framework: str, options: SearchOptions) -> SearchResult:
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
    accounts = tuple(account(result.question, plan.deployment, plan.estimate) for plan in listed)
    return ServingAnswers(result=result, accounts=accounts, load=over_clients(result))


WORK: dict[str, Callable[..., Any]] = {
    "search": search,
    "fastest": search,
    "numbers": numbers,
    "simulate": simulate,
    "serve": serve,
}
