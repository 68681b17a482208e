"""What a simulated rank has allocated over time, and what a caching allocator holds for it."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import simpy


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The most memory a rank had allocated, when, for which buffer, and what it was made of.

    `reserved_bytes` is what a caching allocator holds at the end: it never gives anything back by itself.
    """

    peak_bytes: int
    at_s: float
    by_category: dict[str, int]
    buffer: str = ""
    reserved_bytes: int = 0


class Allocations:
    def __init__(self, env: simpy.Environment, *, keep: bool) -> None:
        self.env = env
        self.keep = keep
        self.live: dict[str, tuple[int, str, str, int]] = {}
        self.total = 0
        self.by_category: dict[str, int] = {}
        self.pools: dict[str, CachingPool] = {}
        self.samples: list[tuple[float, float]] = []
        self._peak = MemoryPeak(0, 0.0, {})

    @property
    def peak(self) -> MemoryPeak:
        p = self._peak
        reserved = sum(pool.reserved_bytes for pool in self.pools.values())
        return MemoryPeak(p.peak_bytes, p.at_s, p.by_category, p.buffer, reserved)

    def allocate(self, name: str, nbytes: int, category: str, pool: str = "") -> None:
        place = self.pools.setdefault(pool, CachingPool()).allocate(nbytes)
        self.live[name] = nbytes, category, pool, place
        self._change(nbytes, category)
        if self.total > self._peak.peak_bytes:
            made_of = {k: v for k, v in self.by_category.items() if v}
            self._peak = MemoryPeak(self.total, self.env.now, made_of, name)

    def free(self, name: str) -> None:
        nbytes, category, pool, place = self.live.pop(name)
        self.pools[pool].free(place)
        self._change(-nbytes, category)

    def _change(self, nbytes: int, category: str) -> None:
        self.total += nbytes
        self.by_category[category] = self.by_category.get(category, 0) + nbytes
        if self.keep:
            self.samples.append((self.env.now, float(self.total)))


# The rules of torch's CUDACachingAllocator (c10/cuda/CUDACachingAllocator.cpp, its constants): sizes are rounded to
# BLOCK; up to SMALL they come from segments of SMALL_SEGMENT, below LARGE from segments of LARGE_SEGMENT, else from a
# segment of their own rounded to ROUND_SEGMENT. A large block is split if more than SMALL would be left.
BLOCK = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE = 10 << 20
LARGE_SEGMENT = 20 << 20
ROUND_SEGMENT = 2 << 20


class CachingPool:
    """One stream's pool: best fit among free blocks, split and merged again, segments never returned."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._blocks: dict[int, _Block] = {}  # by address
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # (size, address): small, large
        self._next = 0

    def allocate(self, nbytes: int) -> int:
        """Return the address of a block of `nbytes`."""
        size = max(BLOCK, -(-nbytes // BLOCK) * BLOCK)
        small = size <= SMALL
        free = self._free[0 if small else 1]
        found = bisect_left(free, (size, -1))
        if found < len(free):
            _, address = free.pop(found)
            block = self._blocks[address]
        else:
            block = self._new_segment(size)
        block.free = False
        rest = block.size - size
        if rest >= BLOCK if small else rest > SMALL:
            tail = _Block(block.address + size, rest, block, block.after, free=True, small=small)
            if block.after is not None:
                block.after.before = tail
            block.size, block.after = size, tail
            self._blocks[tail.address] = tail
            insort(free, (tail.size, tail.address))
        return block.address

    def free(self, address: int) -> None:
        block = self._blocks[address]
        free = self._free[0 if block.small else 1]
        for other in (block.after, block.before):
            if other is not None and other.free:
                free.remove((other.size, other.address))
                block = _merge(block, other, self._blocks)
        block.free = True
        insort(free, (block.size, block.address))

    def _new_segment(self, size: int) -> _Block:
        if size <= SMALL:
            segment = SMALL_SEGMENT
        elif size < LARGE:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        block = _Block(self._next, segment, None, None, free=False, small=size <= SMALL)
        self._blocks[block.address] = block
        self._next += segment
        self.reserved_bytes += segment
        return block


class _Block:
    __slots__ = ("address", "after", "before", "free", "size", "small")

    def __init__(
        self, address: int, size: int, before: _Block | None, after: _Block | None, *, free: bool, small: bool
    ) -> None:
        self.address, self.size, self.before, self.after, self.free, self.small = (
            address,
            size,
            before,
            after,
            free,
            small,
        )


def _merge(a: _Block, b: _Block, blocks: dict[int, _Block]) -> _Block:
    """Join two neighbours into the one with the lower address."""
    low, high = (a, b) if a.address < b.address else (b, a)
    low.size += high.size
    low.after = high.after
    if high.after is not None:
        high.after.before = low
    del blocks[high.address]
    low.free = False
    return low


def last_at_each_time(samples: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return samples without those that another one replaces at the same moment."""
    return tuple(dict(samples).items())
