"""Captured modules on the GPUs of this machine: right, how fast, and as predicted?

    python3 tests/bench/shard_on_gpus.py OUT                on a machine with GPUs; at most 150 s
    python3 tests/bench/shard_on_gpus.py OUT --cpu          on gloo with narrow modules: whether it runs

Rows go to OUT/rows.jsonl as they are made, and to OUT/gpus.md at the end. Every row is a program of `planner shard`:
its time is predicted first, then it is run, compared with one GPU, and timed launched one by one and as a CUDA graph.

    layers      a Llama 3 8B layer alongside the executor's hand-written tensor parallelism and FSDP2
    modules     modules of transformers and diffusers at published shapes, where those are installed (or under
      --packages)
    ways        a feed-forward network whose tokens are gathered and scattered in each of the ways of the compiler
    memory      the fully sharded layer within less and less memory
    stages      two pipeline stages of feed-forward layers in 1F1B and in GPipe; on four GPUs and more with tensor
      parallelism inside
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SECONDS = 150.0
PARTS = {
    "layers,modules": 0.5,
    "ways,memory": 0.8,
    "stages": 1.0,
}  # what runs in one process group, and until which share of the time
TOKENS = 4096
REPEATS, WARM_UP = 8, 3
BUSY_S, GROUP_S = 0.3, 0.03  # seconds of runs before the first that counts, and of those timed together
CLUSTERS = {"H100": "dgx-h100", "H200": "h200x4"}  # by a word of the GPU's name
_BY_HEADS = {
    "args_0": "batch seq embed",
    "x": "batch seq embed",
    "*norm.weight": "embed",
    "*.wo.weight": "embed heads",
    "*.w2.weight": "embed mlp",
    **dict.fromkeys(("*.wq.weight", "*.wk.weight", "*.wv.weight"), "heads embed"),
    **dict.fromkeys(("*.w1.weight", "*.w3.weight"), "mlp embed"),
}
# Rows of every parameter, as FSDP2 has them: what is gathered lies in order.
_BY_ROWS = {"args_0": "batch _ _", "x": "batch _ _", "*norm.weight": "rows", "*.weight": "rows _"}
_HALVES = {"heads": "model", "mlp": "model"}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor parallel": ("model", {"axes": _BY_HEADS, "parameters": _HALVES, "compute": _HALVES}),
    "fully sharded": ("data", {"axes": _BY_ROWS, "parameters": {"rows": "data"}, "compute": {"batch": "data"}}),
}
WAYS = ("whole", 4, "ring", "broadcast", "copy_engine", "fused")
MEMORY_SHARES = (1.0, 0.8, 0.65)  # of what the program has at its peak when nothing is made again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--packages", default="", help="folder that transformers and diffusers are installed in")
    parser.add_argument("--part", default="", choices=["", *PARTS], help="one of " + ", ".join(PARTS))
    parser.add_argument("--worker", type=float, default=0.0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.packages:
        sys.path.insert(0, asked.packages)  # before other versions of the same packages
    if asked.worker:
        _worker(asked)
        return
    from executor.launch.local_ranks import FORCED_VARIABLES

    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **FORCED_VARIABLES, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    started = time.monotonic()
    for part, share in PARTS.items():
        if asked.part not in {"", part}:
            continue
        left = share * asked.seconds - (time.monotonic() - started)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={asked.ranks}"]
        command += [__file__, str(asked.out), "--part", part, "--worker", str(time.time() + left - 4)]
        command += [*(["--cpu"] if asked.cpu else []), *(["--packages", asked.packages] if asked.packages else [])]
        with (asked.out / f"{part.replace(',', '_')}.log").open("w", encoding="utf-8") as log:
            try:
                subprocess.run(command, stdout=log, stderr=log, timeout=max(1.0, left), check=False, env=environment)
            except subprocess.TimeoutExpired:
                log.write(f"ended after {left:.0f} s\n")
    (asked.out / "gpus.md").write_text(table(asked.out / "rows.jsonl"), encoding="utf-8")


def _worker(asked: argparse.Namespace) -> None:
    import torch
    from torch import distributed as dist

    if not asked.cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if asked.cpu else "nccl")
    for what, run in _cases(asked):
        go = torch.tensor([time.time() < asked.worker], device="cpu" if asked.cpu else "cuda").int()
        dist.broadcast(go, 0)
        if not go.item():
            break
        started = time.monotonic()
        row = {"what": what, "ranks": dist.get_world_size(), "device": _device_name(asked.cpu)}
        try:
            run(row)
        except ImportError as error:
            row["skipped"] = str(error)
        except Exception as error:  # noqa: BLE001 - the other rows are still worth their time
            row["failed"] = f"{type(error).__name__}: {error}"[:1500]
        row["seconds"] = round(time.monotonic() - started, 1)
        if dist.get_rank() == 0:
            with (asked.out / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def _cases(asked: argparse.Namespace):
    """Yield what is run, and the function that fills its row."""
    from tests.bench import sharded_runs as runs

    bench = runs.Bench(cpu=asked.cpu)
    for part in asked.part.split(","):
        if part == "layers":
            for name, how in LAYERS.items():
                yield f"Llama 3 8B layer, {name}", lambda row, how=how: runs.layer(row, bench, *how)
        elif part == "modules":
            yield from runs.modules(bench)
        elif part == "stages":
            for schedule in ("1f1b", "gpipe"):
                yield f"two stages, {schedule}", lambda row, how=schedule: runs.stages(row, bench, how)
        elif part == "ways":
            yield "attention, other batches and lengths", lambda row: runs.sizes(row, bench)
            for how in ("ring", "fused queries, keys and values"):
                yield f"attention, {how}", lambda row, how=how: runs.attention(row, bench, how)
            yield "experts to which tokens are sent", lambda row: runs.experts(row, bench)
            for way in WAYS:
                yield f"feed-forward, {way}", lambda row, way=way: runs.way(row, bench, way)
        else:
            for share in MEMORY_SHARES:
                yield f"fully sharded, {share:.0%} of its peak", lambda row, share=share: runs.memory(row, bench, share)


def cluster_here() -> str:
    """Return the machine of the catalogue that predicts: of these GPUs, H200s where there are none."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((cluster for word, cluster in CLUSTERS.items() if word in name), CLUSTERS["H200"])


def _device_name(cpu: bool) -> str:
    import torch

    return "cpu" if cpu else f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def table(rows: Path) -> str:
    """Return the rows as a table; times in milliseconds."""
    found = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()] if rows.exists() else []
    device = found[0]["device"] if found else "nothing"
    lines = [
        "# Captured modules on GPUs",
        "",
        f"`python3 tests/bench/shard_on_gpus.py OUT` on {found[0]['ranks'] if found else 0} x {device}. Forward and backward, bfloat16.",
        '"Off" is the largest difference to one GPU over the largest number. A prediction is made before its row is run, from',
        "datasheets, and compared with the CUDA graph where there is one.",
        "",
        "| what | off | predicted ms | as a CUDA graph ms | launched one by one ms | hand-written ms | peak GiB (predicted) | exchanges |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in found:
        if "failed" in row or "skipped" in row:
            lines.append(
                f"| {row['what']} | {(row.get('failed') or row['skipped'])[:200]} | | | | | | |".replace("\n", " ")
            )
            continue
        if "predicted_s" not in row:  # compared and not timed
            lines.append(f"| {row['what']} | {100 * row['error_of_largest']:.2g} % | | | | | | |")
            continue
        best = row.get("graph_s") or row["launched_s"]
        own = row.get("hand_written_s")
        peak = (
            f"{row['peak_bytes'] / 2**30:.2f} ({row['predicted_peak_bytes'] / 2**30:.2f})"
            if "peak_bytes" in row
            else ""
        )
        cells = [
            row["what"],
            f"{100 * row['error_of_largest']:.2g} %",
            f"{1e3 * row['predicted_s']:.3g} ({100 * (row['predicted_s'] / best - 1):+.0f} %)",
            _ms(row.get("graph_s")),
            _ms(row["launched_s"]),
            f"{1e3 * own:.3g} ({100 * (best / own - 1):+.1f} % of it{_how(row)})" if own else "",
            peak,
            row["exchanges"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _how(row: dict[str, Any]) -> str:
    return "" if row.get("by_hand_recorded", True) else ", launched one by one"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g}"


def median_s(run: Any, device: Any) -> float:
    """Return the median time of a run in the worst rank, back to back on GPUs at the clocks of a training step.

    A GPU that has rested works faster than its power limit lets it go on with, so it is kept busy before and meanwhile.
    """
    import torch
    from torch import distributed as dist

    for _ in range(WARM_UP):
        run()
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    once = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=device)
    dist.all_reduce(once, dist.ReduceOp.MAX)  # ranks run as often as each other
    together = max(1, round(GROUP_S / float(once.item()))) if device.type == "cuda" else 1
    for _ in range(round(BUSY_S / GROUP_S) * together if device.type == "cuda" else 0):
        run()
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(together):
            run()
        _wait(device)
        times.append((time.perf_counter() - start) / together)
    worst = torch.tensor([statistics.median(times)], dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst.item())


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
