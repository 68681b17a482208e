"""Exchanges by copy engines: push shards into the peers' symmetric memory and set a flag there for each piece.

The source is any local tensor, so nothing is copied into symmetric memory first, and no SM is taken from the matmul
that runs meanwhile. Rank r sends to r - 1 first, then to r - 2, ...: every rank receives first what it uses first, from
one sender at a time.

Addresses are the same in every call of one shape: they are computed once and cached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.gpu import stream_ops
from executor.gpu import symmetric_memory as symmetric
from executor.gpu.symmetric_memory import Workspace
from executor.kernels import on_demand as kernels
from executor.kernels.prepared_kernel import PreparedKernel

MAX_PIECES = 8
ROWS_OF_TILES = 256
FLAG_RANGE = MAX_PIECES * 64  # flags per set: for up to 64 ranks of one NVLink domain

ADD_BLOCK = 4096

Bounds = tuple[tuple[int, int], ...]
ComputePart = Callable[[int, Tensor], object]
_streams: dict[tuple[int, str], torch.cuda.Stream] = {}


def side_stream(device: torch.device, purpose: str = "copies", priority: int = -1) -> torch.cuda.Stream:
    """Return the stream of this device for `purpose`, created once, of high priority so that copies are not delayed."""
    found = _streams.get((device.index, purpose))
    if found is None:
        found = _streams[device.index, purpose] = torch.cuda.Stream(device, priority=priority)
    return found


def split_rows(rows: int, pieces: int, unit: int) -> Bounds:
    """Return (first, last) of at most `pieces` pieces of rows; all but the last are equal multiples of `unit`."""
    height = -(-rows // (pieces * unit)) * unit
    return tuple((first, min(first + height, rows)) for first in range(0, rows, height))


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One copy and the flag that follows it: addresses on the peer, and the offset in the source."""

    target: int
    offset: int
    nbytes: int
    flag: int


class CopyExchange:
    """An exchange by copy engines: a workspace, one of its two sets of buffers, a stream for copies, and flags.

    Call `begin` before the first copy and the first wait, `finish` after the last.

    Words are never written or waited for on the stream of the matmuls, which would stall it for 20 us each time (two
    H200: 516 instead of 477 us for a reduce-scatter at 8192 x 8192 x 2048); a separate stream does that, and the
    matmuls wait for its events. Stream memory operations cannot be captured in a CUDA graph, nor can an exchange.
    """

    what = "an exchange"

    def __init__(self, group: dist.ProcessGroup, purpose: str, device: torch.device, set_bytes: int) -> None:
        self.current, self.copy_stream = stream_ops.current_stream(device), side_stream(device).cuda_stream
        self.signal_stream = side_stream(device, "signals").cuda_stream
        self.space: Workspace = symmetric.workspace(group, purpose, device)
        self.space.reserve(set_bytes, 2 * FLAG_RANGE)
        self.waiting: int | None = None  # the stream that waits for words in this call, if there is one
        self.turn = self.space.turn()

    @property
    def set_offset(self) -> int:
        """Return the byte offset of this call's set of buffers."""
        return self.turn * self.space.set_bytes

    def flag_at(self, rank: int, index: int) -> int:
        """Return the address of a flag of this call's set on a rank."""
        return self.space.flags.at[rank] + 4 * (self.turn * FLAG_RANGE + index)

    def cached(self, key: object, make: Callable[[], Any]) -> Any:
        """Return `make()`, cached by key and buffer set for as long as the workspace's memory stays the same."""
        whole = (self.turn, key)
        found = self.space.prepared.get(whole)
        if found is None:
            found = self.space.prepared[whole] = make()
        return found

    def begin(self) -> None:
        """Let copies and waits start after the work submitted to the current stream so far.

        Flags are reset by whatever waits for them, a kernel on the current stream (the fused matmul) or the signal
        stream. If the signal stream ran ahead, it would consume a flag that was set for the kernel, which would then
        wait forever.
        """
        self.space.order(first=self.current, then=(self.copy_stream, self.signal_stream))

    def send(self, target: int, source: int, nbytes: int, flag: int) -> None:
        """Copy to a peer, then set a flag there."""
        stream_ops.copy(target, source, nbytes, self.copy_stream)
        stream_ops.write_word(flag, 1, self.copy_stream)

    def wait(self, flag: int) -> None:
        """Make the current stream wait for a flag, and reset it for the next call."""
        self.wait_on(self.signal_stream, flag, 1)
        self.space.order(first=self.signal_stream, then=self.current)
        stream_ops.write_word(flag, 0, self.signal_stream)

    def wait_on(self, stream: int, word: int, value: int) -> None:
        """Make a stream wait for a word; `executor.gpu.exchange_watch` detects when the call does not end."""
        self.waiting = stream
        stream_ops.wait_word(word, value, stream)

    def finish(self) -> None:
        """Make the current stream wait for this rank's copies, so that their source may be overwritten afterwards.

        It also waits until all flags are reset, since data that this rank sends next can make peers set them again.
        """
        self.space.order(first=self.copy_stream, then=self.current)
        self.space.order(first=self.signal_stream, then=self.current)
        if self.waiting is not None:
            counter = self.space.call_counter
            stream_ops.write_word(counter.address, counter.issue(self.what), self.waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan:
    """Addresses of an all-gather: where this rank's shard goes, and the pieces (views) in which the others arrive."""

    bounds: Bounds
    pushes: tuple[Push, ...]
    gathered: Tensor
    own: int
    pieces: tuple[tuple[Tensor, ...], ...]
    flags: Tensor


class CopyGather(CopyExchange):
    """An all-gather in progress."""

    what = "an all-gather"

    def __init__(self, x: Tensor, group: dist.ProcessGroup, *, pieces: int, keep: bool) -> None:
        """Start to push `x` (R, K) to all peers. With `keep` it is also copied to its place in the gathered rows."""
        nbytes = x.numel() * x.element_size()
        super().__init__(group, "gather", x.device, dist.get_world_size(group) * nbytes)
        self.plan: GatherPlan = self.cached((x.shape, x.dtype, pieces), lambda: self._plan(x, pieces))
        self.x = x = x.contiguous()
        self.begin()
        source = x.data_ptr()
        for push in self.plan.pushes:
            self.send(push.target, source + push.offset, push.nbytes, push.flag)
        if keep:
            stream_ops.copy(self.plan.own, source, nbytes, self.copy_stream)

    def _plan(self, x: Tensor, pieces: int) -> GatherPlan:
        space, (rows, depth) = self.space, x.shape
        rank, world, row_bytes = space.rank, space.world, depth * x.element_size()
        bounds = split_rows(rows, min(pieces, MAX_PIECES), ROWS_OF_TILES)  # whole tiles of rows for any tile height
        place = self.set_offset + rank * rows * row_bytes
        pushes = tuple(
            Push(
                target=space.slots.at[peer] + place + first * row_bytes,
                offset=first * row_bytes,
                nbytes=(last - first) * row_bytes,
                flag=self.flag_at(peer, rank * len(bounds) + number),
            )
            for peer in ((rank - step) % world for step in range(1, world))
            for number, (first, last) in enumerate(bounds)
        )
        gathered = space.slots.on(rank, (world * rows, depth), x.dtype, self.set_offset)
        return GatherPlan(
            bounds=bounds,
            pushes=pushes,
            gathered=gathered,
            own=space.slots.at[rank] + place,
            pieces=tuple(
                tuple(gathered[source * rows + first : source * rows + last] for first, last in bounds)
                for source in range(world)
            ),
            flags=space.flags.on(rank, (world, len(bounds)), torch.int32, 4 * self.turn * FLAG_RANGE),
        )

    def wait_for_piece(self, source: int, piece: int) -> Tensor:
        """Make the current stream wait for a piece of a rank's shard; return the piece."""
        self.wait(self.flag_at(self.space.rank, source * len(self.plan.bounds) + piece))
        return self.plan.pieces[source][piece]


def gather(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start an all-gather by copy engines; return a function that waits for it and returns (W·R, K)."""
    exchange = CopyGather(x, group, pieces=1, keep=True)

    def wait() -> Tensor:
        exchange.current = stream_ops.current_stream(x.device)
        for step in range(1, exchange.space.world):
            exchange.wait_for_piece((exchange.space.rank + step) % exchange.space.world, 0)
        exchange.finish()
        return exchange.plan.gathered

    return wait


class CopyScatter(CopyExchange):
    """A reduce-scatter in progress: parts (R, N) are copied to their owners' slots (W, R, N), in pieces of rows."""

    what = "a reduce-scatter"

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        unit: int | None = None,
    ) -> None:
        """Pieces are multiples of `unit` rows, at most MAX_PIECES; None is one piece."""
        self.rows, columns = shape
        self.row_bytes, world = columns * dtype.itemsize, dist.get_world_size(group)
        super().__init__(group, "scatter", device, world * self.rows * self.row_bytes)
        self.bounds = split_rows(self.rows, MAX_PIECES, unit) if unit else ((0, self.rows),)
        self.slots, self.flags = self.cached((shape, dtype, self.bounds), lambda: self._views(shape, dtype))

    def _views(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        space = self.space
        slots = space.slots.on(space.rank, (space.world, *shape), dtype, self.set_offset)
        flags = (space.world, len(self.bounds))
        return slots, space.flags.on(space.rank, flags, torch.int32, 4 * self.turn * FLAG_RANGE)

    def push(self, part: int, peer: int, piece: int = 0) -> None:
        """Send a piece of the part at address `part` to `peer`; the part is complete in copy-stream order."""
        first, last = self.bounds[piece]
        rank, offset = self.space.rank, first * self.row_bytes
        target = self.space.slots.at[peer] + self.set_offset + rank * self.rows * self.row_bytes + offset
        flag = self.flag_at(peer, rank * len(self.bounds) + piece)
        self.send(target, part + offset, (last - first) * self.row_bytes, flag)

    def push_when_done(self, parts: int, done: int, counts: list[int]) -> None:
        """Send each piece of `parts` (W - 1, R, N) as soon as its counter in `done` (W - 1, pieces) reaches
        `counts`.
        """
        rank, world = self.space.rank, self.space.world
        for step in range(1, world):
            for piece, count in enumerate(counts):
                self.wait_on(self.copy_stream, done + 4 * ((step - 1) * len(counts) + piece), count)
                self.push(parts + (step - 1) * self.rows * self.row_bytes, (rank + step) % world, piece)

    def add(self, out: Tensor) -> None:
        """Wait for the parts of all others (sent in one piece) and add them to `out` (R, N), this rank's own."""
        rank, world = self.space.rank, self.space.world
        for step in range(1, world):
            self.wait(self.flag_at(rank, (rank - step) % world))
        adding = self.cached((out.shape, out.dtype, "add"), lambda: self._add_kernel(out))
        adding(self.current, out.data_ptr())

    def _add_kernel(self, out: Tensor) -> Callable[..., None]:
        args = (out, self.slots, out.numel(), self.space.rank, self.space.world, ADD_BLOCK)
        return PreparedKernel(kernels.add_slots, -(-out.numel() // ADD_BLOCK), args, changing=(0,), num_warps=8)


def scatter_sum(
    make: ComputePart, shape: tuple[int, int], dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Return the reduce-scatter of parts (R, N), each sent while the next is computed by `make(shard, out)`."""
    exchange = CopyScatter(shape, dtype, group, device)
    rank, world = exchange.space.rank, exchange.space.world
    parts = torch.empty((world - 1, *shape), dtype=dtype, device=device)
    out = torch.empty(shape, dtype=dtype, device=device)
    exchange.begin()
    for step in range(1, world):
        peer, part = (rank + step) % world, parts[step - 1]
        make(peer, part)
        exchange.space.order(first=exchange.current, then=exchange.copy_stream)
        exchange.push(part.data_ptr(), peer)
    make(rank, out)
    exchange.add(out)
    exchange.finish()
    return out
