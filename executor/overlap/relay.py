"""Ring reduce-scatter in which each matmul accumulates into the partial sum from the previous rank.

The sum for a shard starts at the rank after its owner and travels round the ring to the owner. A rank multiplies into
symmetric memory and signals the next rank, whose copy engine fetches the partial sum to where the next matmul is added
to it (`addmm` with beta 1, in float32 before it is rounded). Shards are split into two or more pieces, so that one
travels while the next is multiplied. The owner fetches straight into the result: no pass over results follows the last
matmul, nothing is copied twice, and no rank needs a slot for every source. Additions are in ring order, so the result
is deterministic; a sum is rounded once per rank, as in NCCL's ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from executor.gpu import stream_ops
from executor.overlap.push import FLAG_RANGE, Bounds, CopyExchange, side_stream, split_rows

Multiply = Callable[[int, int, int, Tensor, bool], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPlan:
    """By step and piece: this rank's partial sums, their addresses on the previous rank, the next rank's and
    own flags.
    """

    partial_sums: tuple[tuple[Tensor, ...], ...]
    source_addresses: tuple[tuple[int, ...], ...]
    peer_flags: tuple[tuple[int, ...], ...]
    own_flags: tuple[tuple[int, ...], ...]


class RelayScatter(CopyExchange):
    """A relayed reduce-scatter in progress; not in a graph, where a stream cannot wait for a word."""

    what = "a relayed reduce-scatter"

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device, bounds: Bounds
    ) -> None:
        self.nbytes = shape[0] * shape[1] * dtype.itemsize
        # The memory of `push.CopyScatter`, of the same size, since a graph of the same call uses that class.
        super().__init__(group, "scatter", device, dist.get_world_size(group) * self.nbytes)
        self.plan: RelayPlan = self.cached(("relay", shape, dtype, bounds), lambda: self._plan(shape, dtype, bounds))

    def _plan(self, shape: tuple[int, int], dtype: torch.dtype, bounds: Bounds) -> RelayPlan:
        space = self.space
        before, after = ((space.rank + step) % space.world for step in (-1, 1))
        steps, row_bytes = range(space.world - 1), shape[1] * dtype.itemsize
        if len(steps) * len(bounds) > FLAG_RANGE:
            raise ValueError(f"{len(bounds)} pieces for {space.world} ranks: there are {FLAG_RANGE} flags")
        partial_sums = space.slots.on(space.rank, (len(steps), *shape), dtype, self.set_offset)
        base = space.slots.at[before] + self.set_offset
        numbers = tuple(tuple(step * len(bounds) + number for number in range(len(bounds))) for step in steps)
        return RelayPlan(
            partial_sums=tuple(tuple(partial_sums[step, first:last] for first, last in bounds) for step in steps),
            source_addresses=tuple(
                tuple(base + step * self.nbytes + first * row_bytes for first, _ in bounds) for step in steps
            ),
            peer_flags=tuple(tuple(self.flag_at(after, number) for number in row) for row in numbers),
            own_flags=tuple(tuple(self.flag_at(space.rank, number) for number in row) for row in numbers),
        )

    def fetch(self, step: int, piece: int, target: Tensor) -> None:
        """Copy the partial sum of a step from the previous rank to `target`; the current stream waits for it."""
        flag = self.plan.own_flags[step][piece]
        self.wait_on(self.copy_stream, flag, 1)
        nbytes = target.numel() * target.element_size()
        stream_ops.copy(target.data_ptr(), self.plan.source_addresses[step][piece], nbytes, self.copy_stream)
        self.space.order(first=self.copy_stream, then=self.current)
        stream_ops.write_word(flag, 0, self.copy_stream)  # reset for the next call; the product need not wait for it

    def lanes(self, count: int) -> tuple[torch.cuda.Stream | None, ...]:
        """Return the streams for products, the current one first; a single one is given as None."""
        if count == 1:
            return (None,)
        more = tuple(side_stream(self.space.device, f"products {n}", priority=0) for n in range(1, count))
        self.space.order(first=self.current, then=tuple(stream.cuda_stream for stream in more))
        return (torch.cuda.current_stream(self.space.device), *more)

    def use_stream(self, stream: torch.cuda.Stream | None) -> None:
        """Make `stream` the current stream; None changes nothing."""
        if stream is not None:
            torch.cuda.set_stream(stream)
            self.current = stream.cuda_stream

    def signal_piece(self, step: int, piece: int) -> None:
        """Signal to the next rank that the current stream has computed a partial sum."""
        self.space.order(first=self.current, then=self.signal_stream)
        stream_ops.write_word(self.plan.peer_flags[step][piece], 1, self.signal_stream)


def relay_sum(
    multiply: Multiply,
    shape: tuple[int, int],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    pieces: int,
    unit: int = 1,
    lanes: int = 1,
) -> Tensor:
    """Return this rank's (R, N) of the sum over ranks; `multiply(shard, first, last, out, add)` makes or adds rows.

    W is at least 2. A step waits only for the previous step of the neighbour, so there is no deadlock. All pieces but
    the last are multiples of `unit` rows. With two lanes, matmuls alternate between two streams, so that the next one
    starts on SMs that the last wave of the one before leaves idle.
    """
    bounds = split_rows(shape[0], pieces, unit)
    exchange = RelayScatter(shape, dtype, group, device, bounds)
    rank, world = exchange.space.rank, exchange.space.world
    out = torch.empty(shape, dtype=dtype, device=device)
    exchange.begin()
    streams = exchange.lanes(lanes)
    try:
        for step in range(world):
            for piece, (first, last) in enumerate(bounds):
                exchange.use_stream(streams[(step * len(bounds) + piece) % lanes])
                target = exchange.plan.partial_sums[step][piece] if step < world - 1 else out[first:last]
                if step:
                    exchange.fetch(step - 1, piece, target)
                multiply((rank - 1 - step) % world, first, last, target, step > 0)
                if step < world - 1:
                    exchange.signal_piece(step, piece)
    finally:
        exchange.use_stream(streams[0])
    for stream in streams[1:]:
        if stream is not None:
            exchange.space.order(first=stream.cuda_stream, then=exchange.current)
    exchange.finish()
    return out
