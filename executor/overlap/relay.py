"""Reduce-scatter that adds nothing by itself: partial sums go round, and each product is added to what has arrived.

The sum for a shard starts at the rank after its owner and travels to the owner. Each rank multiplies into the partial sum
where it lies (`addmm` with beta 1, added in float32 before it is rounded) and has the copy engine take it to the next
rank. Shards go in two or more pieces, so that one travels while the next is multiplied. No pass over the results follows
the last product, and nobody holds a slot for every source. The order of additions is the order of ranks round the ring,
the same in every run; a sum is rounded once for every rank, as in NCCL's ring.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from executor import stream_ops
from executor.overlap.push import FLAG_RANGE, Bounds, Moving, cut, side_stream

Multiply = Callable[[int, int, int, Tensor, bool], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPlan:
    """What arrives here, (W - 1 steps, pieces) of views, and the addresses of the same on the next rank."""

    inbox: tuple[tuple[Tensor, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    raised: tuple[tuple[int, ...], ...]
    awaited: tuple[tuple[int, ...], ...]


class Relaying(Moving):
    """A relay under way. Besides the stream of pushes there is one that brings the last partial sums home."""

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device, bounds: Bounds
    ) -> None:
        self.nbytes = shape[0] * shape[1] * dtype.itemsize
        super().__init__(group, "relay", device, (dist.get_world_size(group) - 1) * self.nbytes)
        self.landing = side_stream(device, "landing")
        self.plan: RelayPlan = self.planned((shape, dtype, bounds), lambda: self._plan(shape, dtype, bounds))

    def _plan(self, shape: tuple[int, int], dtype: torch.dtype, bounds: Bounds) -> RelayPlan:
        space = self.space
        following, steps = (space.rank + 1) % space.world, range(space.world - 1)
        if len(steps) * len(bounds) > FLAG_RANGE:
            raise ValueError(f"{len(bounds)} pieces for {space.world} ranks: there are {FLAG_RANGE} flags")
        inbox = space.slots.on(space.rank, (len(steps), *shape), dtype, self.start)
        row_bytes, base = shape[1] * dtype.itemsize, space.slots.at[following] + self.start
        numbers = tuple(tuple(step * len(bounds) + number for number in range(len(bounds))) for step in steps)
        return RelayPlan(
            inbox=tuple(tuple(inbox[step, first:last] for first, last in bounds) for step in steps),
            targets=tuple(
                tuple(base + step * self.nbytes + first * row_bytes for first, _ in bounds) for step in steps
            ),
            raised=tuple(tuple(self.flag_at(following, number) for number in row) for row in numbers),
            awaited=tuple(tuple(self.flag_at(space.rank, number) for number in row) for row in numbers),
        )

    def pass_on(self, step: int, piece: int, partial: Tensor) -> None:
        """Send what the current stream has just made to the next rank."""
        self.space.order(first=self.current, then=self.side)
        nbytes = partial.numel() * partial.element_size()
        self.send(self.plan.targets[step][piece], partial.data_ptr(), nbytes, self.plan.raised[step][piece])

    def arrive(self, step: int, piece: int) -> Tensor:
        """Make the current stream wait for a partial sum; return it where it lies."""
        self.wait(self.plan.awaited[step][piece], (self.space.rank - 1) % self.space.world)
        return self.plan.inbox[step][piece]

    def land(self, piece: int, out: Tensor) -> None:
        """Have the last partial sum of this rank's own shard copied to `out` while earlier products run."""
        outer, self.current = self.current, self.landing.cuda_stream
        with torch.cuda.stream(self.landing) if self.captured else nullcontext():
            arrived = self.arrive(self.space.world - 2, piece)
        stream_ops.copy(out.data_ptr(), arrived.data_ptr(), out.numel() * out.element_size(), self.current)
        self.space.order(first=self.current, then=outer)
        self.current = outer


def relay_sum(
    multiply: Multiply,
    shape: tuple[int, int],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    pieces: int,
) -> Tensor:
    """Return this rank's (R, N) of the sum over ranks; `multiply(shard, first, last, out, add)` makes or adds rows.

    W at least 2. What is waited for at a step was sent one step of the neighbour before, which waited only for one step
    before that: no circle.
    """
    bounds = cut(shape[0], pieces, 1)
    moving = Relaying(shape, dtype, group, device, bounds)
    rank, world = moving.space.rank, moving.space.world
    fresh, out = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    moving.begin()
    moving.space.order(first=moving.current, then=moving.landing.cuda_stream)  # `out` may be memory still in use
    for step in range(world - 1):
        shard = (rank - 1 - step) % world
        for piece, (first, last) in enumerate(bounds):
            partial = fresh[first:last] if step == 0 else moving.arrive(step - 1, piece)
            multiply(shard, first, last, partial, step > 0)
            moving.pass_on(step, piece, partial)
    for piece, (first, last) in enumerate(bounds):
        moving.land(piece, out[first:last])
        multiply(rank, first, last, out[first:last], True)
    moving.finish()
    return out
