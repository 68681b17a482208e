"""Replay steps of a plan's ranks through the model of torch's caching allocator until nothing changes; of a simulated
step, what is allocated over time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.analytical.scenario import Scenario
from simulator.config.plan import Plan
from simulator.engine.simulate import Run
from simulator.lowering.code_rank import MARK
from simulator.lowering.training import plan_context
from simulator.memory.allocator import CachingAllocator, OutOfMemory
from simulator.memory.beginnings import Beginnings
from simulator.memory.growing import AboveLimit, GrowingAllocator
from simulator.memory.plan_tensors import PlanTensors
from simulator.memory.rank import RankReplay
from simulator.memory.shortcut import ShortReplay
from simulator.pipeline.schedules.registry import schedule_kind, schedule_of_plan
from simulator.program.trace import Counter, Trace
from simulator.runtimes.model_operators import operators_for
from simulator.step.frozen import local_parameters
from simulator.step.units import UnitMaker

# Optimizer state is allocated at the end of the first step, so the second step has other addresses; a third shows
# whether retries recur. Where all steps are equal apart from that state, one is enough.
STEPS, LIMITED_STEPS = 2, 3
# Seconds of one core to replay a pass of a unit, without and with a pipeline; most passes of pipelines are replayed in
# part.
PASS_S, PIPED_PASS_S = 1.5e-4, 6e-5
ROUNDS = 2  # rounds of a pipeline that show the most in flight, if not all micro batches are


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedMemory:
    """The memory of one pipeline rank. `retries_per_step` is that of the last step; `out_of_memory`: returning unused
    memory was not enough. `by_stream` has reserved bytes.
    """

    reserved_bytes: int
    allocated_bytes: int  # the most at any moment
    by_stream: dict[str, int]
    retries_per_step: int = 0
    out_of_memory: bool = False

    @property
    def fragmentation(self) -> float:
        """The share of reserved bytes not allocated at the fullest moment."""
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


# Micro batches replayed for schedules whose forward passes all come first. Up to the second number all are replayed;
# larger steps are extrapolated from the two.
FORWARDS_FIRST = 8, 16


def replayed_micro_batches(plan: Plan, micro_batches: int) -> int:
    """Return a number of micro batches that shows the peak memory of a step with `micro_batches`.

    After a few rounds the ranks of a pipeline repeat themselves: no more micro batches are in flight, with or without
    gradients (tests/simulator/test_pipeline.py).
    """
    if plan.pp == 1:
        return min(micro_batches, 2)
    kind = schedule_kind(plan.schedule_name)
    if kind.forwards_first:
        return min(micro_batches, FORWARDS_FIRST[1])
    each = micro_batches // max(1, micro_batches // plan.pp) if kind.rounds else plan.pp
    return min(micro_batches, (3 if kind.pairs else ROUNDS) * each)


class MemoryReplay:
    """Replays the ranks of a plan, with unlimited memory or within a limit. `micro_batches` defaults to the number that
    shows the peak.
    """

    def __init__(self, scenario: Scenario, plan: Plan, *, micro_batches: int | None = None) -> None:
        self.context = plan_context(scenario, plan)
        self.plan = self.context.table.plans[0]
        operators = operators_for(scenario.model, scenario.runtime)
        self.micro_batches = self.plan.micro_batches(scenario.workload.global_batch_size)
        self.schedule = schedule_of_plan(
            self.plan, micro_batches or replayed_micro_batches(self.plan, self.micro_batches)
        )
        units = UnitMaker(scenario.model, self.context, local_parameters(scenario.model, self.context))
        self.tensors = PlanTensors(
            self.context, operators, units.stages(self.plan), self.schedule, tied=scenario.model.tied_embeddings
        )
        self._beginnings = Beginnings(self.tensors)
        self._known: dict[tuple[int, float | None, bool], ReservedMemory] = {}
        self._beyond: dict[int, float] = {}  # by rank: it reserves more than these bytes

    @property
    def seconds(self) -> float:
        """Seconds that replaying a rank takes, about, by the mean number of unit passes in a rank's step."""
        passes = len(self.schedule.table[0]) * sum(len(units) for units in self.tensors.stages) / self.schedule.stages
        return passes * (PIPED_PASS_S if self.plan.pp > 1 else PASS_S)

    @property
    def _fixed(self) -> bool:
        """Whether torch's allocator has no growing segments on the plan's GPU."""
        spec, architecture = self.context.spec, self.context.roofline.gpu.architecture
        return spec.fixed_segments or architecture.lower() in spec.fixed_segments_on

    def rank(self, rank: int, *, capacity_bytes: float | None = None, every_event: bool = False) -> ReservedMemory:
        """Return what the allocator of pipeline rank `rank` holds; `every_event` is replayed where fewer show as much,
        too.
        """
        key = self._beginnings.first_alike(rank), capacity_bytes, every_event
        if key not in self._known:
            fixed = self._fixed
            if capacity_bytes is not None or every_event or fixed:
                memory = CachingAllocator(capacity_bytes=capacity_bytes, expandable=not fixed)
                self._known[key] = self._by_rules(rank, memory)
            else:
                self._known[key] = self._replayed(rank, GrowingAllocator())
        return self._known[key]

    def rank_within(self, rank: int, limit_bytes: float) -> ReservedMemory | None:
        """Return the memory of a rank, or None as soon as more than `limit_bytes` are reserved."""
        if self._fixed:
            self.rank(rank)
        elif not self.knows(rank, limit_bytes):
            try:
                self.note(rank, limit_bytes, self._replayed(rank, GrowingAllocator(limit_bytes=limit_bytes)))
            except AboveLimit:
                self.note(rank, limit_bytes, None)
        found = self._known.get(self._key(rank))
        return found if found is not None and found.reserved_bytes <= limit_bytes else None

    def knows(self, rank: int, limit_bytes: float) -> bool:
        """Return whether it is known if a rank reserves more than `limit_bytes`."""
        key = self._key(rank)
        return key in self._known or self._beyond.get(key[0], 0.0) >= limit_bytes

    def note(self, rank: int, limit_bytes: float, held: ReservedMemory | None) -> None:
        """Keep what `rank_within` has returned elsewhere."""
        key = self._key(rank)
        if held is None:
            self._beyond[key[0]] = max(limit_bytes, self._beyond.get(key[0], 0.0))
        else:
            self._known[key] = held

    def _key(self, rank: int) -> tuple[int, None, bool]:
        return self._beginnings.first_alike(rank), None, False

    def _replayed(self, rank: int, memory: GrowingAllocator) -> ReservedMemory:
        replay = ShortReplay(self.tensors, rank, memory)
        self._beginnings.run_first_step(replay)
        for _ in range(1, self._steps):
            replay.step()
        return _held(replay.memory)

    @property
    def _steps(self) -> int:
        """Steps that show the memory of any step."""
        return 1 if self.tensors.repeats else STEPS

    def _by_rules(self, rank: int, memory: CachingAllocator) -> ReservedMemory:
        replay = RankReplay(self.tensors, rank, memory)
        before, full = 0, False
        try:
            replay.start()
            for _ in range(STEPS if memory.capacity_bytes is None else LIMITED_STEPS):
                before = memory.retries
                replay.step()
        except OutOfMemory:
            full = True
        return replace(_held(memory), retries_per_step=memory.retries - before, out_of_memory=full)

    def paged_bytes(self, rank: int) -> float:
        """Return the bytes of paged optimizer state on pipeline rank `rank`."""
        return self.tensors.paged_bytes(
            [unit for stage in self.schedule.stages_of(rank) for unit in self.tensors.stages[stage]]
        )

    def over_passes(self, rank: int) -> list[int]:
        """Return the most bytes allocated on pipeline rank `rank` in each pass of a step, unit by unit, and the bytes
        at its end.
        """
        replay = RankReplay(self.tensors, rank, GrowingAllocator())
        replay.watches = True
        replay.begin()
        for _ in range(self._steps):
            replay.step()
        return [*replay.highest, replay.memory.allocated_bytes]


def _held(memory: CachingAllocator | GrowingAllocator) -> ReservedMemory:
    return ReservedMemory(
        reserved_bytes=memory.peak_reserved_bytes,
        allocated_bytes=memory.peak_allocated_bytes,
        by_stream=dict(memory.streams()),
    )


def with_memory(scenario: Scenario, plan: Plan, run: Run, micro_batches: int) -> Trace:
    """Return the trace of a run of `micro_batches` with marked passes, with the memory of every rank that is shown."""
    replay, counters = MemoryReplay(scenario, plan, micro_batches=micro_batches), list(run.trace.counters)
    for rank in run.trace.ranks:
        ends = [at for name, at in run.events_s[rank].items() if name.startswith(MARK)]
        held = replay.over_passes(rank // (plan.gpus // plan.pp))
        samples = tuple((at, float(nbytes)) for at, nbytes in zip([0.0, *sorted(ends)], held, strict=True))
        counters.append(Counter(rank, "memory", "bytes", samples))
    return replace(run.trace, counters=tuple(counters))
