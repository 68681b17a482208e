"""A rank whose backward passes are not replayed tensor by tensor where they leave nothing behind.

Most backward passes of a pipeline free all that they ask for, and with it what the forward pass kept for them. Free
neighbours are joined, so what is free then follows from what is left: it is enough to free the tensors of the forward
pass, unless the pass maps more pages. Where it does not is known from the longest run of mapped addresses that are free
(`room_bytes`).

That a pass is of this kind shows when one like it is replayed: of units that are alike, with the same tensors of the
forward pass, on a rank that holds as many others. What it asks for follows from these. To see it takes as long as
another pass, so it is looked for where several more are to come.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from simulator.memory.allocator import BLOCK, SMALL, Block, TensorEvent
from simulator.memory.growing import GrowingAllocator, Played, PoolKey
from simulator.memory.plan_tensors import Piece, PlanTensors
from simulator.memory.rank import RankReplay
from simulator.pipeline.schedules.table import Action, Kind

WORTH_SEEING = 2  # passes of a stage to come, of which the last one is not like the others


class Turn(NamedTuple):
    """A backward pass, or a half of one, that leaves nothing behind. `freed` and `later` are of each of its units."""

    room_bytes: dict[PoolKey, int]  # by pool: the bytes of a free run with which the pass maps no pages
    rise_bytes: int  # most bytes allocated beyond those at its start
    freed: tuple[tuple[int, ...], ...]  # slots
    later: tuple[tuple[Piece, ...], ...]  # the events left to the second half
    ends: bool  # nothing of the micro batch is left


class ShortReplay(RankReplay):
    """One rank of a plan, without a limit of memory."""

    memory: GrowingAllocator

    def __init__(self, plan: PlanTensors, rank: int, memory: GrowingAllocator) -> None:
        super().__init__(plan, rank, memory)
        self.moves_away = plan.away or bool(self.spec.away_layers)  # layers go to the host one after the other
        self._zero = tuple(self.zero.values())
        self._to_come = Counter((action.kind, action.stage) for action in self.row)

    def run(self, action: Action) -> None:
        if action.parts or action.kind is Kind.FORWARD or self.moves_away:
            super().run(action)
            return
        key, turns = self._key(action), self.plan.turns
        self._to_come[action.kind, action.stage] -= 1
        if key not in turns:  # the first of a kind is often the only one
            turns[key] = ()
        elif turns[key] == ():
            if self._to_come[action.kind, action.stage] <= WORTH_SEEING:
                super().run(action)
                return
            turns[key] = self._run_and_see(action)
            return
        elif (turn := turns[key]) is not None and self._has_room(turn):
            self._leave_out(action, turn)
            return
        super().run(action)

    def _key(self, action: Action) -> Hashable:
        """Return what passes have in common that are alike."""
        stage, micro_batch = action.stage, action.micro_batch
        tensors: list[object] = []
        for unit in self.plan.stages[stage]:
            instance, wrapped = self.running[unit.name, micro_batch], self.wrapped[unit.name]
            tensors += tuple(instance.slots), instance.from_forward, len(instance.casts), id(instance.later)
            tensors += len(wrapped.gathered), tuple(wrapped.whole_gradients), len(wrapped.gradients)
        last, output = micro_batch == self.plan.last_turned[stage], (stage, micro_batch) in self.outputs
        lists = self.newest, self.reducing, self.passing, self.summed, self.kept, self.logits, self.buckets
        others = self.flat is None, *map(len, lists)
        return action.kind, self.plan.alike[stage], last, output, self._zero, others, tuple(tensors)

    def _has_room(self, turn: Turn) -> bool:
        return all(self.memory.room_bytes(key) >= nbytes for key, nbytes in turn.room_bytes.items())

    def _run_and_see(self, action: Action) -> Turn | None:
        """Run a pass tensor by tensor; return what it does if it leaves nothing behind."""
        units, where, memory = self.plan.stages[action.stage], (action.stage, action.micro_batch), self.memory
        instances = [self.running[unit.name, action.micro_batch] for unit in units]
        before, output = [dict(one.slots) for one in instances], self.outputs.get(where)
        allocated, peak = memory.allocated_bytes, memory.peak_allocated_bytes
        memory.peak_allocated_bytes = allocated
        log = PassLog(memory)
        self.memory = log  # type: ignore[assignment]
        super().run(action)
        self.memory = memory
        rise = memory.peak_allocated_bytes - allocated
        memory.peak_allocated_bytes = max(peak, memory.peak_allocated_bytes)

        ends = all((unit.name, action.micro_batch) not in self.running for unit in units)
        left: list[dict[int, Block]] = [{} if ends else one.slots for one in instances]
        freed = tuple(tuple(slot for slot in had if slot not in has) for had, has in zip(before, left, strict=True))
        expected = [had[slot] for had, slots in zip(before, freed, strict=True) for slot in slots]
        expected += [block for one in instances for block in one.casts if ends]
        expected += [output] if output is not None and output not in self.newest else []
        if log.born or sorted(map(id, log.freed)) != sorted(map(id, expected)):
            return None
        later = tuple(one.later for one in instances)
        return Turn(room_bytes=log.room_bytes(), rise_bytes=rise, freed=freed, later=later, ends=ends)

    def _leave_out(self, action: Action, turn: Turn) -> None:
        """Free what a pass frees of the forward pass."""
        memory, where = self.memory, (action.stage, action.micro_batch)
        memory.peak_allocated_bytes = max(memory.peak_allocated_bytes, memory.allocated_bytes + turn.rise_bytes)
        blocks = self.output_after(*where)
        for unit, freed, later in zip(self.plan.stages[action.stage], turn.freed, turn.later, strict=True):
            key = unit.name, action.micro_batch
            instance = self.running.pop(key) if turn.ends else self.running[key]
            instance.later = later
            blocks += [instance.slots.pop(slot) for slot in freed]
            blocks += instance.casts if turn.ends else ()
        self._give(blocks)


class PassLog(Played):
    """An allocator that notes what a pass asks of it."""

    def __init__(self, memory: GrowingAllocator) -> None:
        self.memory = memory
        self.born: dict[int, Block] = {}  # blocks that the pass has allocated and not freed
        self.freed: list[Block] = []  # blocks that it has freed and that were there before
        # By stream, for its small and its large pool: bytes allocated and, negative, freed.
        self._asked: defaultdict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))

    def play(self, events: Iterable[TensorEvent], slots: dict[int, Block], stream: str) -> None:
        before, sizes = {**slots}, dict[int, int]()  # the latter of what is allocated here
        small, large = self._asked[stream]
        self.memory.play(events, slots, stream)
        for slot, size in events:
            if size:
                sizes[slot] = size
                (large if size > SMALL else small).append(size)
            elif slot in sizes:
                gone = sizes.pop(slot)
                (large if gone > SMALL else small).append(-gone)
            elif slot in before:
                block = before.pop(slot)
                if self.born.pop(id(block), None) is None:
                    self.freed.append(block)
                else:
                    (own, pool), _, nbytes = block
                    self._asked[own][pool].append(-nbytes)
        for slot in sizes:
            self.born[id(slots[slot])] = slots[slot]

    def room_bytes(self) -> dict[PoolKey, int]:
        """Return for each pool the bytes of a run of free addresses that hold all that was asked for."""
        every = ((stream, which, asked) for stream, pools in self._asked.items() for which, asked in enumerate(pools))
        return {(stream, which): _room_bytes(asked) for stream, which, asked in every if asked}


def _room_bytes(asked: Iterable[int]) -> int:
    """Return the bytes of a run of free addresses in which there is always room for the next of some requests, wherever
    those before it were placed.

    Requests that add up to no more than a run have room in it. So has one where `count` tensors are there, of `held`
    bytes: they leave `count` + 1 runs at most, and if each were a block too short for the request, then no more than
    this would be free in all.
    """
    room = since = count = held = 0
    for nbytes in asked:
        if nbytes > 0:
            since += nbytes
            room = max(room, min(since, held + nbytes + count * (nbytes - BLOCK)))
        held += nbytes
        count += 1 if nbytes > 0 else -1
        since = since if count else 0
    return room
