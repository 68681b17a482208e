"""Measures on every rank, for `overlap_table.py`: checks first, then kernels alone, then every mode alongside the
others.

Times are of `inner` calls in a row between two CUDA events, the largest over ranks; the modes of a shape take turns for
`ROUNDS` rounds and the median counts, so that all see the same clocks. Before the first, products run until the card is
warm. Records are JSON lines, flushed one by one: a run that is cut short keeps what it had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor import overlap
from executor.gpu import symmetric_memory as symmetric
from executor.overlap import all_reduce, fused
from executor.overlap.mode import Mode
from tests.bench import torch_overlap
from tests.bench.overlap_bench import Bench
from tests.bench.overlap_variants import alone, host, parts
from tests.executor.workers import overlap_checks_worker as checks

BACKWARD_ROWS = 8192  # from here on gradients are timed, too


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
    wanted = [
        shape
        for shape in shapes(bench.world)
        if shape[1] == "goal"
        or ((not bench.rows or shape[2] in bench.rows) and (not bench.operations or shape[0] in bench.operations))
    ]
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
        argument = (weight,) if gathers else weight
        modes: dict[str, Mode] = {**overlap.MODES, "torch_symm_mem": torch_overlap.TorchSymmMem()}
        for mode, how in modes.items():
            calls[mode] = lambda how=how: run(x, argument, bench.group, mode=how)
        with torch.no_grad():
            done = bench.times(calls)
        of = {"operation": operation, "name": name, "rows": rows, "columns": columns, "depth": depth}
        bench.recorder.write("shape", **of, world=bench.world, seconds=done)
        if rows >= BACKWARD_ROWS:
            done = bench.times(backward(bench, whole, weight, x, full, run, modes))
            bench.recorder.write("backward", **of, world=bench.world, seconds=done)
        symmetric.check_delivered()


def backward(
    bench: Bench,
    whole: Tensor,
    weight: Tensor,
    x: Tensor,
    full: Tensor,
    run: Callable[..., Any],
    modes: dict[str, Mode],
) -> dict[str, Callable[[], object]]:
    """Return the gradients of both operands by mode; both products alone; and what moves alone: the tokens again and
    the gradient back for a gather, the gradient once for a scatter.
    """
    gathers = run is overlap.all_gather_matmul
    seed = bench.draw(whole.shape[0] if gathers else whole.shape[0] // bench.world, weight.shape[0])
    grad = seed if gathers else bench.draw(whole.shape[0], weight.shape[0])
    back, part = torch.empty_like(whole), torch.empty_like(x)

    def products() -> None:
        grad @ weight
        grad.t() @ whole

    def collective() -> None:
        if gathers:
            dist.all_gather_into_tensor(back, part)
            dist.reduce_scatter_tensor(part, back)
        else:
            dist.all_gather_into_tensor(full, seed)

    calls: dict[str, Callable[[], object]] = {"cublas": products, "collective": collective}
    for mode, how in modes.items():
        operands = tuple(one.detach().requires_grad_() for one in (x, weight))
        out = run(operands[0], (operands[1],) if gathers else operands[1], bench.group, mode=how)
        out = out[0] if gathers else out
        calls[mode] = lambda out=out, operands=operands: torch.autograd.grad(out, operands, seed, retain_graph=True)
    return calls


def sums(bench: Bench) -> None:
    """All-reduce by size, from a captured graph as inference uses it, and launched one by one."""
    for nbytes in (2**power for power in range(12, 25)):
        if not bench.left(5):
            bench.recorder.missing(f"all-reduce from {nbytes} bytes on")
            return
        x = bench.draw(nbytes // 2)
        calls: dict[str, Callable[[], object]] = {
            "nccl": lambda x=x: dist.all_reduce(x),
            "torch": lambda x=x: torch_overlap.all_reduce(x, bench.group),
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
    "host": host,
    "table": table,
    "sums": sums,
    "norms": norms,
}


def main() -> None:
    parser = checks.parser()
    parser.add_argument("--rows", type=checks.names, default=(), help="numbers of rows in the table; default: all")
    parser.add_argument("--operations", type=checks.names, default=(), help="operations in the table; default: all")
    options = checks.read(parser, timed=STAGES)
    rows = tuple(int(text) for text in options.rows)
    checks.run(options, lambda: Bench(options.out, options.seconds, rows, options.operations), _timed)


def _timed(bench: Bench, stage: str) -> None:
    bench.warm()
    STAGES[stage](bench)


if __name__ == "__main__":
    main()
