"""One persistent Triton kernel for the product and its collective. Without CUDA, or for shapes that TMA cannot take
(rows of no multiple of 16 bytes), and for several products at once, it falls back to copy engines between products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from executor import symmetric
from executor.overlap import all_reduce, push
from executor.overlap.copy_engine import CopyEngine, processors
from executor.overlap.mode import Pair, shard_rows

if TYPE_CHECKING:
    from executor.kernels.launching import Prepared

TMA_BYTES = 16
# Multiprocessors that programs leave alone while they wait for copies. Copy engines bring those from other GPUs; within one
# GPU kernels do, which a kernel that waits on every multiprocessor would keep out for ever. Ranks that share a GPU set this.
UNUSED_PROCESSORS = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Shape of an output tile, depth of a step, and how many steps are loaded ahead."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    stages: int = 3
    warps: int = 8
    halves: bool = False


GATHER_TILES = (Tile(halves=True, stages=4), Tile(block_n=128, stages=4))
SCATTER_TILES = (Tile(stages=3), Tile(block_n=128, stages=4))
# Time of a large tile over that of two small ones: it loads three quarters of the bytes. Measured, two H200:
# 1427 and 1528 us at 16384 x 3584 x 8192 (examples/validation/overlap_2xH200.md).
LARGE_OVER_SMALL = 0.93


def tile_for(rows: int, columns: int, processors: int, tiles: tuple[Tile, Tile]) -> Tile:
    """Return the large or the small tile, whichever needs less time in whole rounds of all processors."""
    large, small = (-(-(-(-rows // t.block_m) * -(-columns // t.block_n)) // processors) for t in tiles)
    return tiles[0] if large * 2 * LARGE_OVER_SMALL <= small else tiles[1]


class Fused(CopyEngine):
    name = "fused"

    def gather_matmul(
        self, x: Tensor, operands: tuple[Tensor, ...], group: dist.ProcessGroup, *, keep: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if not fits(x, operands[0]):
            return super().gather_matmul(x, operands, group, keep=keep)
        # The first product hides the gather; the others find everything in place and are the library's.
        keep_all = keep or len(operands) > 1
        first, moving = _gather_matmul(x, operands[0], group, keep=keep_all)
        moving.finish()
        gathered = moving.plan.gathered
        return (first, *(gathered @ operand for operand in operands[1:])), gathered if keep else None

    def matmul_scatter(self, pairs: tuple[Pair, ...], group: dist.ProcessGroup) -> Tensor:
        if len(pairs) > 1 or not fits(*pairs[0]) or dist.get_world_size(group) == 1:
            return super().matmul_scatter(pairs, group)
        if torch.cuda.is_current_stream_capturing():  # a stream's wait for a word cannot be captured
            return super().matmul_scatter(pairs, group)
        return _matmul_scatter(*pairs[0], group)

    def matmul_reduce(self, x: Tensor, operand: Tensor, group: dist.ProcessGroup) -> Tensor:
        if x.is_cuda and all_reduce.handles(x.shape[0] * operand.shape[1] * x.element_size()):
            return all_reduce.all_reduce(x @ operand, group)
        return super().matmul_reduce(x, operand, group)


def programs_on(device: torch.device) -> int:
    """Return how many programs a persistent kernel has: one on each multiprocessor but those that it leaves alone."""
    return max(1, processors(device) - UNUSED_PROCESSORS)


def fits(x: Tensor, operand: Tensor) -> bool:
    """Say whether the kernels take these operands."""
    row_bytes = (x.shape[1] * x.element_size(), operand.shape[1] * x.element_size())
    return (
        x.is_cuda
        and x.dtype in {torch.bfloat16, torch.float16}
        and operand.dtype == x.dtype
        and not any(n % TMA_BYTES for n in row_bytes)
        and (operand.is_contiguous() or operand.t().is_contiguous())
        and not any(t.data_ptr() % TMA_BYTES for t in (x, operand))
    )


def _descriptors(a: Tensor, operand: Tensor, tile: Tile) -> tuple[object, object, bool]:
    """Return TMA descriptors of the left and the right operand, and whether the right one lies as (N, K)."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: PLC0415 - triton

    left = TensorDescriptor.from_tensor(a, [tile.block_m, tile.block_k])
    if operand.is_contiguous():
        return left, TensorDescriptor.from_tensor(operand, [tile.block_k, tile.block_n]), False
    return left, TensorDescriptor.from_tensor(operand.t(), [tile.block_n, tile.block_k]), True


def _gather_matmul(
    x: Tensor, operand: Tensor, group: dist.ProcessGroup, *, keep: bool, tile: Tile | None = None, pieces: int = 0
) -> tuple[Tensor, push.Gathering]:
    moving = push.Gathering(x, group, pieces=pieces or pieces_for(x), keep=keep)
    out = x.new_empty(moving.space.world * x.shape[0], operand.shape[1])
    kernel = moving.planned(
        ("product", x.shape, operand.shape, operand.is_contiguous(), x.dtype, tile, pieces),
        lambda: _prepare_gather(moving, operand, out, tile),
    )
    kernel(moving.current, moving.x.data_ptr(), operand.data_ptr(), out.data_ptr())
    return out, moving


def _prepare_gather(moving: push.Gathering, operand: Tensor, out: Tensor, tile: Tile | None) -> Prepared:
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: PLC0415 - triton

    from executor.kernels.gather_matmul import gather_matmul  # noqa: PLC0415 - triton
    from executor.kernels.launching import Prepared  # noqa: PLC0415 - triton

    x, plan, space = moving.x, moving.plan, moving.space
    (rows, depth), columns, programs = x.shape, operand.shape[1], programs_on(x.device)
    tile = tile or tile_for(space.world * rows, columns, programs, GATHER_TILES)
    own, right, turned = _descriptors(x, operand, tile)
    width = tile.block_n // 2 if tile.halves else tile.block_n
    args = (
        own,
        TensorDescriptor.from_tensor(plan.gathered, [tile.block_m, tile.block_k]),
        right,
        TensorDescriptor.from_tensor(out.view(space.world, rows, columns), [1, tile.block_m, width]),
        plan.flags,
        space.ticket,
        space.error,
        rows,
        columns,
        depth,
        plan.bounds[0][1],
        len(plan.bounds),
        space.rank,
        space.world,
        turned,
        tile.block_m,
        tile.block_n,
        tile.block_k,
        tile.group_m,
        tile.halves,
        symmetric.POLLS,
        True,  # assembly: this is a GPU
    )
    return Prepared(gather_matmul, programs, args, changing=(0, 2, 3), num_warps=tile.warps, num_stages=tile.stages)


def pieces_for(x: Tensor) -> int:
    """Two pieces of a shard, so that the first arrives early; one of a small shard, whose copies are all latency."""
    return 2 if x.numel() * x.element_size() >= push.LARGE_BYTES else 1


def _matmul_scatter(x: Tensor, operand: Tensor, group: dist.ProcessGroup, tile: Tile | None = None) -> Tensor:
    x = x.contiguous()
    rows, columns, device = shard_rows(x.shape[0], group), operand.shape[1], x.device
    tile = tile or tile_for(x.shape[0], columns, programs_on(device), SCATTER_TILES)
    moving = push.Scattering((rows, columns), x.dtype, group, device, unit=tile.block_m * tile.group_m)
    world = moving.space.world
    parts, out = x.new_empty(world - 1, rows, columns), x.new_empty(rows, columns)
    counting: Counting = moving.planned(
        ("product", x.shape, operand.shape, operand.is_contiguous(), x.dtype, tile),
        lambda: _prepare_scatter(moving, x, operand, parts, out, tile),
    )
    moving.begin()
    counting.kernel(moving.current, x.data_ptr(), operand.data_ptr(), parts.data_ptr(), out.data_ptr())
    counting.calls += 1
    moving.push_when_done(
        parts.data_ptr(), counting.done.data_ptr(), [tiles * counting.calls for tiles in counting.tiles]
    )
    moving.finish()
    return out


@dataclass(slots=True, kw_only=True)
class Counting:
    """A kernel that counts the tiles of each piece it has finished; counts go up from call to call."""

    kernel: Prepared
    done: Tensor
    tiles: list[int]
    calls: int = 0


def _prepare_scatter(
    moving: push.Scattering, x: Tensor, operand: Tensor, parts: Tensor, out: Tensor, tile: Tile
) -> Counting:
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: PLC0415 - triton

    from executor.kernels.launching import Prepared  # noqa: PLC0415 - triton
    from executor.kernels.matmul_scatter import matmul_scatter  # noqa: PLC0415 - triton

    space, (rows, columns) = moving.space, out.shape
    done = torch.zeros((space.world - 1, len(moving.bounds)), dtype=torch.int32, device=x.device)
    left, right, turned = _descriptors(x, operand, tile)
    args = (
        left,
        right,
        TensorDescriptor.from_tensor(parts, [1, tile.block_m, tile.block_n // 2]),
        moving.slots,
        TensorDescriptor.from_tensor(out, [tile.block_m, tile.block_n // 2]),
        done,
        moving.flags,
        space.ticket,
        space.error,
        rows,
        columns // 8,
        x.shape[1],
        moving.bounds[0][1],
        len(moving.bounds),
        space.rank,
        space.world,
        turned,
        tile.block_m,
        tile.block_n,
        tile.block_k,
        tile.group_m,
        symmetric.POLLS,
        True,  # assembly: this is a GPU
    )
    kernel = Prepared(
        matmul_scatter,
        programs_on(x.device),
        args,
        changing=(0, 1, 2, 4),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return Counting(kernel=kernel, done=done, tiles=tiles_of(moving.bounds, columns, tile))


def tiles_of(bounds: push.Bounds, columns: int, tile: Tile) -> list[int]:
    """Return how many output tiles touch each piece of rows."""
    across = -(-columns // tile.block_n)
    return [(-(-last // tile.block_m) - first // tile.block_m) * across for first, last in bounds]
