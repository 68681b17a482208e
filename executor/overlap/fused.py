"""One persistent Triton kernel for the product and its collective. Without CUDA, or for shapes that TMA cannot take
(rows of no multiple of 16 bytes), and for several products at once, it falls back to copy engines between products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from executor import symmetric
from executor.overlap import all_reduce, push
from executor.overlap.copy_engine import CopyEngine
from executor.overlap.mode import Pair, shard_rows

TMA_BYTES = 16
MAX_WORLD = 8  # descriptors of peers that the kernel has parameters for


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


LARGE = Tile(halves=True, stages=4)
SMALL = Tile(block_n=128, stages=4)
SCATTER_LARGE = Tile(stages=3)


def tile_for(rows: int, columns: int, processors: int, large: Tile) -> Tile:
    """Return the large tile unless it leaves processors without work."""
    tiles = -(-rows // large.block_m) * -(-columns // large.block_n)
    return large if tiles >= processors else SMALL


class Fused(CopyEngine):
    name = "fused"

    def gather_matmul(
        self, x: Tensor, operands: tuple[Tensor, ...], group: dist.ProcessGroup, *, keep: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if not fits(x, operands[0], dist.get_world_size(group)):
            return super().gather_matmul(x, operands, group, keep=keep)
        # The first product hides the gather; the others find everything in place and are the library's.
        keep_all = keep or len(operands) > 1
        first, moving = _gather_matmul(x, operands[0], group, keep=keep_all)
        moving.finish()
        others = tuple(moving.gathered @ operand for operand in operands[1:])
        return (first, *others), moving.gathered if keep else None

    def matmul_scatter(self, pairs: tuple[Pair, ...], group: dist.ProcessGroup) -> Tensor:
        if len(pairs) > 1 or not fits(*pairs[0], dist.get_world_size(group)):
            return super().matmul_scatter(pairs, group)
        return _matmul_scatter(*pairs[0], group)

    def matmul_reduce(self, x: Tensor, operand: Tensor, group: dist.ProcessGroup) -> Tensor:
        if x.is_cuda and all_reduce.handles(x.shape[0] * operand.shape[1] * x.element_size()):
            return all_reduce.all_reduce(x @ operand, group)
        return super().matmul_reduce(x, operand, group)


def fits(x: Tensor, operand: Tensor, world: int) -> bool:
    """Say whether the kernels take these operands."""
    row_bytes = (x.shape[1] * x.element_size(), operand.shape[1] * x.element_size())
    return (
        x.is_cuda
        and world <= MAX_WORLD
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


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _gather_matmul(
    x: Tensor, operand: Tensor, group: dist.ProcessGroup, *, keep: bool, tile: Tile | None = None, pieces: int = 0
) -> tuple[Tensor, push.Gathering]:
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: PLC0415 - triton

    from executor.kernels.gather_matmul import gather_matmul  # noqa: PLC0415 - triton

    (rows, depth), columns = x.shape, operand.shape[1]
    moving = push.Gathering(x, group, pieces=pieces or pieces_for(x), keep=keep)
    space, programs = moving.space, _processors(x.device)
    tile = tile or tile_for(space.world * rows, columns, programs, LARGE)
    out = x.new_empty(space.world, rows, columns)
    own, right, turned = _descriptors(moving.x, operand, tile)
    width = tile.block_n // 2 if tile.halves else tile.block_n
    gather_matmul[(programs,)](
        own,
        TensorDescriptor.from_tensor(moving.gathered, [tile.block_m, tile.block_k]),
        right,
        TensorDescriptor.from_tensor(out, [1, tile.block_m, width]),
        moving.flags,
        space.ticket,
        space.error,
        rows,
        columns,
        depth,
        moving.piece_rows,
        len(moving.bounds),
        space.rank,
        space.world,
        turned,
        tile.block_m,
        tile.block_n,
        tile.block_k,
        tile.group_m,
        tile.halves,
        symmetric.POLLS,
        True,  # noqa: FBT003 - assembly: this is a GPU
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out.flatten(0, 1), moving


def pieces_for(x: Tensor) -> int:
    """Pieces of at least 4 MiB: below that copy engines lose more than an earlier start gains."""
    return max(1, min(push.MAX_PIECES, x.numel() * x.element_size() // 2**22))


def _matmul_scatter(x: Tensor, operand: Tensor, group: dist.ProcessGroup, tile: Tile | None = None) -> Tensor:
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: PLC0415 - triton

    from executor.kernels.matmul_scatter import matmul_scatter  # noqa: PLC0415 - triton

    x = x.contiguous()
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    rows, columns = shard_rows(x.shape[0], group), operand.shape[1]
    programs = _processors(x.device)
    tile = tile or tile_for(world * rows, columns, programs, SCATTER_LARGE)
    slot_rows = -(-rows // tile.block_m) * tile.block_m
    space = symmetric.workspace(group, "matmul_scatter", x.device)
    tiles = slot_rows // tile.block_m * -(-columns // tile.block_n)
    space.reserve(world * slot_rows * columns * x.element_size(), world * tiles)
    out = x.new_empty(rows, columns)
    left, right, turned = _descriptors(x, operand, tile)
    apart = space.set_bytes // x.element_size()

    def slots(owner: int, block: list[int]) -> object:
        base = space.slots.on(owner, (1,), x.dtype)
        return TensorDescriptor(base, [2, world * slot_rows, columns], [apart, columns, 1], block)

    matmul_scatter[(programs,)](
        left,
        right,
        *(slots((rank + step) % world, [1, tile.block_m, tile.block_n]) for step in range(1, MAX_WORLD)),
        slots(rank, [1, tile.block_m, tile.block_n // 4]),
        TensorDescriptor.from_tensor(out, [tile.block_m, tile.block_n // 4]),
        space.flags.on(rank, (world * tiles,), torch.int32),
        space.flags.addresses,
        space.epoch,
        space.ticket,
        space.error,
        rows,
        slot_rows,
        columns,
        x.shape[1],
        rank,
        world,
        turned,
        tile.block_m,
        tile.block_n,
        tile.block_k,
        tile.group_m,
        symmetric.POLLS,
        True,  # noqa: FBT003 - assembly: this is a GPU
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
