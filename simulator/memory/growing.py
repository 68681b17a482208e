"""torch's caching allocator with growing segments and as much memory as is asked for: the blocks of
`CachingAllocator`, sooner found.

Without a limit nothing is given back to the driver, so a pool is one run of addresses: blocks in use, holes between
them, and an end, behind which pages are mapped as they are needed. A request goes to the smallest hole that holds it,
the lowest of equal ones, else to the end. Where pages begin changes no address, and what is reserved is the highest end
in pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from copy import copy
from math import inf

from simulator.memory.allocator import LARGE_SEGMENT, SMALL, SMALL_SEGMENT, Block, TensorEvent, whole_blocks


class AboveLimit(Exception):
    """More is reserved than was asked about."""


PoolKey = tuple[str, int]  # the stream, and 0 for its small blocks, 1 for its large ones


class GrowingPool:
    """The small or the large blocks of one stream."""

    __slots__ = ("end", "ends", "holes", "key", "mapped_bytes", "page", "starts")

    def __init__(self, key: PoolKey) -> None:
        self.key = key
        self.page = (SMALL_SEGMENT, LARGE_SEGMENT)[key[1]]
        self.holes: list[tuple[int, int]] = []  # (bytes, address), in order
        self.starts: dict[int, int] = {}  # bytes of holes by their address
        self.ends: dict[int, int] = {}  # addresses of holes by where they end
        self.end = 0  # no address from here on is in use
        self.mapped_bytes = 0

    def copy(self) -> GrowingPool:
        found = GrowingPool(self.key)
        found.holes, found.starts, found.ends = [*self.holes], {**self.starts}, {**self.ends}
        found.end, found.mapped_bytes = self.end, self.mapped_bytes
        return found


class GrowingAllocator:
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

    def allocate(self, nbytes: int, stream: str) -> Block:
        """Return a block for `nbytes` that `stream` will write."""
        slots: dict[int, Block] = {}
        self.play([(0, whole_blocks(nbytes))], slots, stream)
        return slots[0]

    def free(self, block: Block) -> None:
        """Take a block back."""
        self.play([(0, 0)], {0: block}, block[0][0])

    def play(self, events: Iterable[TensorEvent], slots: dict[int, Block], stream: str) -> None:
        """Allocate and free tensors as `CachingAllocator.play` does.

        Nearly all the time of a replay is this loop's: what it needs of the pool that it is at is in variables.
        """
        small, large = self.stream_pools.get(stream) or self._add(stream)
        key, pools = large, self.pools
        pool = pools[key]
        holes, starts, ends, end = pool.holes, pool.starts, pool.ends, pool.end
        used, most = self.allocated_bytes, self.peak_allocated_bytes
        for slot, size in events:
            if size:
                at = large if size > SMALL else small
            else:
                block = slots.pop(slot, None)
                if block is None:
                    continue
                at, address, nbytes = block
            if at is not key:
                pool.end = end
                key, pool = at, pools[at]
                holes, starts, ends, end = pool.holes, pool.starts, pool.ends, pool.end
            if size:
                used += size
                if used > most:  # noqa: PLR1730 - of every tensor, a call less
                    most = used
                place = bisect_left(holes, (size,))
                if place == len(holes):
                    address = end
                    end += size
                    if end > pool.mapped_bytes:
                        self._map(pool, end)
                else:
                    found, address = holes.pop(place)
                    del starts[address]
                    behind = address + size
                    if found > size:
                        rest = found - size
                        starts[behind], ends[behind + rest] = rest, behind
                        insort(holes, (rest, behind))
                    else:
                        del ends[behind]
                slots[slot] = key, address, size
                continue
            used -= nbytes
            behind = address + nbytes
            before = ends.pop(address, None)
            if before is not None:
                del holes[bisect_left(holes, (starts[before], before))]
                address = before
            if behind == end:
                end = address
                starts.pop(address, None)
                continue
            after = starts.pop(behind, 0)
            if after:
                del holes[bisect_left(holes, (after, behind))]
                behind += after
            starts[address], ends[behind] = behind - address, address
            insort(holes, (behind - address, address))
        pool.end = end
        self.allocated_bytes, self.peak_allocated_bytes = used, most

    def _add(self, stream: str) -> tuple[PoolKey, PoolKey]:
        keys = self.stream_pools[stream] = (stream, 0), (stream, 1)
        for key in keys:
            self.pools[key] = GrowingPool(key)
        return keys

    def _map(self, pool: GrowingPool, end: int) -> None:
        mapped = -(-end // pool.page) * pool.page
        self.peak_reserved_bytes += mapped - pool.mapped_bytes
        pool.mapped_bytes = mapped
        if self.peak_reserved_bytes > self.limit_bytes:
            raise AboveLimit

    def streams(self) -> Iterator[tuple[str, int]]:
        """Yield every stream and the bytes that its pools hold."""
        for stream, keys in self.stream_pools.items():
            yield stream, sum(self.pools[key].mapped_bytes for key in keys)

    def room_bytes(self, key: PoolKey) -> int:
        """Return the bytes of the longest run of mapped addresses of a pool that are free."""
        pool = self.pools.get(key)
        return 0 if pool is None else max(pool.mapped_bytes - pool.end, pool.holes[-1][0] if pool.holes else 0)
