"""The questions that people ask first, with today's answers. Run as `python tests/bench/answers.py examples/answers.md`."""

import datetime as dt
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

QUESTIONS = {
    "Llama-3 70B on two nodes of eight H100": "suggest --model llama3-70b --cluster dgx-h100 --gpus 16 --global-batch 64 --top 4",
    "Llama-3 70B on 64 nodes of eight H100": "suggest --model llama3-70b --cluster dgx-h100 --gpus 512 --global-batch 1024 --top 4",
    "Llama-3 8B on a machine with four H200, from its topology text": (
        "suggest --model llama3-8b --cluster examples/clusters/h200x4_topo_m.txt --gpu h200-sxm --top 4"
    ),
    "Llama-3 405B on eight H100": "suggest --model llama3-405b --cluster dgx-h100 --gpus 8",
    "A GB300 tray in which one GPU has no NVLink": (
        "suggest --model llama3-8b --cluster tests/data/nccl_xml/gb300_1tray_fault_gpu1_count0.xml --gpu gb300 "
        "--seq-len 4096 --global-batch 24 --top 2"
    ),
}


def main(out: Path) -> None:
    """Ask everything and write what was printed, with exit codes and wall time."""
    lines = [
        "# Questions and today's answers",
        "",
        f"Made on {dt.datetime.now(tz=dt.UTC):%Y-%m-%d} by `python tests/bench/answers.py {out}` on two cores, cold starts included.",
        "",
    ]
    for title, flags in QUESTIONS.items():
        started = time.monotonic()
        run = subprocess.run(
            [sys.executable, "-m", "planner", *shlex.split(flags)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "COLUMNS": "120"},
        )
        seconds = time.monotonic() - started
        lines += [f"## {title}", "", "```", f"$ planner {flags}", run.stdout.rstrip(), run.stderr.rstrip(), "```", ""]
        lines += [f"Exit code {run.returncode}, {seconds:.1f} s.", ""]
    out.write_text("\n".join(line for line in lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
