"""Write examples/sharding/figures.md: the figures of nvFuser's document on many GPUs, as this compiler's programs.

python tests/tools/sharding_figures.py
"""

from __future__ import annotations

import json
from pathlib import Path

from planner.answers.shard import program_text
from planner.sharding.plans.plan import plan_sharding
from planner.sharding.problem.problem import parse_problem

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "sharding"
HEAD = """# Parallelisms as programs

The feed-forward block of nvFuser's document on many GPUs (NVIDIA/Fuser, doc/reading/multigpu.md), with the placements
that it gives to inputs; pipeline, context and expert parallelism, which it leaves open, are added. `figures.json` has
the cases, `planner shard examples/sharding/figures.json --listing` answers them, `python
tests/tools/sharding_figures.py` writes this file.

A domain lists a tensor's dims; `DIDx{4}` is an axis that four devices share, `f/4` what each has of f, and `r{DIDx}` a
reduction over devices that is yet to be performed.
"""


def figures() -> str:
    """Return the file's text."""
    parts = [HEAD]
    for case in json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))["cases"]:
        problem = parse_problem(case)
        mesh = ", ".join(f"{n} of {k}" for n, k in zip(case["mesh"]["names"], case["mesh"]["shape"], strict=True))
        title = case["id"][0].upper() + case["id"][1:]
        parts.append(f"\n## {title}\n\nOver {mesh}.\n\n```\n{program_text(problem, plan_sharding(problem))}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    (FOLDER / "figures.md").write_text(figures(), encoding="utf-8")
