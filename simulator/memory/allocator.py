"""torch's caching allocator of GPU memory, by its rules: blocks of 512 bytes, pools a stream, segments, retries.

Source: c10/cuda/CUDACachingAllocator.cpp and c10/cuda/CUDAAllocatorConfig.h of torch 2.11 (its constants and its order
of attempts), docs.pytorch.org/docs/stable/notes/cuda.html#memory-management. Sizes are rounded to `BLOCK`. Up to
`SMALL` they come from the stream's small pool, else from its large one. A request takes the smallest free block of its
pool that holds it, and splits off what it does not need. If none does, memory is asked of the driver; if the driver has
none, every cached block that is not in use is given back, of all streams, and it is asked once more: a retry. If that
fails, too, memory is out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from topology.units import MIB

BLOCK = 512
SMALL = MIB
SMALL_SEGMENT = 2 << 20
LARGE = 10 << 20
LARGE_SEGMENT = 20 << 20
ROUND_SEGMENT = 2 << 20


class OutOfMemory(Exception):
    """Memory that was given back did not suffice either."""


class Block:
    """A piece of a segment between its neighbours; `mapped` unless it is only addresses that a segment may grow
    into.
    """

    __slots__ = ("address", "after", "before", "free", "mapped", "pool", "size", "used_on")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.mapped = pool, address, size, mapped
        self.before: Block | None = None
        self.after: Block | None = None
        self.free = False
        self.used_on: set[str] = set()


class Pool:
    """The small or the large blocks of one stream, in fixed segments that are returned only when they are whole."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.reserved_bytes = 0
        self._free: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}
        self._next = 0

    def find(self, size: int) -> Block | None:
        """Return the smallest free block of at least `size` bytes, taken off the free ones."""
        place = bisect_left(self._free, (size, -1))
        if place == len(self._free):
            return None
        return self._blocks[self._free.pop(self._preferred(place))[1]]

    def needed(self, size: int) -> int:
        """Return the bytes that the driver is asked for where nothing free holds `size`."""
        if self.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < LARGE else -(-size // ROUND_SEGMENT) * ROUND_SEGMENT

    def grow(self, size: int) -> Block:
        """Return a new segment as a block."""
        block = Block(self, self._next, self.needed(size))
        self._blocks[block.address] = block
        self._next += block.size
        self.reserved_bytes += block.size
        return block

    def take(self, block: Block, size: int) -> None:
        """Put a block to use, and split off what is left of it if that is worth a block."""
        block.free = False
        rest = block.size - size
        if self._splits(rest):
            tail = Block(self, block.address + size, rest)
            self._blocks[tail.address] = tail
            _link(tail, block.after)
            _link(block, tail)
            block.size = size
            self._set_free(tail)

    def give(self, block: Block) -> None:
        """Take a block back and join it with free neighbours."""
        for other in (block.after, block.before):
            if other is not None and other.free and other.mapped:
                self._unset_free(other)
                block = self._merged(block, other)
        self._set_free(block)

    def release(self) -> None:
        """Return to the driver what is not in use: segments that are free as a whole."""
        for _, address in list(self._free):
            block = self._blocks[address]
            if block.before is None and block.after is None:
                self._unset_free(block)
                del self._blocks[address]
                self.reserved_bytes -= block.size

    def _preferred(self, place: int) -> int:
        return place

    def _splits(self, rest: int) -> bool:
        return rest >= BLOCK if self.small else rest > SMALL

    def _set_free(self, block: Block) -> None:
        block.free = True
        insort(self._free, (block.size, block.address))

    def _unset_free(self, block: Block) -> None:
        del self._free[bisect_left(self._free, (block.size, block.address))]

    def _merged(self, a: Block, b: Block) -> Block:
        low, high = (a, b) if a.address < b.address else (b, a)
        low.size += high.size
        _link(low, high.after)
        del self._blocks[high.address]
        low.free = False
        return low


class ExpandablePool(Pool):
    """Likewise with `expandable_segments:True`: one segment that grows by pages, and whose free pages can be returned.

    Free addresses that are not mapped follow the last page, and stand where pages were returned.
    """

    def __init__(self, *, small: bool) -> None:
        super().__init__(small=small)
        self._page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._end = Block(self, 0, 1 << 80, mapped=False)
        self._end.free = True
        self._holes: list[Block] = []  # unmapped addresses, lowest first; `_end` is not among them

    def needed(self, size: int) -> int:
        have = asked = 0
        block: Block | None = self._start(size)
        while have < size and block is not None:
            more = block.size if block.mapped else self._pages(size - have, block)
            have, asked, block = have + more, asked + (0 if block.mapped else more), block.after
        return asked

    def grow(self, size: int) -> Block:
        start = self._start(size)
        if not start.mapped:
            block = self._mapped(start, size)
        else:
            self._unset_free(start)
            block = start
        while block.size < size:
            following = block.after
            if following is None:
                raise AssertionError("a run of free addresses is shorter than was seen")
            if following.mapped:
                self._unset_free(following)
            else:
                following = self._mapped(following, size - block.size)
            block = self._merged(block, following)
        return block

    def release(self) -> None:
        for _, address in list(self._free):
            block = self._blocks[address]
            low = -(-block.address // self._page) * self._page
            high = (block.address + block.size) // self._page * self._page
            if low < high:
                self._unmap(block, low, high)

    def _start(self, size: int) -> Block:
        """Return the block with which a run of free addresses begins that holds `size`, the lowest with unmapped
        ones.
        """
        for hole in (*self._holes, self._end):
            start = hole.before if hole.before is not None and hole.before.free and hole.before.mapped else hole
            have, block = 0, start
            while have < size and block is not None and block.free:
                have, block = have + block.size, block.after  # type: ignore[assignment]  # ends with None
            if have >= size:
                return start
        raise AssertionError("addresses do not end")

    def _pages(self, wanted: int, hole: Block) -> int:
        return min(-(-wanted // self._page) * self._page, hole.size)

    def _mapped(self, hole: Block, wanted: int) -> Block:
        """Map the first pages of a hole, enough for `wanted` bytes if it has them."""
        size = self._pages(wanted, hole)
        block = Block(self, hole.address, size)
        self._blocks[block.address] = block
        _link(hole.before, block)
        if size == hole.size:
            self._holes.remove(hole)
            _link(block, hole.after)
        else:
            hole.address, hole.size = hole.address + size, hole.size - size
            _link(block, hole)
        self.reserved_bytes += size
        return block

    def _unmap(self, block: Block, low: int, high: int) -> None:
        """Unmap pages inside a free block; what stays of it on either side is free blocks."""
        self._unset_free(block)
        del self._blocks[block.address]
        end, before, after = block.address + block.size, block.before, block.after
        hole = Block(self, low, high - low, mapped=False)
        hole.free = True
        parts = [hole]
        for start, stop in ((block.address, low), (high, end)):
            if start < stop:
                part = Block(self, start, stop - start)
                self._blocks[start] = part
                self._set_free(part)
                parts.append(part)
        parts.sort(key=lambda part: part.address)
        for one, other in zip([before, *parts], [*parts, after], strict=True):
            _link(one, other)
        self.reserved_bytes -= high - low
        if hole.after is self._end:
            self._end.address, self._end.size = low, self._end.size + hole.size
            _link(hole.before, self._end)
        else:
            self._holes.append(hole)
            self._holes.sort(key=lambda one: one.address)

    def _preferred(self, place: int) -> int:
        """Return the fit that grows least: a block that unmapped addresses follow counts as long as it may become."""
        while place + 1 < len(self._free) and self._room(place + 1) < self._room(place):
            place += 1
        return place

    def _room(self, place: int) -> int:
        size, address = self._free[place]
        after = self._blocks[address].after
        return size + (after.size if after is not None and not after.mapped else 0)

    def _splits(self, rest: int) -> bool:
        return rest >= BLOCK


class CachingAllocator:
    """Blocks for tensors by stream. `capacity_bytes`: what the driver has for it; None is as much as is asked for."""

    def __init__(self, *, capacity_bytes: float | None = None, expandable: bool = True) -> None:
        self.capacity_bytes = capacity_bytes
        self.retries = 0
        self.allocated_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._kind = ExpandablePool if expandable else Pool
        self._pools: dict[tuple[str, bool], Pool] = {}
        self._waiting: list[Block] = []  # freed, and still used on another stream

    @property
    def reserved_bytes(self) -> int:
        return sum(pool.reserved_bytes for pool in self._pools.values())

    def allocate(self, nbytes: int, stream: str) -> Block:
        """Return a block for `nbytes` that `stream` will write. Raises OutOfMemory."""
        size = max(BLOCK, -(-nbytes // BLOCK) * BLOCK)
        small = size <= SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = self._kind(small=small)
        block = pool.find(size)
        if block is None:
            self._make_room(pool, size)
            block = pool.grow(size)
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        pool.take(block, size)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back: at once, or when the other streams that use it have got there."""
        self.allocated_bytes -= block.size
        if block.used_on:
            self._waiting.append(block)
        else:
            block.pool.give(block)

    def record_stream(self, block: Block, stream: str) -> None:
        """Note that a stream other than the block's own uses it: freed, it waits for `reached` of that stream."""
        block.used_on.add(stream)

    def reached(self, stream: str) -> None:
        """Have a stream get to the end of all that was issued to it."""
        waiting, self._waiting = self._waiting, []
        for block in waiting:
            block.used_on.discard(stream)
            if block.used_on:
                self._waiting.append(block)
            else:
                block.pool.give(block)

    def streams(self) -> Iterator[tuple[str, int]]:
        """Yield every stream and the bytes that its pools hold."""
        for stream in dict.fromkeys(stream for stream, _ in self._pools):
            yield stream, sum(pool.reserved_bytes for (owner, _), pool in self._pools.items() if owner == stream)

    def _make_room(self, pool: Pool, size: int) -> None:
        if self.capacity_bytes is None or self.reserved_bytes + pool.needed(size) <= self.capacity_bytes:
            return
        for stream in {stream for block in self._waiting for stream in block.used_on}:
            self.reached(stream)  # the allocator waits for the device before it gives anything back
        for other in self._pools.values():
            other.release()
        self.retries += 1
        if self.reserved_bytes + pool.needed(size) > self.capacity_bytes:
            raise OutOfMemory(
                f"{size} bytes are asked for, {self.reserved_bytes} of {self.capacity_bytes:.0f} are held"
            )


def _link(before: Block | None, after: Block | None) -> None:
    if before is not None:
        before.after = after
    if after is not None:
        after.before = before
