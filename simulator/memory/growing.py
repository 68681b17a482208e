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
from math import inf

from simulator.memory.allocator import LARGE_SEGMENT, SMALL, SMALL_SEGMENT, Block, TensorEvent, whole_blocks


class AboveLimit(Exception):
    """More is reserved than was asked about."""


class GrowingPool:
    """The small or the large blocks of one stream."""

    __slots__ = ("end", "ends", "holes", "key", "mapped_bytes", "page", "starts")

    def __init__(self, stream: str, *, small: bool) -> None:
        self.key = stream, small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.holes: list[tuple[int, int]] = []  # (bytes, address), in order
        self.starts: dict[int, int] = {}  # bytes of holes by their address
        self.ends: dict[int, int] = {}  # addresses of holes by where they end
        self.end = 0  # nothing beyond it is in use
        self.mapped_bytes = 0

    @property
    def room_bytes(self) -> int:
        """The longest run of mapped addresses that are free."""
        return max(self.mapped_bytes - self.end, self.holes[-1][0] if self.holes else 0)


class GrowingAllocator:
    """Blocks for tensors by stream. More than `limit_bytes` reserved raise AboveLimit."""

    def __init__(self, *, limit_bytes: float = inf) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.pools: dict[tuple[str, bool], GrowingPool] = {}  # by stream, and whether their blocks are small

    def allocate(self, nbytes: int, stream: str) -> Block:
        """Return a block for `nbytes` that `stream` will write."""
        slots: dict[int, Block] = {}
        self.play(((0, whole_blocks(nbytes)),), slots, stream)
        return slots[0]

    def free(self, block: Block) -> None:
        """Take a block back."""
        self.free_all([block])

    def free_all(self, blocks: list[Block]) -> None:
        """Take several blocks back."""
        if blocks:
            slots, pool = dict(enumerate(blocks)), blocks[0][0]
            self._run([(slot, 0) for slot in slots], slots, pool, pool)

    def play(self, events: Iterable[TensorEvent], slots: dict[int, Block], stream: str) -> None:
        """Allocate and free tensors as `CachingAllocator.play` does."""
        self._run(events, slots, self._pool(stream, small=True), self._pool(stream, small=False))

    def _run(
        self, events: Iterable[TensorEvent], slots: dict[int, Block], small: GrowingPool, large: GrowingPool
    ) -> None:
        """Do events in turn. Nearly all the time of a replay is this loop's: what it needs of the pool that it is at
        is in variables.
        """
        pool = large
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
            if at is not pool:
                pool.end = end
                pool, holes, starts, ends, end = at, at.holes, at.starts, at.ends, at.end
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
                slots[slot] = pool, address, size
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

    def _map(self, pool: GrowingPool, end: int) -> None:
        mapped = -(-end // pool.page) * pool.page
        self.peak_reserved_bytes += mapped - pool.mapped_bytes
        pool.mapped_bytes = mapped
        if self.peak_reserved_bytes > self.limit_bytes:
            raise AboveLimit

    def streams(self) -> Iterator[tuple[str, int]]:
        """Yield every stream and the bytes that its pools hold."""
        for stream in dict.fromkeys(stream for stream, _ in self.pools):
            yield stream, sum(self._pool(stream, small=small).mapped_bytes for small in (True, False))

    def _pool(self, stream: str, *, small: bool) -> GrowingPool:
        pool = self.pools.get((stream, small))
        if pool is None:
            pool = self.pools[stream, small] = GrowingPool(stream, small=small)
        return pool
