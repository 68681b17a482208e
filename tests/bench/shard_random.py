"""Random graphs, meshes and placements, backward included: the planner's answer on virtual ranks against one process.

    python -m tests.bench.shard_random --graphs 2000 --out examples/sharding/random.md

Every tensor of every answer is compared in float64 (`tests/planner/sharding/virtual_ranks.py`); half of the graphs on meshes
of one and two axes are placed by bytes, all others by time on eight GPUs. A graph that has no answer says why, and is counted.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import monotonic, process_time

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from planner.sharding.problem.deadline import Deadline
from planner.sharding.problem.problem import Machine
from tests.planner.sharding import cases, virtual_ranks
from tests.planner.sharding.random_graphs import graphs, placed
from topology.catalog.cluster_file import load_cluster
from topology.errors import Infeasible, UserError

LIMIT_S = 30.0  # for the best answer by time: what it computes is checked whether it is proved or not


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6, help="draw no more graphs after that")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found = run(asked.graphs, asked.seed, asked.minutes)
    text = table(found, asked.seed)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text, encoding="utf-8")


def run(number: int, seeded: int, minutes: float) -> Counter[tuple[str, str, str, str]]:
    """Count answers by mesh, pass, what is cheapest, and how they ended."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    machine = Machine(load_cluster("dgx-h100", 8))
    started, end = process_time(), monotonic() + 60 * minutes

    @seed(seeded)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def one(data: st.DataObject) -> None:
        if monotonic() > end:
            return
        backward, timed = data.draw(st.booleans()), data.draw(st.booleans())
        try:
            problem = data.draw(placed(graphs(backward=backward)))
        except UserError as error:
            found["", "both" if backward else "forward", "", f"none: {error.what[:60]}"] += 1
            return
        if timed or len(problem.mesh.shape) > 2:  # fewest bytes over three axes take minutes a graph
            timed = True
            problem = replace(problem, machine=machine, policy="min_time", deadline=Deadline.after(LIMIT_S))
        key = ("x".join(map(str, problem.mesh.shape)), "both" if backward else "forward", "time" if timed else "bytes")
        try:
            virtual_ranks.run(problem, cases.values(problem))
        except (Infeasible, UserError) as error:
            found[*key, f"none: {error.what[:60]}"] += 1
        else:
            found[*key, "equal"] += 1
        done = sum(found.values())
        if done % 20 == 0:
            print(f"{done} graphs, {process_time() - started:.0f} s of CPU time", flush=True)

    one()
    return found


def table(found: Counter[tuple[str, str, str, str]], seeded: int) -> str:
    number = sum(found.values())
    lines = [
        "# Random graphs",
        "",
        f"`python -m tests.bench.shard_random --graphs {number} --seed {seeded}`: graphs of one to three steps out of 24, on random",
        "meshes, with random placements and pins. Every tensor of every answer, gradients included, is held on virtual ranks",
        "against one process in float64 (relative and absolute tolerance 1e-9). A difference would end the run.",
        "",
        "| mesh | passes | cheapest by | graphs equal | without an answer |",
        "|---|---|---|---|---|",
    ]
    for key in sorted({key[:3] for key in found}):
        none = sum(n for other, n in found.items() if other[:3] == key and other[3] != "equal")
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | {found[*key, 'equal']} | {none} |")
    equal = sum(n for key, n in found.items() if key[3] == "equal")
    lines += ["", f"{equal} of {sum(found.values())} graphs have an answer, and all are equal to one process."]
    reasons = Counter({key[3]: 0 for key in found if key[3] != "equal"})
    for key, n in found.items():
        if key[3] != "equal":
            reasons[key[3]] += n
    lines += [f"- {n}: {reason.removeprefix('none: ')}" for reason, n in reasons.most_common()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
