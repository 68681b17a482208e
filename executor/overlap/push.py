"""Copy engines push shards into the peers' symmetric memory, and raise a flag there when a piece has arrived.

The source is any tensor of ours, so nothing is first copied into symmetric memory; no multiprocessor is taken from the
product that runs meanwhile. Rank r sends to r - 1 first, then to r - 2, ...: everybody receives first what it consumes
first, and every receiver hears one sender at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from executor import symmetric
from executor.symmetric import Workspace

MAX_PIECES = 8
ROWS_OF_TILES = 256
FLAG_RANGE = MAX_PIECES * 64  # flags of one set: for up to 64 ranks, an NVLink domain of today

_streams: dict[int, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of our copies, of high priority: a copy that waits for a kernel's launch would be late."""
    if device.index not in _streams:
        _streams[device.index] = torch.cuda.Stream(device, priority=-1)
    return _streams[device.index]


class Gathering:
    """An all-gather under way: where shards arrive, and which flag says so."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup, *, pieces: int, keep: bool) -> None:
        """Start to push `x` (R, K) to all peers. With `keep` it goes to its place among the gathered ones, too."""
        self.rows, depth = x.shape
        self.space: Workspace = symmetric.workspace(group, "gather", x.device)
        rank, world = self.space.rank, self.space.world
        self.space.reserve(world * x.numel() * x.element_size(), 2 * FLAG_RANGE)
        turn = self.space.turn()
        # Whole tiles of rows, whatever their height: a piece ends where a tile ends.
        height = -(-self.rows // min(pieces, MAX_PIECES) // ROWS_OF_TILES) * ROWS_OF_TILES
        self.bounds = [(first, min(first + height, self.rows)) for first in range(0, self.rows, height)]
        self.first_flag = turn * FLAG_RANGE
        start = turn * self.space.set_bytes
        shape = (world * self.rows, depth)
        self.gathered = self.space.slots.on(rank, shape, x.dtype, start)
        self.space.fence()
        self.x = x = x.contiguous()
        self.current, self.side = torch.cuda.current_stream(), side_stream(x.device)
        self.side.wait_stream(self.current)
        with torch.cuda.stream(self.side):
            for step in range(1, world):
                peer = (rank - step) % world
                theirs = self.space.slots.on(peer, shape, x.dtype, start)[rank * self.rows :]
                for number, (first, last) in enumerate(self.bounds):
                    theirs[first:last].copy_(x[first:last], non_blocking=True)
                    raise_flag(self.space, peer, self.first_flag + rank * len(self.bounds) + number)
            if keep:
                self.gathered[rank * self.rows : (rank + 1) * self.rows].copy_(x, non_blocking=True)

    @property
    def piece_rows(self) -> int:
        """Rows of every piece but the last; pieces are cut so that this tells where each begins."""
        return self.bounds[0][1]

    @property
    def flags(self) -> Tensor:
        """This rank's flags of this call, int32 (W, pieces)."""
        space, count = self.space, len(self.bounds)
        return space.flags.on(space.rank, (space.world, count), torch.int32, 4 * self.first_flag)

    def wait(self, source: int, first: int = 0, count: int | None = None) -> None:
        """Make the current stream wait for `count` pieces of a rank's shard, and lower their flags."""
        from executor.kernels.copies import wait_and_lower  # noqa: PLC0415 - triton

        wait_and_lower[(1,)](
            self.flags, source * len(self.bounds) + first, 1, count or len(self.bounds), self.space.error, 1 + source,
            symmetric.POLLS, num_warps=1,
        )  # fmt: skip

    def finish(self) -> None:
        """Let the current stream go on only when our own pushes are done; `x` may be overwritten then."""
        torch.cuda.current_stream().wait_stream(self.side)
        self.space.fence()


def raise_flag(space: Workspace, peer: int, index: int) -> None:
    """Set a peer's flag after the copies issued before on this stream."""
    space.flags.write(peer, index)


def gather(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Low-contention all-gather: start it, and return what waits for it and returns (W·R, K)."""
    moving = Gathering(x, group, pieces=1, keep=True)

    def wait() -> Tensor:
        space = moving.space
        for step in range(1, space.world):
            moving.wait((space.rank + step) % space.world)
        moving.finish()
        return moving.gathered

    return wait


def scatter_sum(make: Callable[[int], Tensor], group: dist.ProcessGroup) -> Tensor:
    """Low-contention reduce-scatter of what `make(shard)` returns (R, N): each part moves while the next is made."""
    from executor.kernels.copies import add_slots, wait_and_lower  # noqa: PLC0415 - triton

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    part = make((rank + 1) % world)
    space = symmetric.workspace(group, "scatter", part.device)
    space.reserve(world * part.numel() * part.element_size(), 2 * FLAG_RANGE)
    turn = space.turn()
    start, first_flag = turn * space.set_bytes, turn * FLAG_RANGE
    shape = (world, *part.shape)
    space.fence()
    side = side_stream(part.device)
    sent = []
    for step in range(1, world):
        peer = (rank + step) % world
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            space.slots.on(peer, shape, part.dtype, start)[rank].copy_(part, non_blocking=True)
            raise_flag(space, peer, first_flag + rank)
        sent.append(part)  # alive until the copies are done
        part = make((rank + step + 1) % world)
    flags = space.flags.on(rank, (world,), torch.int32, 4 * first_flag)
    for step in range(1, world):
        source = (rank - step) % world
        wait_and_lower[(1,)](flags, source, 1, 1, space.error, 1 + source, symmetric.POLLS, num_warps=1)
    out = torch.empty_like(part)
    block = 4096
    add_slots[(-(-part.numel() // block),)](
        part, space.slots.on(rank, shape, part.dtype, start), out, part.numel(), rank, world, block, num_warps=8
    )
    torch.cuda.current_stream().wait_stream(side)
    space.fence()
    return out
