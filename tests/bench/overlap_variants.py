"""What the modes are made of: copies, signals, a product with nobody to wait for, the host's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from executor import overlap
from executor.gpu import stream_ops
from executor.gpu import symmetric_memory as symmetric
from executor.overlap import all_reduce, fused, push
from tests.bench.overlap_bench import Bench


def parts(bench: Bench) -> None:
    """What the cost model is calibrated with: products alone by tile, copies by size, signals, a barrier."""
    space = symmetric.workspace(bench.group, "parts", bench.device)
    space.reserve(2**28, 1024)
    peer = (bench.rank - 1) % bench.world
    source = torch.empty(2**28, dtype=torch.uint8, device=bench.device).random_()
    for nbytes in (2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28):
        theirs = space.slots.on(peer, (nbytes,), torch.uint8)

        def copy(theirs: Tensor = theirs, nbytes: int = nbytes) -> None:
            current, side = stream_ops.current_stream(bench.device), push.side_stream(bench.device).cuda_stream
            space.order(first=current, then=side)
            stream_ops.copy(theirs.data_ptr(), source.data_ptr(), nbytes, side)
            space.order(first=side, then=current)

        bench.recorder.write("copy", bytes=nbytes, seconds=bench.times({"push": copy}, rounds=3)["push"])
    x = bench.draw(2**20)
    done = bench.times({
        "write_word": lambda: stream_ops.write_word(space.flags.at[peer], 1, stream_ops.current_stream(bench.device)),
        "wait_word": lambda: stream_ops.wait_word(space.flags.at[bench.rank], 0, stream_ops.current_stream(bench.device)),
        "barrier": lambda: space.flags.handle.barrier(0, 10_000),
        "copy_small": lambda: space.slots.on(peer, (16,), torch.uint8).copy_(source[:16]),
        "add": lambda: torch.add(x, x, out=x),
    })  # fmt: skip
    for name, seconds in done.items():
        bench.recorder.write("signal", what=name, seconds=seconds)


def host(bench: Bench) -> None:
    """What a call costs the host: calls of tiny products in a row, without waiting for the GPU, per mode."""
    x, weight = bench.draw(256, 256), bench.draw(256, 256)
    small = bench.draw(2048)
    calls: dict[str, Callable[[], object]] = {"all_reduce own": lambda: all_reduce.all_reduce(small, bench.group)}
    for mode in overlap.MODES:
        calls[f"gather {mode}"] = lambda mode=mode: overlap.all_gather_matmul(x, (weight,), bench.group, mode=mode)
        calls[f"scatter {mode}"] = lambda mode=mode: overlap.matmul_reduce_scatter(x, weight, bench.group, mode=mode)
    large, wide = bench.draw(4096, 2048), bench.draw(8192, 2048)
    calls["scatter copy_engine, large"] = lambda: overlap.matmul_reduce_scatter(
        large, wide, bench.group, mode="copy_engine"
    )
    calls["gather fused, large"] = lambda: overlap.all_gather_matmul(large, (wide,), bench.group, mode="fused")
    found = {}
    with torch.no_grad():
        for name, call in calls.items():
            samples = []
            for _ in range(30):
                call()
                torch.cuda.synchronize()
                dist.barrier()
                torch.cuda.synchronize()
                start = time.perf_counter()
                call()
                call()
                samples.append((time.perf_counter() - start) / 2)
            found[name] = median(samples)
    bench.recorder.write("host", seconds=found)


_ALONE: dict[object, Callable[..., None]] = {}


def alone(x: Tensor, weight: Tensor, tile: fused.Tile) -> Tensor:
    """The fused kernel's product without anybody to wait for: one shard, which is all."""
    out = x.new_empty(1, x.shape[0], weight.shape[0])
    key = (x.shape, weight.shape, x.dtype, tile)
    if key not in _ALONE:
        words = tuple(symmetric.workspace(dist.group.WORLD, name, x.device).words for name in ("f", "t", "e"))
        _ALONE[key] = fused.gather_kernel(x, x, weight.t(), out, words, ((0, x.shape[0]),), (0, 1), tile)
    _ALONE[key](stream_ops.current_stream(x.device), x.data_ptr(), weight.data_ptr(), out.data_ptr())
    return out[0]
