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
from executor.kernels import launching
from executor.symmetric import Workspace

MAX_PIECES = 8
ROWS_OF_TILES = 256
FLAG_RANGE = MAX_PIECES * 64  # flags of one set: for up to 64 ranks, an NVLink domain of today

LARGE_BYTES = 2**24  # from here on a second launch costs less than what it hides
ADD_BLOCK = 4096

Make = Callable[[int, Tensor], object]
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
        """Flags on this rank for this call, int32 (W, pieces)."""
        space, count = self.space, len(self.bounds)
        return space.flags.on(space.rank, (space.world, count), torch.int32, 4 * self.first_flag)

    def wait(self, source: int, first: int = 0, count: int | None = None) -> None:
        """Make the current stream wait for `count` pieces of a rank's shard, and lower their flags."""
        count = count or len(self.bounds)
        wait_and_lower(self.space, self.flags, source, source * len(self.bounds) + first, count)

    def finish(self) -> None:
        """Let the current stream go on only when our own pushes are done; `x` may be overwritten then."""
        torch.cuda.current_stream().wait_stream(self.side)
        self.space.fence()


def wait_and_lower(space: Workspace, flags: Tensor, source: int, first: int, count: int) -> None:
    """Make the current stream wait for `count` flags that `source` raises, and set them to zero."""
    from executor.kernels import copies  # noqa: PLC0415 - triton

    args = (flags, first, count, space.error, 1 + source, symmetric.POLLS)
    variant = (space.device.index, count, symmetric.POLLS)
    launching.launch(copies.wait_and_lower, 1, args, variant=variant, num_warps=1)


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


class Scattering:
    """A reduce-scatter under way: parts of (R, N) go to their owners' slots (W, R, N), in pieces of rows."""

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, group: dist.ProcessGroup, *, piece_rows: int | None = None
    ) -> None:
        """Pieces are multiples of `piece_rows`, at most MAX_PIECES; None is one piece."""
        rows, columns = shape
        self.space: Workspace = symmetric.workspace(group, "scatter", torch.device("cuda", torch.cuda.current_device()))
        rank, world = self.space.rank, self.space.world
        self.space.reserve(world * rows * columns * dtype.itemsize, 2 * FLAG_RANGE)
        turn = self.space.turn()
        piece_rows = piece_rows or rows
        height = -(-rows // (piece_rows * MAX_PIECES)) * piece_rows
        self.bounds = [(first, min(first + height, rows)) for first in range(0, rows, height)]
        self.first_flag, self.start = turn * FLAG_RANGE, turn * self.space.set_bytes
        self.shape = (world, rows, columns)
        self.slots = self.space.slots.on(rank, self.shape, dtype, self.start)
        self.flags = self.space.flags.on(rank, (world, len(self.bounds)), torch.int32, 4 * self.first_flag)
        self.side = side_stream(self.space.device)

    def begin(self) -> None:
        """Mark, on the current stream, the moment from which peers may be written to."""
        self.space.fence()
        self.side.wait_stream(torch.cuda.current_stream())

    def push(self, part: Tensor, peer: int, piece: int = 0) -> None:
        """Send rows of a part that are ready on the side stream."""
        first, last = self.bounds[piece]
        theirs = self.space.slots.on(peer, self.shape, part.dtype, self.start)
        theirs[self.space.rank, first:last].copy_(part[first:last], non_blocking=True)
        raise_flag(self.space, peer, self.first_flag + self.space.rank * len(self.bounds) + piece)

    def push_when_done(self, parts: Tensor, done: Tensor, tiles: list[int]) -> None:
        """Send each piece of `parts` (W - 1, R, N) as soon as `done` (W - 1, pieces) has counted its tiles."""
        space = self.space
        with torch.cuda.stream(self.side):
            for step in range(1, space.world):
                for piece, count in enumerate(tiles):
                    symmetric.wait_for_word(done, (step - 1) * len(tiles) + piece, count)
                    self.push(parts[step - 1], (space.rank + step) % space.world, piece)

    def add(self, out: Tensor) -> None:
        """Wait for the parts of all others (sent in one piece) and add them to `out` (R, N), this rank's own."""
        from executor.kernels.copies import add_slots  # noqa: PLC0415 - triton

        space, numel = self.space, out.numel()
        for step in range(1, space.world):
            source = (space.rank - step) % space.world
            wait_and_lower(space, self.flags, source, source, 1)
        args = (out, self.slots, numel, space.rank, space.world, ADD_BLOCK)
        variant = (space.device.index, out.dtype, space.rank, space.world, numel % 16 == 0, numel == 1)
        launching.launch(add_slots, -(-numel // ADD_BLOCK), args, variant=variant, num_warps=8)

    def finish(self) -> None:
        """Let the current stream go on only when our own pushes are done."""
        torch.cuda.current_stream().wait_stream(self.side)
        self.space.fence()


def scatter_sum(make: Make, shape: tuple[int, int], dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """Low-contention reduce-scatter of parts (R, N) while they are made; `make(shard, out)` makes one.

    Whole shards on purpose: halves, so that one sum runs beside the product of the other, were slower on four H200 (637
    instead of 484 us at 8192 x 8192 x 2048), since the host cannot issue so many copies in time.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    moving = Scattering(shape, dtype, group)
    current, parts = torch.cuda.current_stream(), torch.empty((world, *shape), dtype=dtype, device=moving.space.device)
    moving.space.fence()
    for step in range(1, world):
        peer = (rank + step) % world
        make(peer, parts[peer])
        moving.side.wait_stream(current)
        with torch.cuda.stream(moving.side):
            moving.push(parts[peer], peer)
    out = torch.empty(shape, dtype=dtype, device=moving.space.device)
    make(rank, out)
    moving.add(out)
    moving.finish()
    return out
