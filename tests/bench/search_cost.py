"""What questions cost: seconds of the whole command, cold, and its memory.

Run as `python tests/bench/search_cost.py OUT.md [--compared-with CHECKOUT] [--times 3]`. Each run is a process of its
own, of which the median counts; CPU seconds are user and system together, which is what a machine that does nothing
else takes in wall time on one core. `--compared-with` asks another checkout the same, one run after the other.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = {
    "llama3-8b on 8 H100": "suggest --model llama3-8b --cluster dgx-h100 --gpus 8",
    "llama3-70b on 64 H100": "suggest --model llama3-70b --cluster dgx-h100 --gpus 64",
    "llama3-70b on 512 H100": "suggest --model llama3-70b --cluster dgx-h100 --gpus 512",
    "gpt3-175b on 4,096 A100, Megatron-LM": "suggest --model gpt3-175b --cluster dgx-a100 --gpus 4096 --seq-len 2048"
    " --global-batch 3072 --framework megatron-lm",
    "llama3-405b on 16,384 H100": "suggest --model llama3-405b --cluster dgx-h100 --gpus 16384 --global-batch 2048",
    "deepseek-v3 on 2,048 H100": "suggest --model deepseek-v3 --cluster dgx-h100 --gpus 2048",
    "llama3-70b, fewest H100": "suggest --model llama3-70b --cluster dgx-h100 --gpus min",
    "explain, llama3-70b on 512 H100": "explain --model llama3-70b --cluster dgx-h100 --gpus 512",
    "check, gpt3-175b for Megatron-LM": "check examples/check/megatron_gpt3_175b.sh --gpus 1024 --cluster dgx-a100",
    "estimate, llama3-8b on 8 H100": "estimate --model llama3-8b --cluster dgx-h100 --gpus 8 --dp-shard 8",
}
LAYERS = (16, 64, 256)  # of Llama-3 8B, on 128 GPUs
# Modules are compiled at the first start, as an installation does, whatever this shell says.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One run of a command: its seconds and memory, and what it says of its search."""

    cpu_s: float
    wall_s: float
    mib: float
    code: int
    search: dict


def measure(words: Sequence[str], checkout: Path = ROOT) -> Cost:
    """Run a command of a checkout."""
    command, started = [sys.executable, "-m", "planner", *words, "--json"], time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=checkout,
            env={**ENVIRONMENT, "PYTHONPATH": str(checkout)},
        )
        _, status, used = os.wait4(process.pid, 0)
        out.seek(0)
        answer = json.load(out) if status == 0 else {}
    return Cost(
        cpu_s=used.ru_utime + used.ru_stime,
        wall_s=time.monotonic() - started,
        mib=used.ru_maxrss / 1024,
        code=os.waitstatus_to_exitcode(status),
        search=answer.get("search", {}) if isinstance(answer, dict) else {},
    )


def row(name: str, words: Sequence[str], other: Path | None, times: int) -> str:
    """Return the row of a question, both checkouts measured in turn."""
    runs = [(measure(words), None if other is None else measure(words, other)) for _ in range(times)]

    def median(which: int, quantity: str) -> str:
        values = [getattr(run[which], quantity) for run in runs if run[which] is not None]
        return f"{statistics.median(values):.{0 if quantity == 'mib' else 1}f}" if values else ""

    one, search = runs[0][0], runs[0][0].search
    counts = " | ".join(f"{search[key]:,}" if search else "" for key in ("legal", "fitting", "costed", "simulated"))
    ended = f"{search['status']}, gap {search['gap']:.1%}" if search else f"exit code {one.code}"
    before = f" | {median(1, 'cpu_s')} | {median(1, 'wall_s')}" if other is not None else ""
    return (
        f"| {name} | {counts} | {ended}{before} | {median(0, 'cpu_s')} | {median(0, 'wall_s')} | {median(0, 'mib')} |"
    )


def main(out: Path, other: Path | None, times: int) -> None:
    """Write the table."""
    of_other = ("commit CPU s", "commit wall s") if other is not None else ()
    columns = (
        "question",
        "legal plans",
        "fit or may",
        "costed whole",
        "simulated",
        "answer",
        *of_other,
        "CPU s",
        "wall s",
        "MiB",
    )
    said = f"`python tests/bench/search_cost.py {out}`, Python {platform.python_version()}, numpy {np.__version__}"
    lines = [
        "# What a search costs",
        "",
        f"Made on {dt.datetime.now(tz=dt.UTC):%Y-%m-%d} by {said},",
        f"{os.cpu_count()} cores; median of {times}; cold start, imports and simulation of the finalists included, modules",
        f"compiled. Load at the start {os.getloadavg()[0]:.0f}: where other work ran, wall time is no bound, and CPU time",
        "itself is inflated by shared caches. torchtitan's space, 8 sequences a GPU unless stated.",
        *([f"Compared with commit {_commit(other)}, in turn with this one."] if other is not None else []),
        "",
        f"| {' | '.join(columns)} |",
        f"|---{'|--:' * 4}|---{'|--:' * (3 + len(of_other))}|",
    ]
    for checkout in (ROOT, *([other] if other is not None else [])):
        measure(QUESTIONS["llama3-8b on 8 H100"].split(), checkout)  # compiles
    for name, words in QUESTIONS.items():
        lines.append(row(name, words.split(), other, times))
        print(lines[-1], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for layers in LAYERS:
            config = json.loads((ROOT / "simulator" / "models" / "llama3-8b.json").read_text())
            config["num_hidden_layers"] = layers
            path = Path(folder) / f"llama3-8b-{layers}.json"
            path.write_text(json.dumps(config))
            words = ["suggest", "--model", str(path), "--cluster", "dgx-h100", "--gpus", "128"]
            lines.append(row(f"llama3-8b with {layers} layers on 128 H100", words, other, times))
            print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + "\n")


def _commit(checkout: Path) -> str:
    words = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--compared-with", type=Path)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    main(options.out, options.compared_with, options.times)
