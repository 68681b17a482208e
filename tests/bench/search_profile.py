"""Where the CPU seconds of questions go: the stack every 5 ms of CPU time, by part of the program and by function.

Run as `python -m tests.bench.search_profile OUT.md [question ...]` with names of `search_cost.QUESTIONS`, all without.
Parts are known by the outermost function of `PARTS` on the stack; functions by their own samples. Children of a command
are left out: it runs on one core here.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

EVERY_S = 0.005
SHOWN = 8  # functions of a question
PARTS = {
    "_find_and_load": "imports",
    "find_flips": "flip points",
    "traffic_of": "traffic",
    "simulate_plan": "simulations",
    "MemoryReplay._replayed": "replays of the allocator",
    "MemoryReplay._by_rules": "replays of the allocator",
    "MemoryReplay.__init__": "replays, prepared",
    "enumerate_nodes": "enumeration",
    "_screen_memory": "screening of memory",
    "scheduled_at_least_s": "bounds by schedule",
    "ScreenedPlans.at_least_s": "bounds that follow no clock",
    "assign_stages": "layers by stage",
    "account_plans": "accounts",
}


def sampled(words: list[str]) -> dict[str, object]:
    """Answer a question in this process; return its CPU seconds and the samples of its parts and functions."""
    parts: collections.Counter[str] = collections.Counter()
    functions: collections.Counter[str] = collections.Counter()

    def note(_number: int, frame: FrameType | None) -> None:
        names = []
        while frame is not None:
            names.append((frame.f_code.co_filename, frame.f_code.co_qualname))
            frame = frame.f_back
        part = next((PARTS[name] for _, name in reversed(names) if name in PARTS), "other")
        own = next(
            ((path, name) for path, name in names if "/simulator/" in path or "/planner/" in path), ("", "other")
        )
        parts[part] += 1
        functions[f"{Path(own[0]).stem}.{own[1]}"] += 1

    signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
    from planner.cli import main

    with contextlib.redirect_stdout(io.StringIO()):
        main([*words, "--json"])
    signal.setitimer(signal.ITIMER_PROF, 0)
    return {"cpu_s": time.process_time(), "parts": parts, "functions": functions}


def table(answer: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    """Return the rows of all questions."""
    lines = ["| question | CPU s | parts | functions by themselves |", "|---|--:|---|---|"]
    for name, one in answer.items():
        columns = []
        for key, count in (("parts", len(PARTS)), ("functions", SHOWN)):
            found, whole = collections.Counter(one[key]), sum(one[key].values())
            most = [(what, samples / whole) for what, samples in found.most_common(count)]
            columns.append(", ".join(f"{what} {share:.0%}" for what, share in most if share >= 0.01))
        lines.append(f"| {name} | {one['cpu_s']:.1f} | {' | '.join(columns)} |")
    return lines


def main(out: Path, names: list[str]) -> None:
    """Write the table."""
    from tests.bench.search_cost import ENVIRONMENT, QUESTIONS, ROOT

    answer = {}
    for name in names or QUESTIONS:
        command = [sys.executable, __file__, "--of", *QUESTIONS[name].split()]
        done = subprocess.run(
            command, cwd=ROOT, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True
        )
        answer[name] = json.loads(done.stdout)
        print(name, f"{answer[name]['cpu_s']:.1f}", flush=True)
        said = f"Samples every {EVERY_S * 1000:.0f} ms of CPU time, load {os.getloadavg()[0]:.0f}."
        out.write_text("\n".join([said, "", *table(answer)]) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--of"]:
        print(json.dumps(sampled(sys.argv[2:])))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("out", type=Path)
        parser.add_argument("questions", nargs="*")
        options = parser.parse_args()
        main(options.out, options.questions)
