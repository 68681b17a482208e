"""Reduce-scatter that adds nothing by itself: partial sums go round, and each product is added to what has arrived.

The sum for a shard starts at the rank after its owner and travels to the owner. A rank multiplies into symmetric memory and
tells the next rank, whose copy engine fetches the partial sum to where the next product is added to it (`addmm` with beta
1, in float32 before it is rounded). Shards go in two or more pieces, so that one travels while the next is multiplied. The
owner fetches straight into the result: no pass over results follows the last product, nothing is copied twice, and nobody
holds a slot for every source. The order of additions is the order of ranks round the ring, the same in every run; a sum is
rounded once for every rank, as in NCCL's ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from executor import stream_ops
from executor.overlap.push import FLAG_RANGE, Bounds, Moving, cut, side_stream

Multiply = Callable[[int, int, int, Tensor, bool], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPlan:
    """By step and piece: where partial sums are made here, where they lie on the rank before, and who is told by which flag."""

    made: tuple[tuple[Tensor, ...], ...]
    fetched: tuple[tuple[int, ...], ...]
    raised: tuple[tuple[int, ...], ...]
    awaited: tuple[tuple[int, ...], ...]


class Relaying(Moving):
    """A relay under way; not in a graph, where a stream cannot wait for a word."""

    what = "a relayed reduce-scatter"

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device, bounds: Bounds
    ) -> None:
        self.nbytes = shape[0] * shape[1] * dtype.itemsize
        # The memory of `push.Scattering`, and as much of it: a graph of the same call uses that instead.
        super().__init__(group, "scatter", device, dist.get_world_size(group) * self.nbytes)
        self.plan: RelayPlan = self.planned(("relay", shape, dtype, bounds), lambda: self._plan(shape, dtype, bounds))

    def _plan(self, shape: tuple[int, int], dtype: torch.dtype, bounds: Bounds) -> RelayPlan:
        space = self.space
        before, after = ((space.rank + step) % space.world for step in (-1, 1))
        steps, row_bytes = range(space.world - 1), shape[1] * dtype.itemsize
        if len(steps) * len(bounds) > FLAG_RANGE:
            raise ValueError(f"{len(bounds)} pieces for {space.world} ranks: there are {FLAG_RANGE} flags")
        made = space.slots.on(space.rank, (len(steps), *shape), dtype, self.start)
        base = space.slots.at[before] + self.start
        numbers = tuple(tuple(step * len(bounds) + number for number in range(len(bounds))) for step in steps)
        return RelayPlan(
            made=tuple(tuple(made[step, first:last] for first, last in bounds) for step in steps),
            fetched=tuple(
                tuple(base + step * self.nbytes + first * row_bytes for first, _ in bounds) for step in steps
            ),
            raised=tuple(tuple(self.flag_at(after, number) for number in row) for row in numbers),
            awaited=tuple(tuple(self.flag_at(space.rank, number) for number in row) for row in numbers),
        )

    def fetch(self, step: int, piece: int, target: Tensor) -> None:
        """Have the partial sum of a step of the rank before copied to `target`; the current stream waits for it."""
        flag = self.plan.awaited[step][piece]
        self.wait_on(self.side, flag, 1)
        nbytes = target.numel() * target.element_size()
        stream_ops.copy(target.data_ptr(), self.plan.fetched[step][piece], nbytes, self.side)
        self.space.order(first=self.side, then=self.current)
        stream_ops.write_word(flag, 0, self.side)  # for the next call; the product need not wait for this

    def lanes(self, count: int) -> tuple[torch.cuda.Stream | None, ...]:
        """Return streams for products, the current one (None if it is the only one) first."""
        if count == 1:
            return (None,)
        more = tuple(side_stream(self.space.device, f"products {n}", priority=0) for n in range(1, count))
        self.space.order(first=self.current, then=tuple(stream.cuda_stream for stream in more))
        return (torch.cuda.current_stream(self.space.device), *more)

    def take(self, stream: torch.cuda.Stream | None) -> None:
        """Have what follows run on a stream."""
        if stream is not None:
            torch.cuda.set_stream(stream)
            self.current = stream.cuda_stream

    def tell(self, step: int, piece: int) -> None:
        """Tell the next rank that the current stream has made its partial sum."""
        self.space.order(first=self.current, then=self.signals)
        stream_ops.write_word(self.plan.raised[step][piece], 1, self.signals)


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

    W at least 2. What is waited for at a step was told one step of the neighbour before, which waited only for one step
    before that: no circle. All pieces but the last are multiples of `unit` rows. With two lanes, products take turns on
    two streams: the next one begins on multiprocessors that the last round of tiles of the one before leaves idle.
    """
    bounds = cut(shape[0], pieces, unit)
    moving = Relaying(shape, dtype, group, device, bounds)
    rank, world = moving.space.rank, moving.space.world
    out = torch.empty(shape, dtype=dtype, device=device)
    moving.begin()
    streams = moving.lanes(lanes)
    try:
        for step in range(world):
            for piece, (first, last) in enumerate(bounds):
                moving.take(streams[(step * len(bounds) + piece) % lanes])
                target = moving.plan.made[step][piece] if step < world - 1 else out[first:last]
                if step:
                    moving.fetch(step - 1, piece, target)
                multiply((rank - 1 - step) % world, first, last, target, step > 0)
                if step < world - 1:
                    moving.tell(step, piece)
    finally:
        moving.take(streams[0])
    for stream in streams[1:]:
        moving.space.order(first=stream.cuda_stream, then=moving.current)
    moving.finish()
    return out
