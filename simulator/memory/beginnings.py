"""What ranks of a pipeline have in common at the start of a step, replayed once.

Ranks whose stages are alike allocate the same until their rows of the schedule differ: in the warm-up they run the same
forward passes, one rank more of them than the next. `Beginnings` keeps the state of a rank where another one parts from
it, and the other begins with that.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import NamedTuple

from simulator.memory.allocator import Block
from simulator.memory.growing import AboveLimit, GrowingAllocator
from simulator.memory.plan_tensors import PlanTensors
from simulator.memory.rank_units import Instance, Wrapped
from simulator.memory.shortcut import ShortReplay
from simulator.pipeline.schedule_program import last_backwards
from simulator.pipeline.schedules.table import Schedule

# Blocks that a rank holds in lists of their own.
LISTS = ("newest", "logits", "reducing", "passing", "summed", "optimizer", "kept", "buckets")


class Beginning(NamedTuple):
    """The state of a rank after the first `done` actions of its row; units and stages are numbered on the rank."""

    done: int
    memory: GrowingAllocator
    wrapped: tuple[Wrapped, ...]
    running: dict[tuple[int, int], Instance]  # by unit and micro batch
    outputs: dict[tuple[int, int], Block]  # by stage and micro batch
    flat: Block | None
    lists: tuple[list[Block], ...]


class Beginnings:
    """States from which ranks of a plan that were not replayed yet can begin."""

    def __init__(self, plan: PlanTensors) -> None:
        self._plan = plan
        self._left = {*range(len(plan.schedule.table))}  # ranks that were not begun
        self._found: dict[int, Beginning] = {}

    def first_alike(self, rank: int) -> int:
        """Return the first rank that allocates what a rank does throughout a step."""
        schedule = self._plan.schedule
        alike = (r for r in range(rank) if self._firsts[r] == self._firsts[rank])
        return next((r for r in alike if _row(schedule, r) == _row(schedule, rank)), rank)

    def run_first_step(self, replay: ShortReplay) -> None:
        """Run the first step of a rank, from where another one that was replayed before parted from it.

        States for other ranks are kept from the second rank on: most plans that do not fit show it on the first.
        """
        rank, done = replay.rank, 0
        keep = not replay.moves_away and len(self._left) < len(self._plan.schedule.table)
        self._left.discard(rank)
        if found := self._found.pop(rank, None):
            done = found.done
            _restore(found, replay)
        else:
            replay.begin()
        for stop, others in sorted(self._parts(rank, done).items()) if keep else ():
            replay.run_row(done, stop)
            done = stop
            self._found |= {other: _state(replay, done) for other in others}
        replay.run_row(done, len(replay.row))
        replay.end_step()

    def _parts(self, rank: int, done: int) -> Mapping[int, list[int]]:
        """Return the ranks that are left by the actions after which they part from a rank, if these are more than
        `done` and more than those of the state that they have.
        """
        found: dict[int, list[int]] = {}
        for other in self._left:
            known = self._found[other].done if other in self._found else 0
            if self._firsts[rank] == self._firsts[other]:
                alike = alike_actions(self._plan.schedule, rank, other)
                if alike > max(known, done):
                    found.setdefault(alike, []).append(other)
        return found

    @cached_property
    def _firsts(self) -> list[Hashable]:
        """For each rank what it allocates before its first action follows from."""
        plan, last = self._plan, self._plan.schedule.stages - 1
        of_ranks = (plan.schedule.stages_of(rank) for rank in range(plan.schedule.ranks))
        return [
            (*(plan.alike[stage] for stage in stages), *((stage == 0, stage == last) for stage in stages))
            for stages in of_ranks
        ]


@lru_cache(maxsize=1024)
def alike_actions(schedule: Schedule, rank: int, other: int) -> int:
    """Return by how many actions two ranks begin that are equal but for the numbers of their stages."""
    both = zip(_row(schedule, rank), _row(schedule, other), strict=False)
    return sum(1 for _ in takewhile(lambda actions: actions[0] == actions[1], both))


@lru_cache(maxsize=128)
def _row(schedule: Schedule, rank: int) -> list[Hashable]:
    """Return what the actions of a rank follow from; stages are numbered on the rank."""
    number = {stage: place for place, stage in enumerate(schedule.stages_of(rank))}
    last = last_backwards(schedule)
    return [
        tuple((kind, number[stage], turn, turn == last[stage]) for stage, kind, turn, _ in action.leaves)
        for action in schedule.table[rank]
    ]


def _state(replay: ShortReplay, done: int) -> Beginning:
    number = {unit.name: place for place, unit in enumerate(replay.units)}
    stages = {stage: place for place, stage in enumerate(replay.plan.schedule.stages_of(replay.rank))}
    return Beginning(
        done=done,
        memory=replay.memory.copy(),
        wrapped=tuple(_copied(wrapped) for wrapped in replay.wrapped.values()),
        running={
            (number[name], micro_batch): Instance({**one.slots}, one.from_forward, one.later, [*one.casts])
            for (name, micro_batch), one in replay.running.items()
        },
        outputs={(stages[stage], micro_batch): block for (stage, micro_batch), block in replay.outputs.items()},
        flat=replay.flat,
        lists=tuple([*getattr(replay, name)] for name in LISTS),
    )


def _copied(wrapped: Wrapped) -> Wrapped:
    return replace(
        wrapped,
        gathered=[*wrapped.gathered],
        whole_gradients={**wrapped.whole_gradients},
        gradients=[*wrapped.gradients],
    )


def _restore(found: Beginning, replay: ShortReplay) -> None:
    """Put a rank into a state. Raises AboveLimit if it reserves more than the rank was asked about."""
    found.memory.limit_bytes = replay.memory.limit_bytes
    if found.memory.peak_reserved_bytes > found.memory.limit_bytes:
        raise AboveLimit
    names, stages = [unit.name for unit in replay.units], replay.plan.schedule.stages_of(replay.rank)
    replay.memory, replay.flat = found.memory, found.flat
    replay.wrapped = dict(zip(names, found.wrapped, strict=True))
    replay.running = {(names[place], micro_batch): one for (place, micro_batch), one in found.running.items()}
    replay.outputs = {(stages[place], micro_batch): block for (place, micro_batch), block in found.outputs.items()}
    for name, blocks in zip(LISTS, found.lists, strict=True):
        setattr(replay, name, blocks)
