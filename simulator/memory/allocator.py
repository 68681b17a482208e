"""A model of torch's caching allocator of GPU memory: blocks of 512 bytes, pools by stream, segments, retries.

Source: c10/cuda/CUDACachingAllocator.cpp and c10/cuda/CUDAAllocatorConfig.h of torch 2.11 (its constants and its order
of attempts), docs.pytorch.org/docs/stable/notes/cuda.html#memory-management. Sizes are rounded to `BLOCK`. Sizes up to
`SMALL` come from the stream's small pool, others from its large one. A request takes the smallest free block of its
pool that is large enough, and splits off the rest. Without such a block the driver is asked for memory. If the driver
has none, all cached blocks of all streams that are not in use are returned to it, and it is asked again: a retry. If
that fails too, the rank is out of memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Any

from topology.units import MIB

BLOCK = 512
SMALL = MIB
SMALL_SEGMENT = 2 << 20
LARGE = 10 << 20
LARGE_SEGMENT = 20 << 20
ROUND_SEGMENT = 2 << 20


def whole_blocks(nbytes: int) -> int:
    """Return the bytes of the block that a tensor is given."""
    return -(-nbytes // BLOCK) * BLOCK or BLOCK


class OutOfMemory(Exception):
    """Memory that was given back did not suffice either."""


class Pool:
    """The small or the large blocks of one stream, in fixed segments that are returned only as a whole."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.reserved_bytes = 0
        self.least_rest = BLOCK if small else SMALL + 1  # smallest remainder that becomes a block of its own
        self.free: list[tuple[int, int]] = []  # (bytes, address)
        self.starts: dict[int, int] = {}  # bytes of free blocks by their address
        self.ends: dict[int, int] = {}  # addresses of free blocks by their end
        self.unmapped: dict[int, int] = {}  # bytes of unmapped addresses into which a block can grow
        self._segments: dict[int, int] = {}
        self._next = 0

    def needed(self, size: int) -> int:
        """Return the bytes to request from the driver when no free block holds `size`."""
        if self.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < LARGE else -(-size // ROUND_SEGMENT) * ROUND_SEGMENT

    def grow(self, size: int) -> None:
        """Add a segment with `size` free bytes."""
        whole = self.needed(size)
        self._add(self._next, whole)
        self._segments[self._next] = whole
        self._next += whole + BLOCK  # blocks of different segments are not adjacent
        self.reserved_bytes += whole

    def release(self) -> None:
        """Return unused memory to the driver: segments that are entirely free."""
        for size, address in list(self.free):
            if self._segments.get(address) == size:
                self._remove(address)
                del self._segments[address]
                self.reserved_bytes -= size

    def least_room(self, place: int) -> int:
        """Return the smallest fit: a block followed by unmapped addresses counts with the size it can grow to."""
        while place + 1 < len(self.free) and self._room(place + 1) < self._room(place):
            place += 1
        return place

    def _room(self, place: int) -> int:
        size, address = self.free[place]
        return size + self.unmapped.get(address + size, 0)

    def _add(self, address: int, size: int) -> None:
        self.starts[address], self.ends[address + size] = size, address
        insort(self.free, (size, address))

    def _remove(self, address: int) -> int:
        """Remove a block from the free ones; return its bytes."""
        size = self.starts.pop(address)
        del self.ends[address + size], self.free[bisect_left(self.free, (size, address))]
        return size


# Where a tensor lies: the pool of an allocator, the address and the bytes of the block.
Block = tuple[Any, int, int]
TensorEvent = tuple[int, int]  # the slot of a tensor that is allocated, and bytes of whole blocks; 0: it is freed


class ExpandablePool(Pool):
    """The same with `expandable_segments:True`: one segment that grows by pages and whose free pages can be returned.

    Unmapped addresses follow the last page and are where pages were returned.
    """

    def __init__(self, *, small: bool) -> None:
        super().__init__(small=small)
        self.least_rest = BLOCK
        self._page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._end = 0
        self.unmapped[0] = 1 << 80

    def needed(self, size: int) -> int:
        at, have, asked = self._start(size), 0, 0
        while have < size:
            more = self.starts.get(at, 0)
            if not more:
                more = self._pages(at, size - have)
                asked += more
            have, at = have + more, at + more
        return asked

    def grow(self, size: int) -> None:
        address = at = self._start(size)
        while at - address < size:
            at += self._remove(at) if at in self.starts else self._map(at, size - (at - address))
        self._add(address, at - address)

    def release(self) -> None:
        for size, address in list(self.free):
            low = -(-address // self._page) * self._page
            high = (address + size) // self._page * self._page
            if low < high:
                self._remove(address)
                for start, stop in ((address, low), (high, address + size)):
                    if start < stop:
                        self._add(start, stop - start)
                self._unmap(low, high)

    def _start(self, size: int) -> int:
        """Return the start of a run of free addresses for `size` bytes: the lowest run that includes unmapped ones."""
        for hole in sorted(self.unmapped):
            start = at = self.ends.get(hole, hole)
            while at - start < size and (more := self.starts.get(at) or self.unmapped.get(at)):
                at += more
            if at - start >= size:
                return start
        raise AssertionError("addresses do not end")

    def _pages(self, hole: int, wanted: int) -> int:
        return min(-(-wanted // self._page) * self._page, self.unmapped[hole])

    def _map(self, hole: int, wanted: int) -> int:
        """Map the first pages of a hole, enough for `wanted` bytes if it has as many; return the bytes mapped."""
        size = self._pages(hole, wanted)
        left = self.unmapped.pop(hole) - size
        if left:
            self.unmapped[hole + size] = left
        if hole == self._end:
            self._end += size
        self.reserved_bytes += size
        return size

    def _unmap(self, low: int, high: int) -> None:
        """Unmap the pages from `low` to `high`, which must not be among the free blocks."""
        self.unmapped[low] = high - low
        if high == self._end:
            self.unmapped[low] += self.unmapped.pop(high)
            self._end = low
        self.reserved_bytes -= high - low


class CachingAllocator:
    """Blocks for tensors by stream. `capacity_bytes`: what the driver has for it; None is as much as is asked for."""

    def __init__(self, *, capacity_bytes: float | None = None, expandable: bool = True) -> None:
        self.capacity_bytes = capacity_bytes
        self.retries = 0
        self.allocated_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.expandable = expandable
        self._small: dict[str, Pool] = {}  # by stream
        self._large: dict[str, Pool] = {}
        self._pools: list[tuple[str, Pool]] = []

    @property
    def reserved_bytes(self) -> int:
        return sum(pool.reserved_bytes for _, pool in self._pools)

    def allocate(self, nbytes: int, stream: str) -> Block:
        """Return a block of `nbytes` for `stream`, from the smallest free block of its pool that is large enough; the
        rest stays free if it is large enough for a block. Raises OutOfMemory.
        """
        size = whole_blocks(nbytes)
        pools = self._small if size <= SMALL else self._large
        pool = pools.get(stream) or self._new_pool(pools, stream)
        free = pool.free
        place = bisect_left(free, (size,))
        if place == len(free):
            self._make_room(pool, size)
            pool.grow(size)
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
            place = bisect_left(free, (size,))
        found, address = free[place]
        if address + found in pool.unmapped:
            place = pool.least_room(place)
            found, address = free[place]
        del free[place], pool.starts[address]
        rest = found - size
        if rest < pool.least_rest:
            del pool.ends[address + found]
            size = found
        else:
            start = address + size
            pool.starts[start], pool.ends[start + rest] = rest, start
            insort(free, (rest, start))
        self.allocated_bytes += size
        if self.allocated_bytes > self.peak_allocated_bytes:  # noqa: PLR1730 - of every tensor, a call less
            self.peak_allocated_bytes = self.allocated_bytes
        return pool, address, size

    def free(self, block: Block) -> None:
        """Free a block and merge it with free neighbours."""
        pool, address, size = block
        self.allocated_bytes -= size
        free, starts, ends = pool.free, pool.starts, pool.ends
        end = address + size
        after = starts.pop(end, 0)
        if after:
            del free[bisect_left(free, (after, end))]
            end += after
        before = ends.pop(address, None)
        if before is not None:
            del free[bisect_left(free, (starts[before], before))]
            address = before
        starts[address], ends[end] = end - address, address
        insort(free, (end - address, address))

    def play(self, events: Iterable[TensorEvent], slots: dict[int, Block], stream: str) -> None:
        """Allocate and free tensors, which are in `slots` while they are there. What is not there is not freed."""
        for slot, nbytes in events:
            if nbytes:
                slots[slot] = self.allocate(nbytes, stream)
            elif slot in slots:
                self.free(slots.pop(slot))

    def streams(self) -> Iterator[tuple[str, int]]:
        """Yield every stream with the reserved bytes of its pools."""
        for stream in dict.fromkeys(stream for stream, _ in self._pools):
            yield stream, sum(pool.reserved_bytes for owner, pool in self._pools if owner == stream)

    def _new_pool(self, pools: dict[str, Pool], stream: str) -> Pool:
        pool = pools[stream] = (ExpandablePool if self.expandable else Pool)(small=pools is self._small)
        self._pools.append((stream, pool))
        return pool

    def _make_room(self, pool: Pool, size: int) -> None:
        if self.capacity_bytes is None or self.reserved_bytes + pool.needed(size) <= self.capacity_bytes:
            return
        for _, other in self._pools:
            other.release()
        self.retries += 1
        if self.reserved_bytes + pool.needed(size) > self.capacity_bytes:
            raise OutOfMemory(
                f"{size} bytes are asked for, {self.reserved_bytes} of {self.capacity_bytes:.0f} are held"
            )
