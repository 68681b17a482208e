"""Answers of a checkout written to a folder, and what differs between two such folders.

    python -m tests.tools.goldens record FOLDER [--only GROUP ...] [--cases FILE ...]
    python -m tests.tools.goldens compare BEFORE AFTER [--tolerance 1e-9]

A change that shall move no number records before and after, and compares. Groups: `plans` (470 plans of every runtime
and schedule, drawn once), `cases` (`planner validate` of the case files), `searches`, `examples`, `exports`, `checks`,
`sharding`, `serving`. Everything is asked through the command line, so a folder made by one version can be compared
with another's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "tests/data/goldens/plans.json"
EXPORTS = ("torchtitan@0.2.2", "megatron-lm", "deepspeed", "accelerate", "slurm", "kubernetes", "skypilot", "torchrun")
# What changes from one run to the next and says nothing of the answer.
VOLATILE = {"seconds", "created", "date", "version", "host", "wall_s", "cpu_s"}
PART = 24  # plans that one process answers

SEARCHES = (
    "--model llama3-8b --cluster dgx-h100 --gpus 8 --global-batch 64",
    "--model llama3-70b --cluster dgx-h100 --gpus 64 --global-batch 256",
    "--model llama3-70b --cluster dgx-h100 --gpus 16 --global-batch 48 --framework megatron-lm",
    "--model qwen3-30b-a3b --cluster dgx-h200 --gpus 16 --global-batch 128",
    "--model llama3-8b --cluster h200x4 --global-batch 32 --framework meshwright",
    "--model llama3-8b --cluster h200x4 --global-batch 32 --profile examples/profiles/h200x4.json",
    "--model llama3-70b --cluster dgx-h200 --gpus min --global-batch 64 --top 1",
    "--model deepseek-v3 --cluster dgx-h100 --gpus 256 --global-batch 1024",
    "--model llama3-405b --cluster dgx-h100 --gpus 8",
    "--model gpt3-175b --cluster dgx-a100 --gpus 256 --seq-len 2048 --global-batch 512 --framework megatron-lm",
)
SERVING = (
    "suggest --task serve --model llama3-8b --cluster dgx-h100 --gpus 8 --isl 1024 --osl 256 --concurrency 64",
    "suggest --task serve --model llama3-70b --cluster dgx-h200 --gpus 8 --isl 2048 --osl 512 --request-rate 4",
    "estimate --task serve --model llama3-8b --cluster h200x4 --tp 2 --isl 1024 --osl 128 --concurrency 16",
)


def commands(group: str, cases: list[Path], scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, arguments of `planner`) of every answer of a group; files they need are written to `scratch`."""
    if group == "plans":
        plans = json.loads(PLANS.read_text())
        for start in range(0, len(plans), PART):
            part = scratch / f"plans_{start:03}.json"
            part.write_text(json.dumps(plans[start : start + PART]))
            yield part.stem, ["estimate", "--case", str(part)]
    elif group == "cases":
        for path in cases or sorted((ROOT / "tests/data/cases").glob("*.json")):
            yield f"cases_{path.stem}", ["validate", str(path)]
    elif group == "searches":
        for n, words in enumerate(SEARCHES):
            yield f"search_{n}", ["suggest", *words.split()]
    elif group == "examples":
        lines = [line for path in sorted((ROOT / "examples").glob("*.sh")) for line in path.read_text().splitlines()]
        for n, line in enumerate(line for line in lines if line.startswith("planner ")):
            if " export " not in line:
                yield f"example_{n}", [word for word in shlex.split(line)[1:] if word != "--explain"]
    elif group == "exports":
        for path in sorted((ROOT / "examples/plans").glob("*.json")):
            for target in EXPORTS:
                yield f"export_{path.stem}_{target}", ["export", str(path), "--to", target]
    elif group == "checks":
        for path in sorted((ROOT / "examples/check").iterdir()):
            if path.suffix != ".md":
                yield f"check_{path.name}", ["check", str(path), "--cluster", "dgx-h100"]
    elif group == "sharding":
        yield "shard_layer", ["shard", "examples/sharding/layer.json", "--cluster", "dgx-h100", "--gpus", "32"]
        yield "shard_captured", ["shard", "examples/sharding/captured.json", "--cluster", "dgx-h100", "--gpus", "8"]
    elif group == "serving":
        for n, words in enumerate(SERVING):
            yield f"serving_{n}", words.split()


GROUPS = ("plans", "cases", "searches", "examples", "exports", "checks", "sharding", "serving")


def record(folder: Path, groups: list[str], cases: list[Path]) -> None:
    """Ask every question of the groups and write each answer, with its exit code, to a file of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    for group in groups:
        for name, arguments in commands(group, cases, folder):
            command = [sys.executable, "-m", "planner", *arguments, "--json"]
            run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            answer = {"arguments": arguments, "exit": run.returncode, "answer": _decoded(run.stdout)}
            (folder / f"{name}.golden").write_text(json.dumps(answer, indent=1) + "\n")
            print(f"{name}: exit {run.returncode}", flush=True)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def compare(before: Path, after: Path, tolerance: float) -> int:
    """Print what differs, the largest relative differences of each answer first. Return how many answers differ."""
    differ = 0
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.golden")})
    for name in names:
        if not (before / name).exists() or not (after / name).exists():
            print(f"{name}: only in {before if (before / name).exists() else after}")
            continue
        one, other = (json.loads((folder / name).read_text()) for folder in (before, after))
        found = sorted(_differences(one["answer"], other["answer"], "", tolerance), reverse=True)
        if one["exit"] != other["exit"]:
            found.insert(0, (math.inf, f"exit {one['exit']} -> {other['exit']}"))
        if found:
            differ += 1
            print(f"{name}: {len(found)} differences")
            for _, words in found[:12]:
                print(f"    {words}")
    print(f"{differ} of {len(names)} answers differ")
    return differ


def _differences(one: Any, other: Any, where: str, tolerance: float) -> Iterator[tuple[float, str]]:
    """Yield (relative difference, words) of every value that differs."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other} - VOLATILE):
            if key not in one or key not in other:
                yield math.inf, f"{where}.{key}: only {'before' if key in one else 'after'}"
            else:
                yield from _differences(one[key], other[key], f"{where}.{_label(one[key], key)}", tolerance)
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            yield math.inf, f"{where}: {len(one)} -> {len(other)} entries"
        for n, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from _differences(a, b, f"{where}[{_label(a, str(n))}]", tolerance)
    elif _is_number(one) and _is_number(other):
        largest = max(abs(one), abs(other))
        relative = abs(one - other) / largest if largest else 0.0
        if relative > tolerance:
            yield relative, f"{where}: {one:.10g} -> {other:.10g} ({other / one - 1 if one else math.inf:+.3%})"
    elif one != other:
        yield math.inf, f"{where}: {str(one)[:100]!r} -> {str(other)[:100]!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(value: Any, otherwise: str) -> str:
    return str(value["id"]) if isinstance(value, dict) and "id" in value else otherwise


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    recording.add_argument(
        "--cases", nargs="+", type=Path, default=[], help="case files in the place of the tests' own"
    )
    comparing = verbs.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--tolerance", type=float, default=1e-9)
    args = parser.parse_args()
    if args.verb == "record":
        record(args.folder, args.only, args.cases)
    else:
        sys.exit(1 if compare(args.before, args.after, args.tolerance) else 0)


if __name__ == "__main__":
    main()
