"""Allocated memory of the ranks of a simulated step over time: the replayed bytes at the times of the run's passes."""

from __future__ import annotations

from dataclasses import replace

from simulator.analytical.scenario import Scenario
from simulator.config.plan import Plan
from simulator.engine.simulate import Run
from simulator.lowering.code_rank import MARK
from simulator.memory.replay import MemoryReplay
from simulator.program.trace import Counter, Trace


def with_memory(scenario: Scenario, plan: Plan, run: Run, micro_batches: int) -> Trace:
    """Return the trace of a run of `micro_batches` with marked passes, with the memory of every rank that is shown."""
    replay, counters = MemoryReplay(scenario, plan, micro_batches=micro_batches), list(run.trace.counters)
    for rank in run.trace.ranks:
        ends = [at for name, at in run.events_s[rank].items() if name.startswith(MARK)]
        held = replay.over_passes(rank // (plan.gpus // plan.pp))
        samples = tuple((at, float(nbytes)) for at, nbytes in zip([0.0, *sorted(ends)], held, strict=True))
        counters.append(Counter(rank, "memory", "bytes", samples))
    return replace(run.trace, counters=tuple(counters))
