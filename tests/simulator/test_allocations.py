"""The caching allocator: its published rules against a brute force, what it can never do, and retries of a full GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from simulator.memory.allocator import BLOCK, Block, CachingAllocator, OutOfMemory
from simulator.memory.growing import GrowingAllocator
from simulator.memory.shortcut import PassLog

MIB = 1 << 20
STEPS = st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 10), st.sampled_from("ab")), max_size=60)


@dataclass
class Reference:
    """Fixed segments by the documented rules, as a list of pieces that is searched from its beginning each time."""

    segments: list[tuple[str, bool, list[list[int]]]] = field(default_factory=list)  # stream, small, [size, in use]

    def allocate(self, nbytes: int, stream: str) -> list[int]:
        size = max(512, (nbytes + 511) // 512 * 512)
        small = size <= MIB
        fits = [
            (piece[0], number, place)
            for number, (owner, of_small, pieces) in enumerate(self.segments)
            for place, piece in enumerate(pieces)
            if owner == stream and of_small == small and not piece[1] and piece[0] >= size
        ]
        if fits:
            _, number, place = min(fits)
        else:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            self.segments.append((stream, small, [[whole, 0]]))
            number, place = len(self.segments) - 1, 0
        pieces = self.segments[number][2]
        piece, rest = pieces[place], pieces[place][0] - size
        if rest >= 512 if small else rest > MIB:
            piece[0] = size
            pieces.insert(place + 1, [rest, 0])
        piece[1] = 1
        return piece

    def free(self, piece: list[int]) -> None:
        piece[1] = 0
        for _, _, pieces in self.segments:
            place = 0
            while place + 1 < len(pieces):
                if not pieces[place][1] and not pieces[place + 1][1]:
                    pieces[place][0] += pieces.pop(place + 1)[0]
                else:
                    place += 1

    @property
    def reserved_bytes(self) -> int:
        return sum(piece[0] for _, _, pieces in self.segments for piece in pieces)


@given(STEPS)
def test_fixed_segments_hold_what_a_brute_force_by_the_rules_holds(steps) -> None:
    memory, reference = CachingAllocator(expandable=False), Reference()
    live: list[tuple[Block, list[int]]] = []
    for size, victim, stream in steps:
        if victim < len(live):
            block, piece = live.pop(victim)
            memory.free(block)
            reference.free(piece)
        live.append((memory.allocate(size, stream), reference.allocate(size, stream)))

        assert memory.reserved_bytes == reference.reserved_bytes
        assert [nbytes for (_, _, nbytes), _ in live] == [piece[0] for _, piece in live]


@given(STEPS)
def test_growing_pools_give_the_blocks_of_growing_segments(steps) -> None:
    memory, reference = GrowingAllocator(), CachingAllocator()
    live: list[tuple[Block, Block]] = []
    for size, victim, stream in steps:
        if victim < len(live):
            mine, other = live.pop(victim)
            memory.free(mine)
            reference.free(other)
        live.append((memory.allocate(size, stream), reference.allocate(size, stream)))

        assert live[-1][0][1:] == live[-1][1][1:]
        assert memory.allocated_bytes == reference.allocated_bytes
        assert memory.peak_reserved_bytes == reference.peak_reserved_bytes
    assert dict(memory.streams()) == dict(reference.streams())


@given(STEPS, STEPS)
def test_requests_that_have_room_in_one_run_map_nothing(before, steps) -> None:
    """Whatever holes there are, and wherever tensors between lie."""
    memory = GrowingAllocator()
    live = [memory.allocate(size, "a") for size, _, _ in before]
    for _, victim, _ in before:
        if victim < len(live):
            memory.free(live.pop(victim))
    log, new, mapped = PassLog(memory), [], dict(memory.streams())
    room = {("a", which): memory.room_bytes(("a", which)) for which in (0, 1)}
    for size, victim, _ in steps:
        if victim < len(new):
            log.free(new.pop(victim))
        new.append(log.allocate(size // 8, "a"))

    if all(room[key] >= nbytes for key, nbytes in log.room_bytes().items()):
        event("has room")
        assert dict(memory.streams()) == mapped


@given(STEPS, st.booleans())
def test_live_blocks_never_overlap_and_everything_can_be_given_back(steps, expandable) -> None:
    memory = CachingAllocator(expandable=expandable)
    live: list[Block] = []
    for size, victim, stream in steps:
        if victim < len(live):
            memory.free(live.pop(victim))
        live.append(memory.allocate(size, stream))
        assert live[-1][2] >= size
        for pool in {pool for pool, _, _ in live}:
            spans = sorted((address, nbytes) for of, address, nbytes in live if of is pool)
            assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert memory.reserved_bytes >= memory.allocated_bytes == sum(nbytes for _, _, nbytes in live)

    pools = {pool for pool, _, _ in live}
    for block in live:
        memory.free(block)
    for pool in pools:
        pool.release()

    assert memory.allocated_bytes == 0
    assert all(pool.reserved_bytes == 0 for pool in pools)


@given(STEPS)
def test_one_stream_that_grows_holds_little_more_than_its_highest_address(steps) -> None:
    """Growing segments reserve pages up to the end of what was ever in use, and no page beyond it."""
    memory = CachingAllocator()
    live: list[Block] = []
    highest = {True: 0, False: 0}
    for size, victim, _ in steps:
        if victim < len(live):
            memory.free(live.pop(victim))
        block = memory.allocate(size, "a")
        live.append(block)
        pool, address, nbytes = block
        highest[pool.small] = max(highest[pool.small], address + nbytes)

    pages = sum(-(-end // page) * page for end, page in ((highest[True], 2 * MIB), (highest[False], 20 * MIB)))
    assert memory.reserved_bytes == pages


def test_segments_follow_the_rules_of_the_caching_allocator() -> None:
    """Up to 1 MiB from 2 MiB segments, below 10 MiB from 20 MiB ones, else rounded to 2 MiB; growing ones come in
    pages.
    """
    for size, fixed, growing in (
        (1, 2, 2),
        (MIB, 2, 2),
        (MIB + 1, 20, 20),
        (9 * MIB, 20, 20),
        (10 * MIB, 10, 20),
        (11 * MIB, 12, 20),
        (21 * MIB, 22, 40),
    ):
        for expandable, reserved in ((False, fixed), (True, growing)):
            memory = CachingAllocator(expandable=expandable)
            memory.allocate(size, "")
            assert memory.reserved_bytes == reserved * MIB


def test_what_was_freed_on_one_stream_is_no_use_to_another() -> None:
    memory = CachingAllocator()
    memory.free(memory.allocate(40 * MIB, "compute"))

    memory.allocate(40 * MIB, "reduce")

    assert memory.reserved_bytes == 80 * MIB


def test_fixed_segments_fragment_where_growing_ones_do_not() -> None:
    """40 MiB free in two pieces hold 40 MiB only if the two are neighbours."""
    for expandable, reserved in ((False, 80), (True, 40)):
        memory = CachingAllocator(expandable=expandable)
        for block in [memory.allocate(20 * MIB, "") for _ in range(2)]:
            memory.free(block)
        memory.allocate(40 * MIB, "")
        assert memory.reserved_bytes == reserved * MIB


@pytest.mark.parametrize("expandable", [True, False])
def test_a_full_gpu_gives_back_what_no_stream_uses_and_asks_again(expandable) -> None:
    memory = CachingAllocator(capacity_bytes=100 * MIB, expandable=expandable)
    memory.free(memory.allocate(60 * MIB, "gather"))

    kept = memory.allocate(60 * MIB, "compute")

    assert memory.retries == 1
    assert memory.reserved_bytes == 60 * MIB
    with pytest.raises(OutOfMemory):
        memory.allocate(60 * MIB, "gather")
    memory.free(kept)
    memory.allocate(60 * MIB, "gather")
    assert memory.retries == 3


def test_pages_inside_a_growing_segment_are_given_back_and_mapped_again() -> None:
    memory = CachingAllocator(capacity_bytes=120 * MIB)
    low, middle, high = (memory.allocate(40 * MIB, "compute") for _ in range(3))
    memory.free(middle)

    memory.allocate(40 * MIB, "other")
    assert memory.retries == 1
    assert memory.reserved_bytes == 120 * MIB

    memory.free(high)
    memory.free(low)
    again = memory.allocate(80 * MIB, "compute")
    assert again[1] == low[1], "the hole between the two free blocks is mapped again"
    assert memory.reserved_bytes == 120 * MIB
    assert BLOCK == 512
