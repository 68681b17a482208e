"""What the modes are made of: products by tile, mechanisms of reduce-scatter, copies, signals, the host's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from executor import overlap
from executor.gpu import stream_ops
from executor.gpu import symmetric_memory as symmetric
from executor.gpu.device import processors
from executor.overlap import all_reduce, fused, push
from executor.overlap.copy_engine import rows_of_a_round
from executor.overlap.mode import products
from executor.overlap.relay import relay_sum
from executor.verify.kernels import difference
from tests.bench import torch_overlap
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
        "fill_word": lambda: stream_ops.fill_word(space.flags.at[peer], 1, stream_ops.current_stream(bench.device)),
        "write_word": lambda: stream_ops.write_word(space.flags.at[peer], 1, stream_ops.current_stream(bench.device)),
        "wait_word": lambda: stream_ops.wait_word(space.flags.at[bench.rank], 0, stream_ops.current_stream(bench.device)),
        "barrier": lambda: space.flags.handle.barrier(0, 10_000),
        "copy_small": lambda: space.slots.on(peer, (16,), torch.uint8).copy_(source[:16]),
        "add": lambda: torch.add(x, x, out=x),
    })  # fmt: skip
    for name, seconds in done.items():
        bench.recorder.write("signal", what=name, seconds=seconds)


TILES = {
    "256x3": fused.Tile(stages=3),
    "256x4h": fused.Tile(stages=4, halves=True),
    "256x3h": fused.Tile(stages=3, halves=True),
    "128x4": fused.Tile(block_n=128, stages=4),
    "128x6": fused.Tile(block_n=128, stages=5, halves=True),
}


def tiles(bench: Bench) -> None:
    """Tiles of the fused kernels on the shapes with a goal, compared with the library's product."""
    tiles_of_gather(bench)
    tiles_of_scatter(bench)


def tiles_of_gather(bench: Bench) -> None:
    for rows, columns, depth in ((16384, 3584, 8192), (8192, 1792, 4096)):
        if not bench.left(12):
            bench.recorder.missing("tiles")
            return
        whole, weight = bench.draw(rows, depth), bench.draw(columns, depth)
        shard = whole.chunk(bench.world)[bench.rank].contiguous()
        calls: dict[str, Callable[[], object]] = {"cublas": lambda: whole @ weight.t()}
        for name, tile in TILES.items():
            calls[f"gather {name}"] = lambda tile=tile: _finish(
                fused._gather_matmul(shard, weight.t(), bench.group, keep=False, tile=tile, pieces=2)
            )
            calls[f"alone {name}"] = lambda tile=tile: alone(whole, weight, tile)
        for pieces in (1, 2, 3, 4, 8):
            calls[f"gather 256x4h pieces {pieces}"] = lambda pieces=pieces: _finish(
                fused._gather_matmul(shard, weight.t(), bench.group, keep=False, tile=TILES["256x4h"], pieces=pieces)
            )
        _tile_record(bench, "all_gather_matmul", rows, columns, depth, calls)


def tiles_of_scatter(bench: Bench) -> None:
    for rows, columns, depth in ((8192, 8192, 4096), (8192, 8192, 2048)):
        if not bench.left(12):
            bench.recorder.missing("tiles")
            return
        x, weight = bench.draw(rows, depth), bench.draw(columns, depth)
        calls = {"cublas": lambda: x @ weight.t()}
        for name in ("256x3", "128x4"):
            tile = TILES[name]
            calls[f"scatter {name}"] = lambda tile=tile: fused._matmul_scatter(x, weight.t(), bench.group, tile)
            calls[f"alone {name}"] = lambda tile=tile: alone(x, weight, tile)
        calls["scatter 256x3 g4"] = lambda: fused._matmul_scatter(x, weight.t(), bench.group, fused.Tile(group_m=4))
        calls["scatter 256x3 g16"] = lambda: fused._matmul_scatter(x, weight.t(), bench.group, fused.Tile(group_m=16))
        _tile_record(bench, "matmul_reduce_scatter", rows, columns, depth, calls)


def mechanisms(bench: Bench) -> None:
    """Ways of a reduce-scatter alongside its product, on the shapes with a goal and where transfers outweigh
    arithmetic.
    """
    for rows, columns, depth in ((8192, 8192, 4096), (8192, 8192, 2048), (8192, 4096, 1024), (4096, 8192, 2048)):
        if not bench.left(12):
            bench.recorder.missing(f"mechanisms of {rows} x {columns} x {depth}")
            return
        x, weight = bench.draw(rows, depth), bench.draw(columns, depth)
        operand, shape = weight.t(), (rows // bench.world, columns)
        part, full = torch.empty(shape, dtype=x.dtype, device=x.device), bench.draw(rows, columns)

        def multiply(
            shard: int, first: int, last: int, out: Tensor, add: bool, x=x, operand=operand, r=shape[0]
        ) -> None:
            products(((x, operand),), shard * r + first, shard * r + last, out, add=add)

        def make(shard: int, out: Tensor, x=x, operand=operand, r=shape[0]) -> None:
            torch.mm(x[shard * r : (shard + 1) * r], operand, out=out)

        calls: dict[str, Callable[[], object]] = {
            "cublas": lambda: x @ operand,
            "nccl alone": lambda: dist.reduce_scatter_tensor(part, full),
            "nccl": lambda: overlap.MODES["nccl"].matmul_scatter(((x, operand),), bench.group),
            "torch": lambda: torch_overlap.TorchSymmMem().matmul_scatter(((x, operand),), bench.group),
            "whole shards, add": lambda: push.scatter_sum(make, shape, x.dtype, bench.group, bench.device),
            "TMA adds to peers": adding_to_peers(bench, x, weight),
        }
        for pieces in (2, 3, 4):
            calls[f"relay in {pieces}"] = lambda pieces=pieces: relay_sum(
                multiply, shape, x.dtype, bench.group, bench.device, pieces=pieces
            )
        for name, tile in (
            ("128x256", fused.Tile()), ("128x128", fused.Tile(block_n=128, stages=4)), ("64x256", fused.Tile(block_m=64, warps=4)),
            ("128x256 g4", fused.Tile(group_m=4)),
        ):  # fmt: skip
            calls[f"fused {name}"] = lambda tile=tile: fused._matmul_scatter(x, operand, bench.group, tile)
        done = bench.times(calls)
        bench.recorder.write(
            "tiles", operation="matmul_reduce_scatter", rows=rows, columns=columns, depth=depth, seconds=done
        )
        symmetric.check_delivered()


def relays(bench: Bench) -> None:
    """Cuts of a relayed reduce-scatter and lanes of its products, each behind a call that leaves the GPU cool."""
    for rows, columns, depth in (
        (8192, 8192, 2048), (16384, 4096, 2048), (8192, 8192, 2048), (8192, 4096, 2048), (4096, 8192, 4096), (8192, 8192, 4096),
        (8192, 8192, 2048), (4096, 4096, 2048), (2048, 8192, 4096),
    ):  # fmt: skip
        if not bench.left(5):
            bench.recorder.missing(f"relays of {rows} x {columns} x {depth}")
            return
        x, weight = bench.draw(rows, depth), bench.draw(columns, depth)
        operand, shape = weight.t(), (rows // bench.world, columns)

        def multiply(
            shard: int, first: int, last: int, out: Tensor, add: bool, x=x, operand=operand, r=shape[0]
        ) -> None:
            products(((x, operand),), shard * r + first, shard * r + last, out, add=add)

        def make(shard: int, out: Tensor, x=x, operand=operand, r=shape[0]) -> None:
            torch.mm(x[shard * r : (shard + 1) * r], operand, out=out)

        wave = rows_of_a_round(columns, processors(bench.device))
        cool = partial(overlap.MODES["nccl"].matmul_scatter, ((x, operand),), bench.group)
        wanted: dict[str, Callable[[], object]] = {
            "cublas": lambda: x @ operand,
            "copy_engine": partial(overlap.MODES["copy_engine"].matmul_scatter, ((x, operand),), bench.group),
            "fused": partial(overlap.MODES["fused"].matmul_scatter, ((x, operand),), bench.group),
            "whole shards": lambda: push.scatter_sum(make, shape, x.dtype, bench.group, bench.device),
        }
        for pieces, unit, lanes in ((2, 1, 1), (2, 1, 2), (3, wave, 1), (3, wave, 2), (4, wave, 1), (4, wave, 2)):
            wanted[f"relay in {pieces}, {lanes} lanes"] = partial(
                relay_sum, multiply, shape, torch.bfloat16, bench.group, bench.device,
                pieces=pieces, unit=unit, lanes=lanes,
            )  # fmt: skip
        expected, worst = cool().double(), torch.zeros((), dtype=torch.float64, device=bench.device)
        for call in wanted.values():
            found = call()
            if found.shape == expected.shape:
                worst = torch.maximum(worst, difference(found, expected, expected))
        calls: dict[str, Callable[[], object]] = {}
        for name, call in wanted.items():
            calls[f"nccl before {name}"] = cool
            calls[name] = call
        done = bench.times(calls, rounds=7)
        done = {name: s for name, s in done.items() if not name.startswith("nccl")}
        bench.recorder.write(
            "tiles", operation="matmul_reduce_scatter", rows=rows, columns=columns, depth=depth, seconds=done,
            difference=float(worst),
        )  # fmt: skip
        symmetric.check_delivered()


def adding_to_peers(bench: Bench, x: Tensor, weight: Tensor) -> Callable[[], object]:
    """A product whose tiles are added to their owners' memory by TMA, between two barriers; checked once."""
    from tests.bench.scatter_by_tma import prepare

    space = symmetric.workspace(bench.group, "tma", bench.device)
    run, out = prepare(space, x, weight, processors(bench.device))
    run()
    expected = overlap.MODES["nccl"].matmul_scatter(((x, weight.t()),), bench.group)
    gap = difference(out, expected.double(), expected)
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    bench.recorder.write("checked", what="TMA adds to peers, to NCCL then cuBLAS", difference=float(gap))
    return run


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


def _tile_record(
    bench: Bench, operation: str, rows: int, columns: int, depth: int, calls: dict[str, Callable[[], object]]
) -> None:
    done = bench.times(calls)
    bench.recorder.write("tiles", operation=operation, rows=rows, columns=columns, depth=depth, seconds=done)


def _finish(pair: tuple[Tensor, push.CopyGather]) -> Tensor:
    pair[1].finish()
    return pair[0]


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
