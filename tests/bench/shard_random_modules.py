"""Random modules on ranks of gloo, against one process: results, gradients, buffers and arguments.

    python -m tests.bench.shard_random_modules --graphs 5000 --kept rows.jsonl --out examples/sharding/random_modules.md

Modules are those of `tests.executor.sharding.random_modules`, with random placements of arguments, parameters and
results; many run in one group of ranks. What is refused by name is counted; what differs, or ends otherwise, is wrong.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from tests.executor.sharding.random_modules import STRATA
from tests.executor.sharding.random_runs import MESHES, Verdict, verdicts

SLICE = 60  # modules of one group of ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--stratum", default="", choices=["", *STRATA])
    parser.add_argument("--kept", type=Path, help="verdicts that are there already are not made again")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    done: dict[str, Verdict] = {}
    if asked.kept is not None and asked.kept.exists():
        done = {row["name"]: row for row in map(json.loads, asked.kept.open())}
    strata = [asked.stratum] if asked.stratum else [*STRATA]
    wanted = [(strata[n % len(strata)], n) for n in range(asked.first, asked.first + asked.graphs)]
    left = [one for one in wanted if f"{one[0]} {one[1]}" not in done]
    for start in range(0, len(left), SLICE):
        for row in verdicts(left[start : start + SLICE]):
            done[row["name"]] = row
            if row["ending"].startswith("wrong"):
                print(row, flush=True)
            if asked.kept is not None:
                with asked.kept.open("a") as out:
                    out.write(json.dumps(row) + "\n")
        print(len(done), dict(Counter(row["ending"].split(":")[0] for row in done.values())), flush=True)
    if asked.out is not None:
        asked.out.write_text(table([done[f"{s} {n}"] for s, n in wanted]), encoding="utf-8")


def table(rows: list[Verdict]) -> str:
    """Return the counts by stratum and mesh, and what was refused."""
    words = ("equal", "refused", "wrong")
    counts = Counter((row["stratum"], row["mesh"], row["ending"].split(":")[0]) for row in rows)
    total = Counter(row["ending"].split(":")[0] for row in rows)
    lines = [
        "# Random modules on ranks",
        "",
        f"`python -m tests.bench.shard_random_modules --graphs {len(rows)}`: modules of two to seven steps, written with views, writes in",
        "place, masks, `detach`, `detach_` and `no_grad`, frozen and shared parameters, statistics, layers, losses, optional arguments,",
        "other dtypes, equal values, `vmap` and gradients of gradients, in training and in evaluation, of odd",
        "and even sizes; placements of arguments, parameters and results are random, or chosen by time. All results, gradients of",
        "parameters and arguments, buffers and arguments after the call are compared with one process in float64 (1e-9, and",
        "1e-5 where something is computed in fewer bits).",
        "",
        f"{total['equal']} of {len(rows)} are equal, {total['refused']} refused by name, {total['wrong']} wrong.",
        "",
        "| modules | mesh | equal | refused | wrong |",
        "|---|---|--:|--:|--:|",
    ]
    for stratum in STRATA:
        for mesh in MESHES:
            found = [counts[stratum, mesh, word] for word in words]
            lines.append(f"| {stratum} | {mesh} | {' | '.join(map(str, found))} |")
    reasons = Counter(row["ending"].removeprefix("refused: ") for row in rows if row["ending"].startswith("refused"))
    lines += ["", "| refused | modules |", "|---|--:|", *(f"| {why} | {n} |" for why, n in reasons.most_common())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
