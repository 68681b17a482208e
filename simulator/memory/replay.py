"""The memory of a plan as torch's caching allocator holds it: one step after the other until nothing changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.analytical.scenario import Scenario
from simulator.config.plan import Plan
from simulator.lowering.network import Network
from simulator.lowering.training import plan_context
from simulator.memory.allocator import CachingAllocator, OutOfMemory
from simulator.memory.growing import AboveLimit, GrowingAllocator
from simulator.memory.plan_tensors import PlanTensors
from simulator.memory.rank import RankReplay
from simulator.memory.shortcut import ShortReplay
from simulator.pipeline.schedules.registry import schedule_kind, schedule_of_plan
from simulator.runtimes.library import operators_for

# Optimizer state is made at the end of the first step, so the second places everything anew; a third shows what retries
# stay. A step that repeats the first one, but for that state, is replayed alone.
STEPS, LIMITED_STEPS = 2, 3
ROUNDS = 2  # which show the most that is in flight, unless all micro batches are


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedMemory:
    """What the allocator of one pipeline rank holds. `retries_per_step` are those of the last step; `out_of_memory`
    says that giving memory back was not enough. `by_stream` are reserved bytes.
    """

    reserved_bytes: int
    allocated_bytes: int  # the most at any moment
    by_stream: dict[str, int]
    retries_per_step: int = 0
    out_of_memory: bool = False

    @property
    def fragmentation(self) -> float:
        """The share of reserved bytes that were not allocated at the fullest moment."""
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


# Micro batches of a schedule whose forward passes all go first: up to the second as many as there are, beyond it what
# each of those between the two adds is added for every further one.
FORWARDS_FIRST = 8, 16


def replayed_micro_batches(plan: Plan, micro_batches: int) -> int:
    """Return how many micro batches show what a step of so many holds at most.

    Beyond a few rounds of a pipeline its ranks repeat what they do: there are never more micro batches in flight, nor
    with gradients (tests/simulator/test_schedules_memory.py).
    """
    if plan.pp == 1:
        return min(micro_batches, 2)
    kind = schedule_kind(plan.schedule_name)
    if kind.forwards_first:
        return min(micro_batches, FORWARDS_FIRST[1])
    each = micro_batches // max(1, micro_batches // plan.pp) if kind.rounds else plan.pp
    return min(micro_batches, (3 if kind.pairs else ROUNDS) * each)


class MemoryReplay:
    """A plan whose ranks are replayed, with as much memory as they ask for or with a limit; with so many
    `micro_batches` where they are given, else with as many as show the most.
    """

    def __init__(self, scenario: Scenario, plan: Plan, *, micro_batches: int | None = None) -> None:
        self.context = plan_context(scenario, plan)
        self.plan = self.context.table.plans[0]
        operators = operators_for(scenario.model, scenario.runtime)
        self.micro_batches = self.plan.micro_batches(scenario.workload.global_batch_size)
        self.schedule = schedule_of_plan(
            self.plan, micro_batches or replayed_micro_batches(self.plan, self.micro_batches)
        )
        network = Network(scenario.model, operators, self.context)
        self.tensors = PlanTensors(
            self.context, operators, network.stages, self.schedule, tied=scenario.model.tied_embeddings
        )

    @property
    def passes(self) -> float:
        """How many passes of units a step of a rank has, on average."""
        return len(self.schedule.table[0]) * sum(len(units) for units in self.tensors.stages) / self.schedule.stages

    def rank(self, rank: int, *, capacity_bytes: float | None = None, every_event: bool = False) -> ReservedMemory:
        """Return what the allocator of pipeline rank `rank` holds; `every_event` is replayed where fewer show as much,
        too.
        """
        if capacity_bytes is not None or every_event:
            return self._by_rules(rank, CachingAllocator(capacity_bytes=capacity_bytes))
        return self._replayed(rank, GrowingAllocator())

    def rank_within(self, rank: int, limit_bytes: float) -> ReservedMemory | None:
        """Return the same, or None as soon as more than a limit is reserved."""
        try:
            return self._replayed(rank, GrowingAllocator(limit_bytes=limit_bytes))
        except AboveLimit:
            return None

    def _replayed(self, rank: int, memory: GrowingAllocator) -> ReservedMemory:
        self._run(ShortReplay(self.tensors, rank, memory, micro_batches=self.micro_batches))
        return _held(memory)

    def _run(self, replay: RankReplay) -> None:
        """Run as many steps as show what any holds."""
        replay.start()
        if self.tensors.repeats:
            replay.make_optimizer()
        for _ in range(1 if self.tensors.repeats else STEPS):
            replay.step()

    def _by_rules(self, rank: int, memory: CachingAllocator) -> ReservedMemory:
        replay = RankReplay(self.tensors, rank, memory, micro_batches=self.micro_batches)
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
        """Return the bytes of an optimizer's state that are paged on pipeline rank `rank`."""
        return self.tensors.paged_bytes(
            [unit for stage in self.schedule.stages_of(rank) for unit in self.tensors.stages[stage]]
        )

    def over_passes(self, rank: int) -> list[int]:
        """Return the bytes that pipeline rank `rank` has allocated at most in each pass of a step, unit by unit, and at
        its end.
        """
        replay = RankReplay(self.tensors, rank, GrowingAllocator(), micro_batches=self.micro_batches)
        replay.watches = True
        self._run(replay)
        return [*replay.highest, replay.memory.allocated_bytes]

    def ranks(self) -> tuple[ReservedMemory, ...]:
        """Return what every pipeline rank holds."""
        return tuple(self.rank(rank) for rank in range(self.plan.pp))


def _held(memory: CachingAllocator | GrowingAllocator) -> ReservedMemory:
    return ReservedMemory(
        reserved_bytes=memory.peak_reserved_bytes,
        allocated_bytes=memory.peak_allocated_bytes,
        by_stream=dict(memory.streams()),
    )
