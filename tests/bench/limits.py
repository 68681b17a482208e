"""Questions that are too large, each with a time limit: seconds, memory and answer of every one: `limits.py OUT.md`.

CPU seconds are what a loaded machine and an idle one have in common: a command with `--time-limit 5` should take no
more than 7 of them, start included. So that a loaded machine shows what an idle one does, the clock that commands read
is their own CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 5
PATIENCE_S = 300.0
COMMAND = "import time; time.monotonic = time.process_time; from planner.cli import main; raise SystemExit(main())"


def inputs(folder: Path) -> None:
    """Write the large inputs."""
    columns = [f"GPU{n}" for n in range(1000)]
    rows = [f"{name}\t" + "\t".join("X" if name == other else "NV18" for other in columns) for name in columns]
    (folder / "matrix.txt").write_text("\t" + "\t".join(columns) + "\n" + "\n".join(rows) + "\n")
    gpus = "".join(f'<gpu dev="{n}" sm="90" rank="{n}" gdr="1"/>' for n in range(20_000))
    (folder / "system.xml").write_text(
        f'<system version="1"><cpu numaid="0"><pci busid="0">{gpus}</pci></cpu></system>'
    )
    deep = json.loads((ROOT / "simulator" / "models" / "llama3-8b.json").read_text()) | {"num_hidden_layers": 100_000}
    (folder / "deep.json").write_text(json.dumps(deep))
    (folder / "wide.json").write_text(json.dumps({"gpu": "h100-sxm", "gpus_per_node": 1024, "nodes": 4}))
    brackets = "index, " + "[" * 400_000 + "name\n0, x\n"
    (folder / "brackets.txt").write_text(brackets)


def commands(folder: Path) -> dict[str, list[str]]:
    suggest = ["suggest", "--time-limit", str(LIMIT_S), "--cluster", "dgx-h100"]
    serve = [*suggest, "--task", "serve"]
    case = str(folder / "trace.json")
    return {
        "1,048,576 GPUs": [*suggest, "--model", "llama3-70b", "--gpus", str(1 << 20), "--global-batch", str(1 << 21)],
        "131,072 GPUs": [*suggest, "--model", "llama3-405b", "--gpus", str(1 << 17), "--global-batch", str(1 << 18)],
        "131,072 GPUs, experts": [*suggest, "--model", "deepseek-v3", "--gpus", str(1 << 17), "--global-batch", str(1 << 18)],
        "16,384 GPUs": [*suggest, "--model", "llama3-405b", "--gpus", "16384", "--global-batch", "16384"],
        "2,048 GPUs, experts": [*suggest, "--model", "deepseek-v3", "--gpus", "2048", "--global-batch", "8192"],
        "eight numbers of GPUs": [*suggest, "--model", "llama3-70b", "--gpus", "64,128,256,512,1024,2048,4096,8192", "--global-batch", "8192"],
        "the fewest GPUs, experts": [*suggest, "--model", "deepseek-v3", "--gpus", "min"],
        "a whole run within 30 days": [*suggest, "--model", "llama3-405b", "--tokens", "15T", "--deadline", "30d", "--gpu-price", "2", "--global-batch", "16384"],
        "the fewest GPUs, 100,000 layers": [*suggest, "--model", str(folder / "deep.json"), "--gpus", "min"],
        "100,000 layers": [*suggest, "--model", str(folder / "deep.json"), "--gpus", "64"],
        "1,024 GPUs a node": [*suggest[:3], "--cluster", str(folder / "wide.json"), "--model", "llama3-8b"],
        "a plan of 8 with a batch of 2^31, saved": [
            "estimate", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--dp-shard", "8",
            "--global-batch", str(1 << 31), "--micro-batch", "1", "--recompute", "full", "--out", case,
        ],
        "its trace": ["trace", "--plan", case, "--out", str(folder / "out.json")],
        "a matrix of 1,000 columns": ["probe", "--from", str(folder / "matrix.txt")],
        "XML of 20,000 GPUs": ["probe", "--from", str(folder / "system.xml")],
        "400,000 brackets": ["probe", "--from", str(folder / "brackets.txt")],
        "65,536 clients of 512 GPUs": [*serve, "--model", "deepseek-v3", "--gpus", "512", "--isl", "4096", "--osl", "4096", "--concurrency", "65536"],
        "65,536 clients, answers of 65,536 tokens": [*serve, "--model", "qwen3-30b-a3b", "--gpus", "64", "--isl", "512", "--osl", "65536", "--concurrency", "65536"],
        "4,096 clients, prompts of 32,768 tokens": [*serve, "--model", "llama3-8b", "--gpus", "8", "--isl", "32768", "--osl", "8192", "--concurrency", "4096"],
        "placements of 80 layers on 256 GPUs": ["shard", "--model", "llama3-70b", "--layers", "80", "--mesh", "pod=4,data=8,model=8", "--cluster", "dgx-h100", "--gpus", "256", "--time-limit", str(LIMIT_S)],
        "a collective of 1,048,576 GPUs": ["collective", "--cluster", "dgx-h100", "--gpus", str(1 << 20), "--op", "all_reduce", "--bytes", str(1 << 30)],
    }  # fmt: skip


def run(words: list[str], folder: Path) -> tuple[int | str, float, float, float, str]:
    """Return (exit code, wall seconds, CPU seconds, GiB at most, what it said last) of a command and its children."""
    code = (
        "import resource, subprocess, sys, json\n"
        "done = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps([done.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss, (done.stdout + done.stderr)[-4000:]]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    try:
        reported = subprocess.run(
            [sys.executable, "-c", code, sys.executable, "-c", COMMAND, *words],
            capture_output=True, text=True, check=True, cwd=folder, env=environment, timeout=PATIENCE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "no end", PATIENCE_S, float("nan"), float("nan"), ""
    found, cpu_s, kib, said = json.loads(reported.stdout)
    return found, time.monotonic() - began, cpu_s, kib / 2**20, said


def main(out: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="limits-"))
    inputs(folder)
    load = os.getloadavg()[0]
    lines = [
        "# Questions that are too large",
        "",
        (
            f"`python tests/bench/limits.py FILE` on {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {load:.1f} processes waiting for them"
            f" when it began. `planner suggest` has `--time-limit {LIMIT_S}`, in seconds of its own CPU time: those are the wall's on an idle"
            " machine. CPU seconds and the largest resident memory of a process are of the whole command, start and children included."
        ),
        "",
        "| what | exit code | CPU s | wall s | GiB |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, words in commands(folder).items():
        code, wall_s, cpu_s, gib, said = run(words, folder)
        lines.append(f"| {name} | {code} | {cpu_s:.1f} | {wall_s:.1f} | {gib:.2f} |")
        print(lines[-1], said.strip().splitlines()[-3:] if code != 0 else "", flush=True)
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30, 16 * 2**30))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    main(options.out)
