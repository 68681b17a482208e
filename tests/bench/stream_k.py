"""Products whose last round of tiles is shared along the depth (stream-K, arXiv 2301.03598), next to the present
ones.

`python3 tests/bench/stream_k.py > stream_k.jsonl`: on one GPU, the products of `products_alone.py` whose tiles do not
fill whole rounds. The last full round and the rest are cut into as many equal runs of steps as there are SMs. A run
that begins inside a tile leaves its sum in float32 for the run before it, which began the tile. The remaining tiles go
whole.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from executor.gpu.device import processors
from executor.kernels.tiles import place_in_shard, step
from executor.overlap import fused
from tests.bench.overlap_bench import Bench
from tests.bench.overlap_worker import shapes
from tests.bench.products_alone import DEVICE, ROUNDS, ROWS, SAMPLE_S, WARM_S, alone

BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M = 128, 256, 64, 8
PATIENCE = 10_000_000  # polls, so that a mistake ends


@triton.jit
def _one_tile(
    a, b, tile, first, last, tiles_m, tiles_n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr
):
    m, n = place_in_shard(tile, tiles_m, tiles_n, G)
    acc = tl.zeros((M, N), dtype=tl.float32)
    for k in range(first, last):
        acc = step(a, b, acc, m * M, n * N, k * K, True)
    return acc, m * M, n * N


@triton.jit(do_not_specialize=["shared"])
def stream_k(
    a, b, c, sums, flags, rows, columns, depth, shared,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Compute c = a @ b^T; the first `shared` tiles are cut along the depth, none between more than two programs."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n, steps = tl.cdiv(rows, M), tl.cdiv(columns, N), tl.cdiv(depth, K)
    at = program * shared * steps // programs
    end = (program + 1) * shared * steps // programs
    inside = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    while at < end:
        tile, first = at // steps, at % steps
        last = tl.minimum(steps, first + end - at)
        acc, row, column = _one_tile(a, b, tile, first, last, tiles_m, tiles_n, M, N, K, G)
        if first > 0:
            tl.store(sums + program * M * N + inside, acc, cache_modifier=".cg")
            tl.debug_barrier()
            tl.atomic_xchg(flags + program, 1, sem="release")
        else:
            if last < steps:
                polls = 0
                while (tl.atomic_cas(flags + program + 1, 1, 0, sem="acquire") != 1) & (polls < LIMIT):
                    polls += 1
                tl.debug_barrier()
                acc += tl.load(sums + (program + 1) * M * N + inside, cache_modifier=".cg")
            c.store([row, column], acc.to(c.dtype))
        at += last - first
    for whole in tl.range(shared + program, tiles_m * tiles_n, programs, flatten=True):
        acc, row, column = _one_tile(a, b, whole, 0, steps, tiles_m, tiles_n, M, N, K, G)
        c.store([row, column], acc.to(c.dtype))


def called(x, weight, out):
    """Return the call, or None where tiles fill whole rounds."""
    (rows, depth), columns, programs = x.shape, weight.shape[0], processors(DEVICE)
    tiles = triton.cdiv(rows, BLOCK_M) * triton.cdiv(columns, BLOCK_N)
    if tiles < programs or tiles % programs == 0:
        return None
    a = TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_K])
    b = TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K])
    c = TensorDescriptor.from_tensor(out, [BLOCK_M, BLOCK_N])
    sums = torch.empty(programs + 1, BLOCK_M * BLOCK_N, device=DEVICE, dtype=torch.float32)
    flags = torch.zeros(programs + 1, device=DEVICE, dtype=torch.int32)
    shared = tiles % programs + programs
    return lambda: stream_k[(programs,)](
        a, b, c, sums, flags, rows, columns, depth, shared, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PATIENCE,
        num_warps=8, num_stages=3,
    )  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.cuda.set_device(DEVICE)
    warm = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    until = time.monotonic() + WARM_S
    while time.monotonic() < until:
        _ = warm @ warm
        torch.cuda.synchronize()
    for operation, name, rows, columns, depth in dict.fromkeys(shapes(2)):
        if rows != ROWS:
            continue
        x, weight = (torch.randn(size, depth, device=DEVICE, dtype=torch.bfloat16) for size in (rows, columns))
        tiles = fused.GATHER_TILES if operation == "all_gather_matmul" else fused.SCATTER_TILES
        out, tile = x.new_empty(1, rows, columns), fused.tile_for(rows, columns, processors(DEVICE), tiles)
        words = torch.zeros(3, 4096, dtype=torch.int32, device=DEVICE)
        mine = x.new_full((rows, columns), float("nan"))
        split = called(x, weight, mine)
        if split is None:
            continue
        calls = {"cublas": lambda x=x, weight=weight: x @ weight.t(), "ours": alone(x, weight, out, tile, words)}
        calls["stream_k"] = split
        for _ in range(3):
            split()
        torch.testing.assert_close(mine, calls["cublas"](), rtol=2e-2, atol=2e-2 * depth**0.5)
        inner = max(4, min(200, int(SAMPLE_S / Bench._sample(calls["cublas"], 3))))
        taken = {kind: [] for kind in calls}
        for _ in range(ROUNDS):
            for kind, call in calls.items():
                taken[kind].append(Bench._sample(call, inner))
        seconds = {kind: median(found) for kind, found in taken.items()}
        rounds = triton.cdiv(rows, BLOCK_M) * triton.cdiv(columns, BLOCK_N) / processors(DEVICE)
        shown = {"operation": operation, "name": name, "shape": (rows, columns, depth), "rounds": rounds, **seconds}
        efficiency = {kind: seconds["cublas"] / seconds[kind] for kind in ("ours", "stream_k")}
        print(json.dumps(shown | {"efficiency": efficiency}), flush=True)


if __name__ == "__main__":
    main()
