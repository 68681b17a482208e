"""The tables of examples/cluster/README.md, from rows of `cluster_table`: `python -m tests.tools.cluster_page ROWS...`.

Of cases that were run several times the last row counts.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

SCHEDULERS = ("slurm", "ray", "kubernetes", "jobset", "trainjob")
WHAT = {  # what is done, and the names of its cases
    "no plan: the tiny model on two nodes": ("smoke",),
    "a plan of 8 ranks, `--device cpu`": ("plan",),
    "a tuning as one job": ("tune", "tune_pod"),
    "a tuning, a job a trial: three as an array, or side by side": ("tune_each",),
    "Ctrl-C": ("cancel",),
    "a node is lost": ("node_lost", "pod_lost"),
    "preempted": ("preempted", "pod_preempted"),
    "the time limit is over": ("time_limit", "budget_over", "pods_too_long"),
    "a rank is killed": ("rank_killed",),
    "names of nodes lead nowhere": ("unresolved", "pod_unresolved"),
    "the port is closed by a firewall": ("port_closed",),
    "an interface that one node has not": ("wrong_interface",),
    "software that differs": ("versions_differ",),
    "one of three nodes is missing": ("node_missing",),
    "too few nodes": ("no_room",),
    "a node has no memory left": ("out_of_memory",),
    "`scontrol requeue`": ("requeued",),
    "slurmctld killed for 15 s": ("controller_killed",),
    "a tuning whose job is preempted": ("tune_preempted",),
    "a tuning whose node is lost": ("tune_node_lost",),
    "a trial's job is preempted": ("tune_each_preempted",),
    "a tuning is killed while its jobs run, and resumed": ("tune_each_killed",),
}
SAID = re.compile(r"^(?:status|error:|error |numbers|best|interrupted)")
MOST = 170


def sentence(row: dict) -> str:
    """Return the line that says how it ended; of a tuning how many trials began and ended, too."""
    lines = [one.strip() for one in row["said"]]
    causes = [one for one in lines if one.startswith(("status", "error"))]
    found = next(iter([*causes, *(one for one in lines if SAID.match(one))]), lines[-1])
    if found.startswith("error"):
        found += " " + " ".join(one for one in lines if one.startswith("why:"))
    found = re.sub(r"\s+", " ", re.sub(r"^status\s+", "", found)).replace("|", "\\|")
    found = found if len(found) <= MOST else f"{found[:MOST].rpartition(' ')[0]} ..."
    if "trials" not in row:
        return found
    ends = [one.partition(" ")[2] for one in row["trials"]]
    counts = ", ".join(f"{ends.count(word)} {word}" for word in dict.fromkeys(ends))
    return f"{found}; trials: {counts}"


def main() -> None:
    rows: dict[str, dict] = {}
    for path in sys.argv[1:]:
        rows |= {row["name"]: row for row in map(json.loads, Path(path).read_text().splitlines())}
    print(f"| what | {' | '.join(SCHEDULERS)} |\n|---|{'--:|' * len(SCHEDULERS)}")
    seen: dict[tuple[str, str], list[str]] = {}
    for what, names in WHAT.items():
        cells = []
        for scheduler in SCHEDULERS:
            row = next((rows[key] for name in names if (key := f"{scheduler}-{name}") in rows), None)
            cells.append("" if row is None else f"{row['seconds']} ({row['exit_code']})")
            if row is not None:
                seen.setdefault((what, sentence(row)), []).append(scheduler)
        if any(cells):
            print(f"| {what} | {' | '.join(cells)} |")
    print("\n| what | through | what `planner` says |\n|---|---|---|")
    print("\n".join(f"| {what} | {', '.join(through)} | {text} |" for (what, text), through in seen.items()))


if __name__ == "__main__":
    main()
