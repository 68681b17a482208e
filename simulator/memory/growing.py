"""torch's caching allocator with growing segments and as much memory as is asked for: the blocks of
`CachingAllocator`, sooner found.

Without a limit nothing is given back to the driver, so a pool is one run of addresses: blocks in use, and holes, the
last of which has no end; behind its start pages are mapped as they are needed. A request goes to the smallest hole that
holds it, the lowest of equal ones. Where pages begin changes no address, and what is reserved is the highest end in
pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from copy import copy
from math import inf

from simulator.memory.allocator import LARGE_SEGMENT, SMALL, SMALL_SEGMENT, Block, TensorEvent, whole_blocks

# A hole is one number, which is compared sooner than two: its bytes, and in the lower bits its address. Absurd
# questions add up to more than 64 bits say.
ADDRESS_BITS = 120
ADDRESS = (1 << ADDRESS_BITS) - 1
NO_END = 1 << ADDRESS_BITS - 1  # bytes of a hole without an end


class AboveLimit(Exception):
    """More is reserved than was asked about."""


PoolKey = tuple[str, int]  # the stream, and 0 for its small blocks, 1 for its large ones


class GrowingPool:
    """The small or the large blocks of one stream."""

    __slots__ = ("ends", "holes", "key", "mapped_bytes", "page", "starts")

    def __init__(self, key: PoolKey) -> None:
        self.key = key
        self.page = (SMALL_SEGMENT, LARGE_SEGMENT)[key[1]]
        self.holes = [NO_END << ADDRESS_BITS]  # in order: the smallest first, of equal ones the lowest
        self.starts = {0: NO_END}  # bytes of holes by their address
        self.ends = {NO_END: 0}  # addresses of holes by where they end
        self.mapped_bytes = 0

    def copy(self) -> GrowingPool:
        found = GrowingPool(self.key)
        found.holes, found.starts, found.ends = [*self.holes], {**self.starts}, {**self.ends}
        found.mapped_bytes = self.mapped_bytes
        return found

    def room_bytes(self) -> int:
        """Return the bytes of the longest run of mapped addresses that are free."""
        behind = self.mapped_bytes - (self.holes[-1] & ADDRESS)
        return max(behind, self.holes[-2] >> ADDRESS_BITS if len(self.holes) > 1 else 0)


class Played:
    """An allocator that takes all requests as events."""

    def play(self, events: Iterable[TensorEvent], slots: dict[int, Block], stream: str) -> None:
        raise NotImplementedError

    def allocate(self, nbytes: int, stream: str) -> Block:
        """Return a block for `nbytes` that `stream` will write."""
        slots: dict[int, Block] = {}
        self.play([(0, whole_blocks(nbytes))], slots, stream)
        return slots[0]

    def free(self, block: Block) -> None:
        """Take a block back."""
        self.play([(0, 0)], {0: block}, block[0][0])


class GrowingAllocator(Played):
    """Blocks for tensors by stream; a block names its pool, so that a copy of the allocator has the same blocks. More
    than `limit_bytes` reserved raise AboveLimit.
    """

    def __init__(self, *, limit_bytes: float = inf) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.pools: dict[PoolKey, GrowingPool] = {}
        self.stream_pools: dict[str, tuple[PoolKey, PoolKey]] = {}  # of the small and of the large blocks of a stream

    def copy(self) -> GrowingAllocator:
        """Return an allocator in the same state."""
        found = copy(self)
        found.pools = {key: pool.copy() for key, pool in self.pools.items()}
        found.stream_pools = {**self.stream_pools}
        return found

    def play(self, events: Iterable[TensorEvent], slots: dict[int, Block], stream: str) -> None:
        """Allocate and free tensors as `CachingAllocator.play` does.

        Nearly all the time of a replay is this loop's: what it needs of the pool that it is at is in variables.
        """
        small, large = self.stream_pools.get(stream) or self._add(stream)
        key, pools = large, self.pools
        pool = pools[key]
        holes, starts, ends, mapped = pool.holes, pool.starts, pool.ends, pool.mapped_bytes
        used, most = self.allocated_bytes, self.peak_allocated_bytes
        for slot, size in events:
            if size:
                at = large if size > SMALL else small
            elif slot in slots:
                at, address, nbytes = slots[slot]
                del slots[slot]
            else:
                continue
            if at is not key:
                key, pool = at, pools[at]
                holes, starts, ends, mapped = pool.holes, pool.starts, pool.ends, pool.mapped_bytes
            if size:
                used += size
                if used > most:  # noqa: PLR1730 - of every tensor, a call less
                    most = used
                place = bisect_left(holes, size << ADDRESS_BITS)
                hole = holes[place]
                address = hole & ADDRESS
                behind, rest = address + size, (hole >> ADDRESS_BITS) - size
                slots[slot] = key, address, size
                del starts[address]
                if rest:
                    starts[behind], ends[behind + rest] = rest, behind
                    hole = rest << ADDRESS_BITS | behind
                    if place and holes[place - 1] > hole:
                        del holes[place]
                        insort(holes, hole, 0, place)
                    else:
                        holes[place] = hole
                    if behind > mapped:
                        mapped = self._map(pool, behind)
                else:
                    del ends[behind], holes[place]
                continue
            used -= nbytes
            behind = address + nbytes
            if address in ends:
                before = ends[address]
                del ends[address], holes[bisect_left(holes, starts[before] << ADDRESS_BITS | before)]
                address = before
            if behind in starts:
                after = starts[behind]
                del starts[behind], holes[bisect_left(holes, after << ADDRESS_BITS | behind)]
                behind += after
            nbytes = behind - address
            starts[address], ends[behind] = nbytes, address
            insort(holes, nbytes << ADDRESS_BITS | address)
        self.allocated_bytes, self.peak_allocated_bytes = used, most

    def _add(self, stream: str) -> tuple[PoolKey, PoolKey]:
        keys = self.stream_pools[stream] = (stream, 0), (stream, 1)
        for key in keys:
            self.pools[key] = GrowingPool(key)
        return keys

    def _map(self, pool: GrowingPool, end: int) -> int:
        """Map the pages of a pool up to an address; return the bytes that are mapped then."""
        mapped = -(-end // pool.page) * pool.page
        self.peak_reserved_bytes += mapped - pool.mapped_bytes
        pool.mapped_bytes = mapped
        if self.peak_reserved_bytes > self.limit_bytes:
            raise AboveLimit
        return mapped

    def streams(self) -> Iterator[tuple[str, int]]:
        """Yield every stream and the bytes that its pools hold."""
        for stream, keys in self.stream_pools.items():
            yield stream, sum(self.pools[key].mapped_bytes for key in keys)

    def room_bytes(self, key: PoolKey) -> int:
        """Return the bytes of the longest run of mapped addresses of a pool that are free."""
        return self.pools[key].room_bytes() if key in self.pools else 0
