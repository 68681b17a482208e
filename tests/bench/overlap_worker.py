"""Measures on every rank, for `overlap_table.py`: checks first, then kernels alone, then every mode beside the others.

Times are of `inner` calls in a row between two CUDA events, the largest over ranks; the modes of a shape take turns for
`ROUNDS` rounds and the median counts, so that all see the same clocks. Before the first, products run until the card is
warm. Records are JSON lines, flushed one by one: a run that is cut short keeps what it had.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from executor import overlap, stream_ops, symmetric, verify_overlap
from executor.overlap import all_reduce, fused, push, torch_symm_mem
from executor.overlap.copy_engine import processors
from executor.overlap.mode import products
from executor.overlap.relay import relay_sum
from executor.records import Deadline, Recorder
from executor.verify_overlap import Shape

ROUNDS = 5
CALL_S = 10e-3  # of calls in a row for one sample
WARM_S = 2.0


class Bench:
    def __init__(self, out: str, seconds: float, rows: tuple[int, ...] = ()) -> None:
        self.rows = rows
        self.deadline = Deadline.since_launch(seconds)
        self.rank = int(dist.get_rank())
        self.group = dist.group.WORLD
        self.world = dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.recorder = Recorder(out if self.rank == 0 else None)
        self.generator = torch.Generator(self.device).manual_seed(self.rank)

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32).to(dtype)

    def left(self, seconds: float) -> bool:
        """Say whether all ranks have so many seconds left."""
        flag = torch.tensor(self.deadline.left_s - seconds, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag > 0)

    def times(self, calls: dict[str, Callable[[], object]], *, rounds: int = ROUNDS) -> dict[str, float]:
        """Return the median seconds of one call of each; a call that raises on this machine is left out."""
        inner = {}
        for name, call in list(calls.items()):
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            dist.barrier()
            inner[name] = max(4, min(200, int(CALL_S / max(self._sample(call, 3), 1e-6))))
        counts = torch.tensor(list(inner.values()), device=self.device)
        dist.all_reduce(counts, dist.ReduceOp.MIN)
        inner = dict(zip(inner, counts.tolist(), strict=True))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                samples[name].append(self._sample(call, inner[name]))
        mine = torch.tensor([median(values) for values in samples.values()], dtype=torch.float64, device=self.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return dict(zip(samples, mine.tolist(), strict=True))

    @staticmethod
    def _sample(call: Callable[[], object], inner: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(inner):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / inner

    def warm(self, seconds: float = WARM_S) -> None:
        a, b = self.draw(8192, 8192), self.draw(8192, 8192)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(20):
                a @ b
            torch.cuda.synchronize()
        dist.barrier()


# --- checks -----------------------------------------------------------------------------------------------------------


CHANGING = ("copy_engine", "fused")  # modes of ours that move data themselves


def captured(bench: Bench, iterations: int) -> None:
    """Replays of graphs, forward and backward, equal eager calls between them, and float64 now and then."""
    for operation in ("all_gather_matmul", "matmul_reduce_scatter"):
        for mode in CHANGING:
            gathers = operation == "all_gather_matmul"
            rows, depth, columns = (
                2048 * bench.world,
                256,
                2048,
            )  # so small that no way of adding is chosen but the graph's
            x = bench.draw(rows // bench.world if gathers else rows, depth).requires_grad_()
            weight = bench.draw(columns, depth).requires_grad_()

            def call(x: Tensor, weight: Tensor, mode: str = mode, gathers: bool = gathers) -> Tensor:
                if gathers:
                    return overlap.all_gather_matmul(x, (weight,), bench.group, mode=mode)[0]
                return overlap.matmul_reduce_scatter(x, weight, bench.group, mode=mode)

            replay = overlap.captured(
                call, x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
            )
            worst, exact = (torch.zeros((), dtype=torch.float64, device=bench.device) for _ in range(2))
            for turn in range(iterations):
                with torch.no_grad():
                    x.normal_(generator=bench.generator)
                found = [t.clone() for t in _both_ways(replay, x, weight)]
                for _ in range(turn % 3):
                    wanted = _both_ways(call, x, weight)
                    for one, other in zip(found, wanted, strict=True):
                        worst = torch.maximum(worst, verify_overlap._difference(one, other.double()))
                if turn % 100 == 0:
                    wide = (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
                    for one, other in zip(found, _both_ways(partial(call, mode="nccl"), *wide), strict=True):
                        exact = torch.maximum(exact, verify_overlap._difference(one, other))
            for what, value, units in (
                # The other direction of the fused gather is a reduce-scatter, of another kernel in a graph.
                ("captured, to eager", worst, 16 if mode == "fused" else 0),
                ("captured, to float64", exact, 16),
            ):
                dist.all_reduce(value, dist.ReduceOp.MAX)
                _say(bench, verify_overlap.OverlapVerdict(
                    operation=f"{operation} {what}", mode=mode, dtype="bfloat16",
                    shape=Shape(rows=rows, depth=depth, columns=columns), iterations=iterations, difference=float(value),
                    tolerance=units * torch.finfo(torch.bfloat16).eps,
                ))  # fmt: skip
    for nbytes in (2**13, 2**19, 2**22):
        x = bench.draw(nbytes // 2)
        replay = overlap.captured(lambda x: all_reduce.all_reduce(x, bench.group), x.clone())
        worst = torch.zeros((), dtype=torch.float64, device=bench.device)
        for turn in range(iterations):
            x.normal_(generator=bench.generator)
            found = replay(x).clone()
            for _ in range(turn % 3):
                worst = torch.maximum(
                    worst, verify_overlap._difference(found, all_reduce.all_reduce(x, bench.group).double())
                )
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        _say(bench, verify_overlap.OverlapVerdict(
            operation="all_reduce captured, to eager", mode="own", dtype="bfloat16",
            shape=Shape(rows=1, depth=0, columns=nbytes // 2), iterations=iterations, difference=float(worst), tolerance=0.0,
        ))  # fmt: skip


def _both_ways(call: Callable[..., Tensor], x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the result and the gradients of x and the weight, for a slope that the result itself tells."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = call(x, weight)
    return (out.detach(), *torch.autograd.grad(out, (x, weight), out.detach().cos()))


def check(bench: Bench, iterations: int, modes: tuple[str, ...]) -> None:
    """Odd shapes, both half types, poisoned buffers, random delays; then many iterations of one shape of each."""
    shapes = [
        Shape(rows=512, depth=256, columns=512),
        Shape(rows=100 * bench.world, depth=200, columns=136, weights=2),
        Shape(rows=1320 * bench.world, depth=1096, columns=776),
        Shape(rows=4096, depth=1024, columns=2048),
        Shape(rows=4096 * bench.world, depth=136, columns=6152),
    ]
    for operation in verify_overlap.OPERATIONS:
        for mode in modes:
            for number, shape in enumerate(shapes):
                for dtype in (torch.bfloat16, torch.float16):
                    if dtype == torch.float16 and number:
                        continue
                    _say(bench, verify_overlap.check(
                        operation, mode, shape, bench.group, device=bench.device, dtype=dtype, seed=number, iterations=2,
                    ))  # fmt: skip
                    verify_overlap.poison([bench.group])
    for mode in ("flagged", "one_shot", "two_shot"):
        for rows, columns in ((1, 2048), (3, 4096), (37, 1544), (128, 8192), (512, 4096)):
            if mode == "flagged" and rows > 3:
                continue
            shape = Shape(rows=rows, depth=0, columns=columns)
            for dtype in (torch.bfloat16, torch.float16)[: 2 if rows == 3 else 1]:
                _say(bench, verify_overlap.check(
                    "all_reduce", mode, shape, bench.group, device=bench.device, dtype=dtype, iterations=3
                ))  # fmt: skip
                verify_overlap.poison([bench.group])
    small, large = Shape(rows=1024, depth=512, columns=1024), Shape(rows=4096 * bench.world, depth=128, columns=6144)
    for operation, mode, shape in (
        ("all_gather_matmul", "copy_engine", small), ("matmul_reduce_scatter", "copy_engine", small),
        ("matmul_reduce_scatter", "copy_engine", large), ("all_gather_matmul", "fused", small),
        ("matmul_reduce_scatter", "fused", small), ("all_reduce", "one_shot", small), ("all_reduce", "two_shot", small),
        ("all_reduce", "flagged", Shape(rows=8, depth=0, columns=4096)),
    ):  # fmt: skip
        if not bench.left(5):
            bench.recorder.missing(f"{operation} {mode}: many iterations")
            continue
        _say(bench, verify_overlap.check(
            operation, mode, shape, bench.group, device=bench.device, dtype=torch.bfloat16, delays=True, seed=77,
            iterations=iterations if shape is not large else iterations // 4,
        ))  # fmt: skip
    symmetric.check_delivered()


def _say(bench: Bench, verdict: verify_overlap.OverlapVerdict) -> None:
    shape = verdict.shape
    bench.recorder.write(
        "check", operation=verdict.operation, mode=verdict.mode, dtype=verdict.dtype, rows=shape.rows, depth=shape.depth,
        columns=shape.columns, weights=shape.weights, iterations=verdict.iterations, difference=min(verdict.difference, 1e30),
        tolerance=verdict.tolerance, ok=verdict.ok,
    )  # fmt: skip
    try:
        symmetric.check_delivered()
    except symmetric.SymmetricMemoryError as error:
        bench.recorder.missing(f"{verdict.operation} {verdict.mode}: {error.what}")


# --- parts ------------------------------------------------------------------------------------------------------------


def parts(bench: Bench) -> None:
    """What the cost model is calibrated with: products alone by tile, copies by size, signals, a barrier."""
    space = symmetric.workspace(bench.group, "parts", bench.device)
    space.reserve(2**28, 1024)
    peer = (bench.rank - 1) % bench.world
    source = torch.empty(2**28, dtype=torch.uint8, device=bench.device).random_()
    for nbytes in (2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28):
        theirs = space.slots.on(peer, (nbytes,), torch.uint8)

        def copy(theirs: Tensor = theirs, nbytes: int = nbytes) -> None:
            current, side = stream_ops.current(bench.device), push.side_stream(bench.device).cuda_stream
            space.order(first=current, then=side)
            stream_ops.copy(theirs.data_ptr(), source.data_ptr(), nbytes, side)
            space.order(first=side, then=current)

        bench.recorder.write("copy", bytes=nbytes, seconds=bench.times({"push": copy}, rounds=3)["push"])
    x = bench.draw(2**20)
    done = bench.times({
        "fill_word": lambda: stream_ops.fill_word(space.flags.at[peer], 1, stream_ops.current(bench.device)),
        "write_word": lambda: stream_ops.write_word(space.flags.at[peer], 1, stream_ops.current(bench.device)),
        "wait_word": lambda: stream_ops.wait_word(space.flags.at[bench.rank], 0, stream_ops.current(bench.device)),
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
    """Tiles of the fused kernels on the shapes with a goal, beside the library's product."""
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
    """Ways of a reduce-scatter beside its product, on the shapes with a goal and where transfers outweigh arithmetic."""
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
            "torch": lambda: overlap.MODES["torch_symm_mem"].matmul_scatter(((x, operand),), bench.group),
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


def adding_to_peers(bench: Bench, x: Tensor, weight: Tensor) -> Callable[[], object]:
    """A product whose tiles are added to their owners' memory by TMA, between two barriers; checked once."""
    from tests.bench.scatter_by_tma import prepare

    space = symmetric.workspace(bench.group, "tma", bench.device)
    run, out = prepare(space, x, weight, processors(bench.device))
    run()
    expected = overlap.MODES["nccl"].matmul_scatter(((x, weight.t()),), bench.group)
    gap = verify_overlap._difference(out, expected.double())
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


def _finish(pair: tuple[Tensor, push.Gathering]) -> Tensor:
    pair[1].finish()
    return pair[0]


_ALONE: dict[object, Callable[..., None]] = {}


def alone(x: Tensor, weight: Tensor, tile: fused.Tile) -> Tensor:
    """The fused kernel's product without anybody to wait for: one shard, which is all."""
    out = x.new_empty(1, x.shape[0], weight.shape[0])
    key = (x.shape, weight.shape, x.dtype, tile)
    if key not in _ALONE:
        _ALONE[key] = _prepare_alone(x, weight, out, tile)
    _ALONE[key](stream_ops.current(x.device), x.data_ptr(), x.data_ptr(), weight.data_ptr(), out.data_ptr())
    return out[0]


def _prepare_alone(x: Tensor, weight: Tensor, out: Tensor, tile: fused.Tile) -> Callable[..., None]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from executor.kernels.gather_matmul import gather_matmul
    from executor.kernels.launching import Prepared

    flags, ticket, error = (symmetric.workspace(dist.group.WORLD, name, x.device).words for name in ("f", "t", "e"))
    (left, right, turned), (gathered, _, _) = (fused._descriptors(x, weight.t(), tile) for _ in range(2))
    width = tile.block_n // 2 if tile.halves else tile.block_n
    args = (
        left, gathered, right, TensorDescriptor.from_tensor(out, [1, tile.block_m, width]), flags, ticket, error,
        x.shape[0], weight.shape[0], x.shape[1], x.shape[0], 1, 0, 1, turned, tile.block_m, tile.block_n, tile.block_k,
        tile.group_m, tile.halves, 1, True,
    )  # fmt: skip
    return Prepared(
        gather_matmul, processors(x.device), args, changing=(0, 1, 2, 3), num_warps=tile.warps, num_stages=tile.stages
    )


# --- table ------------------------------------------------------------------------------------------------------------


def shapes(world: int) -> list[tuple[str, str, int, int, int]]:
    """Return (operation, name, rows, columns, depth): the shapes with a goal, then Llama layers cut over the ranks."""
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    wanted = [
        (gather, "goal", 16384, 3584, 8192),
        (gather, "goal", 8192, 1792, 4096),
        (scatter, "goal", 8192, 8192, 4096),
        (scatter, "goal", 8192, 8192, 2048),
        (scatter, "goal", 16384, 8192, 4096),
    ]
    llama = {"8B": (4096, 14336, 1024), "70B": (8192, 28672, 1024), "405B": (16384, 53248, 1024)}
    for rows in (1024, 2048, 4096, 8192, 16384):
        for name, (width, inner, kv) in llama.items():
            if name == "405B" and rows > 4096:
                continue
            wanted += [
                (gather, f"{name} up", rows, inner // world, width),
                (scatter, f"{name} down", rows, width, inner // world),
                (gather, f"{name} qkv", rows, (width + 2 * kv) // world, width),
                (scatter, f"{name} o", rows, width, width // world),
            ]
    return wanted


def table(bench: Bench) -> None:
    wanted = [shape for shape in shapes(bench.world) if shape[1] == "goal" or not bench.rows or shape[2] in bench.rows]
    for number, (operation, name, rows, columns, depth) in enumerate(wanted):
        if not bench.left(6):
            bench.recorder.missing(f"shapes from number {number} on")
            return
        gathers = operation == "all_gather_matmul"
        weight = bench.draw(columns, depth)
        whole = bench.draw(rows, depth)
        x = whole.chunk(bench.world)[bench.rank].contiguous() if gathers else whole
        full = whole if gathers else bench.draw(rows, columns)
        part = torch.empty_like(full.chunk(bench.world)[0])
        calls: dict[str, Callable[[], object]] = {
            "cublas": lambda: whole @ weight.t(),
            "triton": lambda: alone(whole, weight, fused.tile_for(rows, columns, 132, fused.GATHER_TILES)),
        }
        if gathers:
            calls["collective"] = lambda: dist.all_gather_into_tensor(full, part)
        else:
            calls["collective"] = lambda: dist.reduce_scatter_tensor(part, full)
        run = overlap.all_gather_matmul if gathers else overlap.matmul_reduce_scatter
        for mode in overlap.MODES:
            argument = (weight,) if gathers else weight
            calls[mode] = lambda mode=mode, argument=argument: run(x, argument, bench.group, mode=mode)
        with torch.no_grad():
            done = bench.times(calls)
        bench.recorder.write(
            "shape",
            operation=operation,
            name=name,
            rows=rows,
            columns=columns,
            depth=depth,
            world=bench.world,
            seconds=done,
        )
        symmetric.check_delivered()


def sums(bench: Bench) -> None:
    """All-reduce by size, from a captured graph as inference uses it, and launched one by one."""
    for nbytes in (2**power for power in range(12, 25)):
        if not bench.left(5):
            bench.recorder.missing(f"all-reduce from {nbytes} bytes on")
            return
        x = bench.draw(nbytes // 2)
        calls: dict[str, Callable[[], object]] = {
            "nccl": lambda x=x: dist.all_reduce(x),
            "torch": lambda x=x: torch_symm_mem.all_reduce(x, bench.group),
        }
        held = symmetric.workspace(bench.group, "torch", bench.device)
        held.reserve(nbytes, 1)
        inside = held.slots.local[:nbytes].view(torch.bfloat16)
        calls["torch_one_shot"] = lambda inside=inside: torch.ops.symm_mem.one_shot_all_reduce(
            inside, "sum", bench.group.group_name
        )
        calls["torch_two_shot"] = lambda inside=inside: torch.ops.symm_mem.two_shot_all_reduce_(
            inside, "sum", bench.group.group_name
        )
        calls["own"] = lambda x=x: all_reduce.all_reduce(x, bench.group)
        calls["own in place"] = lambda x=x: all_reduce.all_reduce(x, bench.group, out=x)
        for shots in (1, 2):
            cut = replace(all_reduce.launch_for(x.numel(), 2, bench.world, bench.device), shots=shots)
            calls[f"own {shots} shot"] = lambda x=x, cut=cut: all_reduce.all_reduce(x, bench.group, launch=cut)
        if (words := all_reduce.flagged(x.numel(), 2)) is not None:
            calls["own flagged words"] = lambda x=x, cut=words: all_reduce.all_reduce(x, bench.group, launch=cut)
        eager = bench.times(calls, rounds=5)
        bench.recorder.write("all_reduce", bytes=nbytes, how="eager", seconds=eager)
        replays = {name: graph(call, 20) for name, call in calls.items()}
        done = {name: seconds / 20 for name, seconds in bench.times(replays, rounds=5).items()}
        bench.recorder.write("all_reduce", bytes=nbytes, how="graph", seconds=done)
        replays.clear()
        symmetric.check_delivered()


def graph(call: Callable[[], object], count: int) -> Callable[[], object]:
    """Return the replay of `count` calls captured in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(count):
            call()
    return captured.replay


def norms(bench: Bench) -> None:
    """All-reduce, residual and RMSNorm: in one kernel, or one after the other."""
    for rows, columns in ((1, 4096), (16, 4096), (128, 4096), (512, 4096), (1, 8192), (64, 8192), (512, 8192)):
        x, residual, weight = bench.draw(rows, columns), bench.draw(rows, columns), bench.draw(columns)

        def sequence(
            reduce: Callable[[Tensor], Tensor], x: Tensor = x, r: Tensor = residual, w: Tensor = weight
        ) -> Tensor:
            kept = r + reduce(x)
            return torch.nn.functional.rms_norm(kept, (x.shape[1],), w, 1e-5)

        def nccl(x: Tensor) -> Tensor:
            dist.all_reduce(x)
            return x

        calls = {
            "one_kernel": lambda: all_reduce.all_reduce_rms_norm(x, residual, weight, bench.group, eps=1e-5),
            "own_then_norm": lambda: sequence(lambda t: all_reduce.all_reduce(t, bench.group)),
            "nccl_then_norm": lambda: sequence(nccl),
        }
        replays = {name: graph(call, 20) for name, call in calls.items()}
        done = {name: seconds / 20 for name, seconds in bench.times(replays, rounds=5).items()}
        bench.recorder.write("norm", rows=rows, columns=columns, seconds=done)
    symmetric.check_delivered()


STAGES = {
    "parts": parts,
    "tiles": tiles,
    "scatter_tiles": tiles_of_scatter,
    "mechanisms": mechanisms,
    "host": host,
    "table": table,
    "sums": sums,
    "norms": norms,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--stages", default="check")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--modes", default=",".join(overlap.MODES), help="those to check")
    parser.add_argument("--rows", default="", help="numbers of rows in the table; default: all")
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    symmetric.POLLS = 1 << 25
    bench = Bench(options.out, options.seconds, tuple(int(rows) for rows in options.rows.split(",") if rows))
    for stage in options.stages.split(","):
        if stage == "check":
            check(bench, options.iterations, tuple(options.modes.split(",")))
            captured(bench, options.iterations)
        else:
            bench.warm()
            STAGES[stage](bench)
        bench.recorder.write("stage", name=stage, left_s=bench.deadline.left_s)
    symmetric.release()
    bench.recorder.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
