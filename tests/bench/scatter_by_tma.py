"""A reduce-scatter mechanism that was measured and not kept: every tile is added to its owner's memory by TMA.

`cp.reduce.async.bulk.tensor` adds in the order of arrival, in the type of the output: not deterministic, rounded W - 1
times. The output has to be zero everywhere before the first tile, and complete before anybody reads it: two barriers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from executor.gpu import stream_ops
from executor.gpu.symmetric_memory import BARRIER_MS, Workspace
from executor.kernels.prepared_kernel import PreparedKernel
from executor.kernels.signals import bulk_stores_done
from executor.kernels.tiles import first_at_or_after, halves, place_in_shard, step


@triton.jit(do_not_specialize=["rows", "columns", "depth"])
def add_to_peers(
    a, b, c0, c1, c2, c3, rows, columns, depth,
    RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """Rank r's c_r (rows, N) += a[rows of r] @ b; a (W·rows, K), b described as (N, K). At most four ranks."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    per_shard = tiles_m * tiles_n
    for turn in tl.static_range(WORLD):  # a loop for every owner: the compiler flattens no loop with branches
        if (RANK + 1 + turn) % WORLD == 0:
            c = c0
        elif (RANK + 1 + turn) % WORLD == 1:
            c = c1
        elif (RANK + 1 + turn) % WORLD == 2:
            c = c2
        else:
            c = c3
        first = first_at_or_after(turn * per_shard, program, programs)
        for tile in tl.range(first, (turn + 1) * per_shard, programs, flatten=True):
            m, n = place_in_shard(tile % per_shard, tiles_m, tiles_n, GROUP_M)
            row = (RANK + 1 + turn) % WORLD * rows + m * BLOCK_M
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for k in range(tl.cdiv(depth, BLOCK_K)):
                acc = step(a, b, acc, row, n * BLOCK_N, k * BLOCK_K, True)
            one, two = halves(acc)
            c.atomic_add([m * BLOCK_M, n * BLOCK_N], one.to(c.dtype))
            c.atomic_add([m * BLOCK_M, n * BLOCK_N + BLOCK_N // 2], two.to(c.dtype))
    bulk_stores_done(0, True)


def prepare(space: Workspace, x: Tensor, weight: Tensor, programs: int) -> tuple[Callable[[], object], Tensor]:
    """Return the call and where its result lies; `weight` (N, K)."""
    rows, columns = x.shape[0] // space.world, weight.shape[0]
    space.reserve(rows * columns * x.element_size(), 1)
    outs = [space.slots.on(min(rank, space.world - 1), (rows, columns), x.dtype) for rank in range(4)]
    args = (
        TensorDescriptor.from_tensor(x, [128, 64]), TensorDescriptor.from_tensor(weight, [256, 64]),
        *(TensorDescriptor.from_tensor(out, [128, 128]) for out in outs),
        rows, columns, x.shape[1], space.rank, space.world, 128, 256, 64, 8,
    )  # fmt: skip
    kernel = PreparedKernel(add_to_peers, programs, args, changing=(), num_warps=8, num_stages=3)
    own = outs[space.rank]

    def run() -> Tensor:
        own.zero_()
        space.flags.handle.barrier(0, BARRIER_MS)
        kernel(stream_ops.current_stream(torch.device("cuda", torch.cuda.current_device())))
        space.flags.handle.barrier(0, BARRIER_MS)
        return own

    return run, own
