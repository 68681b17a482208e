"""Random graphs, meshes and placements, backward included: the planner's answer on virtual ranks against one process.

    python -m tests.bench.shard_random --graphs 2000 --out examples/sharding/random.md

Every tensor of every answer is compared in float64 (`tests/planner/sharding/virtual_ranks.py`); half of the graphs on
meshes of one and two axes are placed by bytes, all others by time on eight GPUs. A graph that has no answer says why,
and is counted. Then random triples of layouts: moving from the first to the last by way of the second is never cheaper,
in bytes or in time.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import monotonic, process_time

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from planner.sharding.layouts.collectives import add_costs
from planner.sharding.layouts.layout import make_mesh
from planner.sharding.layouts.redistribution import Redistributor
from planner.sharding.operators.operator import Tensor
from planner.sharding.problem.deadline import Deadline
from planner.sharding.problem.problem import Machine
from planner.sharding.solver.move_times import MoveTimes
from planner.sharding.solver.pricing import TimePricing
from tests.planner.sharding import cases, virtual_ranks
from tests.planner.sharding.random_graphs import graphs, placed
from tests.planner.sharding.test_redistribution import every_layout
from topology.catalog.cluster_file import load_cluster
from topology.errors import Infeasible, UserError

LIMIT_S = 30.0  # for the best answer by time: what it computes is checked whether it is proved or not


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=2000)
    parser.add_argument("--triples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6, help="draw no more graphs after that")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found = run(asked.graphs, asked.seed, asked.minutes)
    text = table(found, asked.seed) + detours(asked.triples, asked.seed)
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


def detours(number: int, seeded: int) -> str:
    """Return how many of so many triples of layouts have a detour that is cheaper, in words."""
    draw, cheaper = random.Random(seeded), {"bytes": 0, "time": 0}
    machine, shape = Machine(load_cluster("dgx-h100", 8)), (24, 48)
    whole = Tensor(name="x", shape=shape, dtype="bf16")
    known = []
    for sizes in ([2], [4], [8], [2, 2], [2, 3], [4, 2], [2, 2, 2]):
        mesh = make_mesh(list("abc"[: len(sizes)]), sizes)
        known.append(
            (every_layout(shape, mesh), Redistributor(shape, "bf16", mesh), MoveTimes(mesh, TimePricing(machine, mesh)))
        )
    for _ in range(number):
        layouts, moves, times = draw.choice(known)
        one, two, three = (draw.choice(layouts) for _ in range(3))
        direct, first, second = (moves.cost(a, b) for a, b in ((one, three), (one, two), (two, three)))
        if first is not None and second is not None:
            cheaper["bytes"] += direct is None or direct > add_costs(first, second)
        found = times.between(whole, moves, [one, two], [two, three], duals=False)
        cheaper["time"] += bool(found[0, 1] > (found[0, 0] + found[1, 1]) * (1 + 1e-12))
    return (
        f"\nOf {number} random triples of layouts on meshes of one to three axes, {cheaper['bytes']} have a way round that sends fewer bytes"
        f" than the\ndirect move, and {cheaper['time']} one that takes less time on DGX H100 (DTensor's prices have such: pytorch issue 169439).\n"
    )


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
