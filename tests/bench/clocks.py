"""What clocks a GPU really runs at, step by step from a rest, and what AdamW takes on zeros and on numbers.

    python3 tests/bench/clocks.py OUT.json

On one GPU, in about 50 s: large products, single layers as a calibration runs them, and whole models, each with its
times and the mean clock between steps by the processors' own counters (`executor.gpu.sm_clock`), in twelfths of its
run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - the path comes first
import torch.distributed as dist  # noqa: E402 - as above

from executor.calibrate.layers import own_step  # noqa: E402 - as above
from executor.gpu.sm_clock import SmClock  # noqa: E402 - as above
from executor.launch.garbage_collection import PausedGarbageCollection  # noqa: E402 - as above
from simulator.config.model import Model  # noqa: E402 - as above
from simulator.config.plan import Plan  # noqa: E402 - as above
from simulator.config.runtime import Runtime  # noqa: E402 - as above
from simulator.config.workload import Workload  # noqa: E402 - as above
from tests.bench.plan_sets import AXES  # noqa: E402 - as above

WIDE, NARROW = (4096, 32, 8, 128, 14336), (512, 8, 2, 64, 1536)  # width, heads, key heads, head width, feed-forward
WHOLE = ("13b-short", "8b-micro4", "1b-one-sequence", "moe-qwen")  # of the set h200x1-fresh
RUNTIME = Runtime(name="meshwright")
PARTS = 12


def series(device: torch.device, step: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Return means of times and clocks over twelfths of a run of `seconds`, after a second of rest."""
    time.sleep(1.0)
    clock, times, began = SmClock(device), [], time.monotonic()
    clock.stamp()
    while time.monotonic() - began < seconds:
        before = time.perf_counter()
        step()
        clock.stamp()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - before)
    size, clocks = max(1, len(times) // PARTS), clock.hertz()
    starts = range(0, len(times), size)
    return {
        "steps": len(times),
        "seconds": [sum(part) / len(part) for part in (times[at : at + size] for at in starts)],
        "hertz": [sum(known) / len(known) if (known := [hz for hz in clocks[at : at + size] if hz]) else None for at in starts],
        "missing": clock.missing,
    }  # fmt: skip


def layer_step(device: torch.device, layers: int, shape: tuple[int, ...], vocab: int, seq_len: int) -> Any:
    hidden, heads, kv_heads, head_dim, ffn = shape
    model = Model(
        name=f"layer of width {hidden}", family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, ffn=ffn, vocab=vocab,
    )  # fmt: skip
    return own_step(model, Plan(), Workload(seq_len=seq_len, global_batch_size=1), RUNTIME, device)


def update(device: torch.device, sizes: list[int], *, numbers: bool) -> dict[str, float]:
    """Return what a fused AdamW step takes for parameters of these sizes, on numbers or on zeros."""
    draw = torch.randn if numbers else torch.zeros
    parameters = [draw(size, device=device).requires_grad_() for size in sizes]
    for parameter in parameters:
        parameter.grad = draw(parameter.shape, device=device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)
    repeats = max(4, 2 * 10**9 // sum(sizes))
    for _ in range(3):
        optimizer.step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        optimizer.step()
    end.record()
    end.synchronize()
    seconds = begin.elapsed_time(end) * 1e-3 / repeats
    return {"parameters": sum(sizes), "seconds": seconds, "picoseconds_per_parameter": seconds / sum(sizes) * 1e12}


def main(out: Path) -> None:
    found: dict[str, Any] = {}
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    left, right = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))

    def products() -> None:
        for _ in range(10):
            left @ right

    runs: dict[str, tuple[Callable[[], Any], float]] = {"10 products of 8192": (lambda: products, 3.0)}
    for layers in (1, 2):
        for vocab in (4096, 128256):
            name = f"{layers} of width 4096, {vocab} words"
            runs[name] = (lambda n=layers, v=vocab: layer_step(device, n, WIDE, v, 8192)), 3.0
        runs[f"{layers} of width 512"] = (lambda n=layers: layer_step(device, n, NARROW, 1024, 256)), 1.0
    for name in WHOLE:
        asked = AXES["h200x1-fresh"][name]
        runs[name] = (lambda q=asked: own_step(q.network, q.plan, q.workload, RUNTIME, device)), 4.0
    for name, (build, seconds) in runs.items():
        with PausedGarbageCollection():
            found[name] = series(device, build(), seconds)
        gc.collect()
        torch.cuda.empty_cache()
        out.write_text(json.dumps(found, indent=1))
        print(name, found[name], flush=True)
    h, kv, f = 4096, 1024, 14336
    layer = [h * h, h * kv, h * kv, h * h, h * f, h * f, f * h, h, h]
    for name, sizes in {"half a layer": [size // 2 for size in layer], "eight layers": 8 * layer}.items():
        for numbers in (False, True):
            key = f"AdamW, {name}, {'numbers' if numbers else 'zeros'}"
            found[key] = update(device, sizes, numbers=numbers)
            print(key, found[key], flush=True)
    out.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    main(options.out)
