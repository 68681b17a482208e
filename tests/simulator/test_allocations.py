"""The caching allocator model: its rounding rules, reuse, and what it can never do."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.allocations import BLOCK, CachingPool

MIB = 1 << 20


def test_segments_follow_the_rules_of_the_caching_allocator() -> None:
    """Up to 1 MiB from 2 MiB segments, below 10 MiB from 20 MiB ones, else rounded to 2 MiB."""
    for size, reserved in ((1, 2), (MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB, 10), (11 * MIB, 12)):
        pool = CachingPool()
        pool.allocate(size)
        assert pool.reserved_bytes == reserved * MIB


def test_freed_memory_is_used_again_and_neighbours_merge() -> None:
    pool = CachingPool()
    first, second = pool.allocate(8 * MIB), pool.allocate(8 * MIB)
    assert pool.reserved_bytes == 20 * MIB
    pool.free(first)
    pool.free(second)
    assert pool.allocate(20 * MIB) == first
    assert pool.reserved_bytes == 20 * MIB


def test_a_gap_too_small_is_no_use() -> None:
    """Fragmentation: 40 MiB free in two pieces do not hold 40 MiB."""
    pool = CachingPool()
    blocks = [pool.allocate(20 * MIB) for _ in range(2)]
    for block in blocks:
        pool.free(block)
    pool.allocate(40 * MIB)
    assert pool.reserved_bytes == 80 * MIB


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 10)), max_size=60))
def test_live_blocks_never_overlap(steps) -> None:
    pool, live = CachingPool(), []
    for size, victim in steps:
        if victim < len(live):
            pool.free(live.pop(victim)[0])
        live.append((pool.allocate(size), -(-size // BLOCK) * BLOCK))
        spans = sorted(live)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert pool.reserved_bytes >= sum(n for _, n in live)
