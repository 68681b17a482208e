"""Copy engines push shards into the peers' symmetric memory, and raise a flag there when a piece has arrived.

The source is any tensor of ours, so nothing is first copied into symmetric memory; no multiprocessor is taken from the
product that runs meanwhile. Rank r sends to r - 1 first, then to r - 2, ...: everybody receives first what it consumes
first, and every receiver hears one sender at a time.

Where things lie is the same in every call of one shape: it is worked out once, and a call only issues it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor import stream_ops, symmetric
from executor.symmetric import Workspace

MAX_PIECES = 8
ROWS_OF_TILES = 256
FLAG_RANGE = MAX_PIECES * 64  # flags of one set: for up to 64 ranks, an NVLink domain of today

LARGE_BYTES = 2**24  # from here on a second launch costs less than what it hides
ADD_BLOCK = 4096

Bounds = tuple[tuple[int, int], ...]
Make = Callable[[int, Tensor], object]
_streams: dict[tuple[int, str], torch.cuda.Stream] = {}


def side_stream(device: torch.device, purpose: str = "copies", priority: int = -1) -> torch.cuda.Stream:
    """A stream beside the products, of high priority: a copy that waits for a kernel's launch would be late."""
    found = _streams.get((device.index, purpose))
    if found is None:
        found = _streams[device.index, purpose] = torch.cuda.Stream(device, priority=priority)
    return found


def cut(rows: int, pieces: int, unit: int) -> Bounds:
    """Return (first, last) of at most `pieces` pieces of rows; all but the last are equal multiples of `unit`."""
    height = -(-rows // (pieces * unit)) * unit
    return tuple((first, min(first + height, rows)) for first in range(0, rows, height))


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One copy and the flag that follows it: addresses on the peer, place in the source."""

    target: int
    offset: int
    nbytes: int
    flag: int


class Moving:
    """What every exchange by copy engines has: a workspace, one of its two sets, a stream of copies, flags.

    `begin` comes before the first copy and the first wait, `finish` after the last.

    Words are never set or waited for on the stream of products, which would stand still for 20 us each time (two H200:
    516 instead of 477 us for a reduce-scatter at 8192 x 8192 x 2048); a stream of signals does that, and products wait
    for its events. In a captured graph words are set by memsets and waited for by a kernel, since streams' own way cannot
    be captured.
    """

    what = "an exchange"

    def __init__(self, group: dist.ProcessGroup, purpose: str, device: torch.device, set_bytes: int) -> None:
        self.current, self.side = stream_ops.current(device), side_stream(device).cuda_stream
        self.signals = side_stream(device, "signals").cuda_stream
        self.space: Workspace = symmetric.workspace(group, purpose, device)
        self.captured = self.space.fenced()
        if self.captured:
            self.space = self.space.for_graphs(set_bytes, 2 * FLAG_RANGE)
        else:
            self.space.reserve(set_bytes, 2 * FLAG_RANGE)
        self.waiting: int | None = None  # the stream that waits for words in this call, if one does
        self.turn = 0 if self.captured else self.space.turn()

    @property
    def start(self) -> int:
        """Where this call's set begins, in bytes."""
        return self.turn * self.space.set_bytes

    def flag_at(self, rank: int, index: int) -> int:
        """Return the address of a flag of this call's set on a rank."""
        return self.space.flags.at[rank] + 4 * (self.turn * FLAG_RANGE + index)

    def planned(self, key: object, make: Callable[[], Any]) -> Any:
        """Return what `make` worked out for this key and set, once for as long as the memory stays."""
        whole = (self.turn, key)
        found = self.space.prepared.get(whole)
        if found is None:
            found = self.space.prepared[whole] = make()
        return found

    def begin(self) -> None:
        """Mark, on the current stream, the moment from which peers may be written to and copies may start.

        And from which flags may be looked at. They are lowered by whoever waits for them, a kernel on the current stream
        (the fused product) or the stream of signals: if that ran ahead, it would take a flag that was raised for the
        kernel, which would then wait for ever.
        """
        if self.captured:
            self.space.fence()
            self.space.order(first=self.current, then=self.side)
        else:
            self.space.order(first=self.current, then=(self.side, self.signals))

    def send(self, target: int, source: int, nbytes: int, flag: int) -> None:
        """Copy to a peer, then raise a flag there."""
        stream_ops.copy(target, source, nbytes, self.side)
        (stream_ops.fill_word if self.captured else stream_ops.write_word)(flag, 1, self.side)

    def wait(self, flag: int, source: int) -> None:
        """Make the current stream wait for a flag that `source` raises; lower it for the next call."""
        if self.captured:
            self.planned("wait", self._waiting)(self.current, flag, 1 + source)
        else:
            self.wait_on(self.signals, flag, 1)
            self.space.order(first=self.signals, then=self.current)
            stream_ops.write_word(flag, 0, self.signals)

    def wait_on(self, stream: int, word: int, value: int) -> None:
        """Make a stream wait for a word; the host watches that the call ends."""
        self.waiting = stream
        stream_ops.wait_word(word, value, stream)

    def _waiting(self) -> Callable[..., None]:
        from executor.kernels.copies import wait_and_lower  # noqa: PLC0415 - triton
        from executor.kernels.launching import Prepared  # noqa: PLC0415 - triton

        flag = self.space.flags.on(self.space.rank, (1,), torch.int32)
        return Prepared(wait_and_lower, 1, (flag, self.space.error, 1, symmetric.POLLS), changing=(0, 2), num_warps=1)

    def finish(self) -> None:
        """Let the current stream go on only when our own pushes are done; their source may be overwritten then.

        And when all flags are down: what this rank sends next may bring peers to raise them again.
        """
        self.space.order(first=self.side, then=self.current)
        if self.captured:
            return
        self.space.order(first=self.signals, then=self.current)
        if self.waiting is not None:
            line = self.space.line
            stream_ops.write_word(line.address, line.issue(self.what), self.waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan:
    """Where the shards of an all-gather go, and the pieces (views) in which they arrive here."""

    bounds: Bounds
    pushes: tuple[Push, ...]
    gathered: Tensor
    own: int
    pieces: tuple[tuple[Tensor, ...], ...]
    flags: Tensor


class Gathering(Moving):
    """An all-gather under way: where shards arrive, and which flag says so."""

    what = "an all-gather"

    def __init__(self, x: Tensor, group: dist.ProcessGroup, *, pieces: int, keep: bool) -> None:
        """Start to push `x` (R, K) to all peers. With `keep` it goes to its place among the gathered ones, too."""
        nbytes = x.numel() * x.element_size()
        super().__init__(group, "gather", x.device, dist.get_world_size(group) * nbytes)
        self.plan: GatherPlan = self.planned((x.shape, x.dtype, pieces), lambda: self._plan(x, pieces))
        self.x = x = x.contiguous()
        self.begin()
        source = x.data_ptr()
        for push in self.plan.pushes:
            self.send(push.target, source + push.offset, push.nbytes, push.flag)
        if keep:
            stream_ops.copy(self.plan.own, source, nbytes, self.side)

    def _plan(self, x: Tensor, pieces: int) -> GatherPlan:
        space, (rows, depth) = self.space, x.shape
        rank, world, row_bytes = space.rank, space.world, depth * x.element_size()
        bounds = cut(rows, min(pieces, MAX_PIECES), ROWS_OF_TILES)  # whole tiles of rows, whatever their height
        place = self.start + rank * rows * row_bytes
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
        gathered = space.slots.on(rank, (world * rows, depth), x.dtype, self.start)
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

    def arrive(self, source: int, piece: int) -> Tensor:
        """Make the current stream wait for a piece of a rank's shard; return the piece."""
        self.wait(self.flag_at(self.space.rank, source * len(self.plan.bounds) + piece), source)
        return self.plan.pieces[source][piece]


def gather(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Low-contention all-gather: start it, and return what waits for it and returns (W·R, K)."""
    moving = Gathering(x, group, pieces=1, keep=True)

    def wait() -> Tensor:
        moving.current = stream_ops.current(x.device)
        for step in range(1, moving.space.world):
            moving.arrive((moving.space.rank + step) % moving.space.world, 0)
        moving.finish()
        return moving.plan.gathered

    return wait


class Scattering(Moving):
    """A reduce-scatter under way: parts of (R, N) go to their owners' slots (W, R, N), in pieces of rows."""

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
        self.bounds = cut(self.rows, MAX_PIECES, unit) if unit else ((0, self.rows),)
        self.slots, self.flags = self.planned((shape, dtype, self.bounds), lambda: self._views(shape, dtype))

    def _views(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        space = self.space
        slots = space.slots.on(space.rank, (space.world, *shape), dtype, self.start)
        flags = (space.world, len(self.bounds))
        return slots, space.flags.on(space.rank, flags, torch.int32, 4 * self.turn * FLAG_RANGE)

    def push(self, part: int, peer: int, piece: int = 0) -> None:
        """Send rows of the part at an address, ready on the stream of copies."""
        first, last = self.bounds[piece]
        rank, offset = self.space.rank, first * self.row_bytes
        target = self.space.slots.at[peer] + self.start + rank * self.rows * self.row_bytes + offset
        flag = self.flag_at(peer, rank * len(self.bounds) + piece)
        self.send(target, part + offset, (last - first) * self.row_bytes, flag)

    def push_when_done(self, parts: int, done: int, counts: list[int]) -> None:
        """Send each piece of `parts` (W - 1, R, N) as soon as `done` (W - 1, pieces) has counted as far as `counts`."""
        rank, world = self.space.rank, self.space.world
        for step in range(1, world):
            for piece, count in enumerate(counts):
                self.wait_on(self.side, done + 4 * ((step - 1) * len(counts) + piece), count)
                self.push(parts + (step - 1) * self.rows * self.row_bytes, (rank + step) % world, piece)

    def add(self, out: Tensor) -> None:
        """Wait for the parts of all others (sent in one piece) and add them to `out` (R, N), this rank's own."""
        rank, world = self.space.rank, self.space.world
        for step in range(1, world):
            source = (rank - step) % world
            self.wait(self.flag_at(rank, source), source)
        adding = self.planned((out.shape, out.dtype, "add"), lambda: self._adding(out))
        adding(self.current, out.data_ptr())

    def _adding(self, out: Tensor) -> Callable[..., None]:
        from executor.kernels.copies import add_slots  # noqa: PLC0415 - triton
        from executor.kernels.launching import Prepared  # noqa: PLC0415 - triton

        args = (out, self.slots, out.numel(), self.space.rank, self.space.world, ADD_BLOCK)
        return Prepared(add_slots, -(-out.numel() // ADD_BLOCK), args, changing=(0,), num_warps=8)


def scatter_sum(
    make: Make, shape: tuple[int, int], dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Low-contention reduce-scatter of parts (R, N) while they are made; `make(shard, out)` makes one."""
    moving = Scattering(shape, dtype, group, device)
    rank, world = moving.space.rank, moving.space.world
    parts = torch.empty((world - 1, *shape), dtype=dtype, device=device)
    out = torch.empty(shape, dtype=dtype, device=device)
    moving.begin()
    for step in range(1, world):
        peer, part = (rank + step) % world, parts[step - 1]
        make(peer, part)
        moving.space.order(first=moving.current, then=moving.side)
        moving.push(part.data_ptr(), peer)
    make(rank, out)
    moving.add(out)
    moving.finish()
    return out
