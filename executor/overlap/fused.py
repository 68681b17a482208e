"""One persistent Triton kernel for the matmul and its collective; on Hopper the gather's has specialised warps.

Without CUDA, for types other than bfloat16 and float16, for rows that are no multiple of 16 bytes (which TMA needs),
and for several matmuls at once, this falls back to the mode copy_engine: the same exchange with the library's matmuls,
in the type of the operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from executor.gpu import symmetric_memory as symmetric
from executor.gpu.device import processors
from executor.kernels import on_demand as kernels
from executor.kernels.prepared_kernel import PreparedKernel
from executor.overlap import all_reduce, push
from executor.overlap.copy_engine import CopyEngine
from executor.overlap.mode import Pair, shard_rows
from simulator.overlap.modes import LARGE_BYTES, TILE_COLUMNS, TILE_ROWS, takes_large_tiles

TMA_BYTES = 16
HOPPER = 9  # CUDA's compute capability
# SMs that persistent kernels leave free. Copies from other GPUs use copy engines, but within one GPU they are kernels,
# which a kernel that waits on every SM would block forever. Set by tests whose ranks share a GPU.
UNUSED_PROCESSORS = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows and columns of an output tile, its depth in k per iteration, and how many iterations are loaded ahead."""

    block_m: int = TILE_ROWS
    block_n: int = TILE_COLUMNS[0]
    block_k: int = 64
    group_m: int = 8
    stages: int = 3
    warps: int = 8
    halves: bool = False


GATHER_TILES = (Tile(halves=True, stages=4), Tile(block_n=TILE_COLUMNS[1], stages=4))
SPECIALISED_TILES = (Tile(halves=True, stages=4), Tile(block_n=TILE_COLUMNS[1], stages=5))  # of gathers on Hopper
SCATTER_TILES = (Tile(stages=3), Tile(block_n=TILE_COLUMNS[1], stages=4))


def tile_for(rows: int, columns: int, processors: int, tiles: tuple[Tile, Tile]) -> Tile:
    """Return the large or the small tile, whichever needs less time in whole waves over all SMs."""
    return tiles[0] if takes_large_tiles(rows, columns, processors) else tiles[1]


class Fused(CopyEngine):
    name = "fused"
    half_precision_only = True

    def gather_matmul(
        self, x: Tensor, operands: tuple[Tensor, ...], group: dist.ProcessGroup, *, keep: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if not kernel_supports(x, operands[0]):
            return super().gather_matmul(x, operands, group, keep=keep)
        # The first matmul overlaps the gather; the others run on the gathered rows with cuBLAS.
        keep_all = keep or len(operands) > 1
        first, exchange = _gather_matmul(x, operands[0], group, keep=keep_all)
        exchange.finish()
        gathered = exchange.plan.gathered
        return (first, *(gathered @ operand for operand in operands[1:])), gathered if keep else None

    def matmul_scatter(self, pairs: tuple[Pair, ...], group: dist.ProcessGroup) -> Tensor:
        if len(pairs) > 1 or not kernel_supports(*pairs[0]) or dist.get_world_size(group) == 1:
            return super().matmul_scatter(pairs, group)
        return _matmul_scatter(*pairs[0], group)

    def matmul_reduce(self, x: Tensor, operand: Tensor, group: dist.ProcessGroup) -> Tensor:
        if x.is_cuda and all_reduce.fits_own_kernel(x.shape[0] * operand.shape[1] * x.element_size()):
            return all_reduce.all_reduce(x @ operand, group)
        return super().matmul_reduce(x, operand, group)


def programs_on(device: torch.device) -> int:
    """Return how many programs a persistent kernel has: one per SM, except UNUSED_PROCESSORS."""
    return max(1, processors(device) - UNUSED_PROCESSORS)


def kernel_supports(x: Tensor, operand: Tensor) -> bool:
    """Return whether the kernels support these operands: half precision, aligned, contiguous or transposed."""
    row_bytes = (x.shape[1] * x.element_size(), operand.shape[1] * x.element_size())
    return (
        x.is_cuda
        and x.dtype in {torch.bfloat16, torch.float16}
        and operand.dtype == x.dtype
        and not any(n % TMA_BYTES for n in row_bytes)
        and (operand.is_contiguous() or operand.t().is_contiguous())
        and not any(t.data_ptr() % TMA_BYTES for t in (x, operand))
    )


def _descriptor(tensor: Tensor, block: list[int]) -> object:
    """Return the TMA descriptor of a tensor that is read or written in blocks."""
    return kernels.TensorDescriptor.from_tensor(tensor, block)


def _descriptors(a: Tensor, operand: Tensor, tile: Tile) -> tuple[object, object, bool]:
    """Return TMA descriptors of the left and the right operand, and whether the right one is stored as (N, K)."""
    left = _descriptor(a, [tile.block_m, tile.block_k])
    if operand.is_contiguous():
        return left, _descriptor(operand, [tile.block_k, tile.block_n]), False
    return left, _descriptor(operand.t(), [tile.block_n, tile.block_k]), True


def _gather_matmul(
    x: Tensor, operand: Tensor, group: dist.ProcessGroup, *, keep: bool
) -> tuple[Tensor, push.CopyGather]:
    exchange = push.CopyGather(x, group, pieces=pieces_for(x), keep=keep)
    out = x.new_empty(exchange.space.world * x.shape[0], operand.shape[1])
    kernel = exchange.cached(
        ("product", x.shape, operand.shape, operand.is_contiguous(), x.dtype),
        lambda: _prepare_gather(exchange, operand, out),
    )
    kernel(exchange.current, exchange.x.data_ptr(), operand.data_ptr(), out.data_ptr())
    return out, exchange


def _prepare_gather(exchange: push.CopyGather, operand: Tensor, out: Tensor) -> PreparedKernel:
    plan, space = exchange.plan, exchange.space
    words = (plan.flags, space.ticket, space.error)
    return gather_kernel(exchange.x, plan.gathered, operand, out, words, plan.bounds, (space.rank, space.world))


def gather_kernel(
    x: Tensor,
    gathered: Tensor,
    operand: Tensor,
    out: Tensor,
    words: tuple[Tensor, Tensor, Tensor],
    bounds: push.Bounds,
    place: tuple[int, int],
    tile: Tile | None = None,
) -> PreparedKernel:
    """Return the kernel for `x` (R, K), `gathered` and `out` (W·R, ...), and an operand (K, N); their addresses may
    change. `words` are flags, ticket and error, `bounds` the pieces of a shard, `place` is (rank, W).
    """
    (rows, depth), columns, programs, (rank, world) = x.shape, operand.shape[1], programs_on(x.device), place
    specialised, transposed = specialises(x.device), not operand.is_contiguous()
    tile = tile or tile_for(world * rows, columns, programs, SPECIALISED_TILES if specialised else GATHER_TILES)
    described = kernels.tile_descriptor if specialised else _descriptor
    width, right = tile.block_n // 2 if tile.halves else tile.block_n, [tile.block_k, tile.block_n]
    args = (
        described(x, [tile.block_m, tile.block_k]),
        described(gathered, [tile.block_m, tile.block_k]),
        described(operand.t(), right[::-1]) if transposed else described(operand, right),
        described(out.view(world, rows, columns), [1, tile.block_m, width]),
        *words,
        rows,
        columns,
        depth,
        bounds[0][1],
        len(bounds),
    )
    changing = (0, 2, 3)
    if specialised:
        own = kernels.Place(rank=rank, world=world, transposed=transposed, limit=symmetric.POLLS)
        return PreparedKernel(
            kernels.gather_specialised, programs, (*args, own, tile), changing=changing, num_warps=tile.warps
        )
    sizes = (tile.block_m, tile.block_n, tile.block_k, tile.group_m, tile.halves)
    constants = (rank, world, transposed, *sizes, symmetric.POLLS, True)  # assembly, since this is a GPU
    return PreparedKernel(
        kernels.gather_matmul,
        programs,
        (*args, *constants),
        changing=changing,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@cache
def specialises(device: torch.device) -> bool:
    """Return whether gathers have the kernel with specialised warps, which is in the instructions of Hopper."""
    return torch.cuda.get_device_capability(device)[0] == HOPPER


def pieces_for(x: Tensor) -> int:
    """Return two pieces per shard, so that the first arrives early; one for small shards, where latency decides."""
    return 2 if x.numel() * x.element_size() >= LARGE_BYTES else 1


def _matmul_scatter(x: Tensor, operand: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    rows, columns, device = shard_rows(x.shape[0], group), operand.shape[1], x.device
    tile = tile_for(x.shape[0], columns, programs_on(device), SCATTER_TILES)
    exchange = push.CopyScatter((rows, columns), x.dtype, group, device, unit=tile.block_m * tile.group_m)
    world = exchange.space.world
    parts, out = x.new_empty(world - 1, rows, columns), x.new_empty(rows, columns)
    counter: TileCounter = exchange.cached(
        ("product", x.shape, operand.shape, operand.is_contiguous(), x.dtype, tile),
        lambda: _prepare_scatter(exchange, x, operand, parts, out, tile),
    )
    exchange.begin()
    counter.kernel(exchange.current, x.data_ptr(), operand.data_ptr(), parts.data_ptr(), out.data_ptr())
    counter.calls += 1
    exchange.push_when_done(
        parts.data_ptr(), counter.done.data_ptr(), [tiles * counter.calls for tiles in counter.tiles]
    )
    exchange.finish()
    return out


@dataclass(slots=True, kw_only=True)
class TileCounter:
    """A prepared kernel with its counters of finished tiles per piece, which accumulate over calls."""

    kernel: PreparedKernel
    done: Tensor
    tiles: list[int]
    calls: int = 0


def _prepare_scatter(
    exchange: push.CopyScatter, x: Tensor, operand: Tensor, parts: Tensor, out: Tensor, tile: Tile
) -> TileCounter:
    space, (rows, columns) = exchange.space, out.shape
    done = torch.zeros((space.world - 1, len(exchange.bounds)), dtype=torch.int32, device=x.device)
    left, right, transposed = _descriptors(x, operand, tile)
    args = (
        left,
        right,
        _descriptor(parts, [1, tile.block_m, tile.block_n // 2]),
        exchange.slots,
        _descriptor(out, [tile.block_m, tile.block_n // 2]),
        done,
        exchange.flags,
        space.ticket,
        space.error,
        rows,
        columns // 8,
        x.shape[1],
        exchange.bounds[0][1],
        len(exchange.bounds),
        space.rank,
        space.world,
        transposed,
        tile.block_m,
        tile.block_n,
        tile.block_k,
        tile.group_m,
        symmetric.POLLS,
        True,  # assembly, since this is a GPU
    )
    kernel = PreparedKernel(
        kernels.matmul_scatter,
        programs_on(x.device),
        args,
        changing=(0, 1, 2, 4),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return TileCounter(kernel=kernel, done=done, tiles=tiles_of(exchange.bounds, columns, tile))


def tiles_of(bounds: push.Bounds, columns: int, tile: Tile) -> list[int]:
    """Return how many output tiles touch each piece of rows."""
    across = -(-columns // tile.block_n)
    return [(-(-last // tile.block_m) - first // tile.block_m) * across for first, last in bounds]
