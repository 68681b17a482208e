"""The products of the overlapped kernels with nobody to wait for, next to cuBLAS, on one GPU.

`python3 tests/bench/products_alone.py > products.jsonl`: the shapes of overlap_table.py on two ranks, from 8,192 rows
on. Both take turns for five rounds after 1.5 s of products, and the median counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from executor.gpu import stream_ops
from executor.gpu.device import processors
from executor.overlap import fused
from tests.bench.overlap_bench import Bench
from tests.bench.overlap_worker import shapes

ROWS, ROUNDS, SAMPLE_S, WARM_S = 8192, 5, 0.03, 1.5
DEVICE = torch.device("cuda", 0)


def alone(x: Tensor, weight: Tensor, out: Tensor, tile: fused.Tile, words: Tensor) -> Callable[[], object]:
    """Return the call of the persistent product of x and weight: one shard, which is all."""
    kernel = fused.gather_kernel(x, x, weight.t(), out, tuple(words), ((0, x.shape[0]),), (0, 1), tile)
    pointers = [tensor.data_ptr() for tensor in (x, weight, out)]
    return lambda: kernel(stream_ops.current_stream(DEVICE), *pointers)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.cuda.set_device(DEVICE)
    warm = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    until = time.monotonic() + WARM_S
    while time.monotonic() < until:
        _ = warm @ warm
        torch.cuda.synchronize()
    for operation, name, rows, columns, depth in dict.fromkeys(shapes(2)):
        if rows < ROWS:
            continue
        x, weight = (torch.randn(size, depth, device=DEVICE, dtype=torch.bfloat16) for size in (rows, columns))
        tiles = fused.GATHER_TILES if operation == "all_gather_matmul" else fused.SCATTER_TILES
        out, tile = x.new_empty(1, rows, columns), fused.tile_for(rows, columns, processors(DEVICE), tiles)
        words = torch.zeros(3, 4096, dtype=torch.int32, device=DEVICE)
        calls = {"ours": alone(x, weight, out, tile, words), "cublas": lambda x=x, weight=weight: x @ weight.t()}
        calls["ours"]()
        torch.testing.assert_close(out[0], calls["cublas"](), rtol=2e-2, atol=2e-2 * depth**0.5)
        inner = max(4, min(200, int(SAMPLE_S / Bench._sample(calls["cublas"], 3))))
        taken = {kind: [] for kind in calls}
        for _ in range(ROUNDS):
            for kind, call in calls.items():
                taken[kind].append(Bench._sample(call, inner))
        seconds = {kind: median(found) for kind, found in taken.items()}
        shown = {"operation": operation, "name": name, "shape": (rows, columns, depth), **seconds}
        print(json.dumps(shown | {"efficiency": seconds["cublas"] / seconds["ours"]}), flush=True)


if __name__ == "__main__":
    main()
