"""How long a placement of decoder layers takes to find and to prove, forward and backward.

    python -m tests.bench.shard_scale --out examples/sharding/scale.md

Seconds are of CPU time of one process, from the case to the plan: reading it, deriving the backward pass, choosing.
With a time limit, wall-clock seconds by which choosing runs over it. The second table solves some of them in other
ways.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from time import monotonic, process_time

import numpy as np

from planner.sharding.frontends.decoder import decoder_case
from planner.sharding.problem.deadline import Deadline
from planner.sharding.problem.problem import Machine, MemoryLimit, ShardingProblem, parse_problem
from planner.sharding.solver.by_messages import solve_by_messages
from planner.sharding.solver.candidates import enumerate_candidates
from planner.sharding.solver.choose import choose
from planner.sharding.solver.equivalence import find_equivalent
from planner.sharding.solver.pricing import pricing_of
from planner.sharding.solver.solvable_program import SolvableProgram
from simulator.config.hf_config import load_model
from topology.catalog.cluster_file import load_cluster
from topology.errors import Infeasible

ASKED = [  # model, layers (None: all, with embedding and loss), mesh, GiB of a rank, seconds allowed
    ("llama3-8b", 1, {"data": 8, "model": 8}, None, None),
    ("llama3-8b", 1, {"data": 8, "model": 8}, 2.0, 60.0),
    ("llama3-8b", 32, {"data": 8, "model": 8}, None, None),
    ("llama3-8b", None, {"data": 8, "model": 8}, None, 60.0),
    ("llama3-70b", 80, {"data": 8, "model": 8}, None, None),
    ("llama3-8b", 1, {"pod": 4, "data": 2, "model": 8}, None, 60.0),
    ("llama3-8b", 32, {"pod": 4, "data": 2, "model": 8}, None, 60.0),
    ("llama3-70b", 80, {"pod": 4, "data": 2, "model": 8}, None, None),
    ("llama3-8b", 1, {"pod": 4, "data": 2, "model": 8}, None, 1.0),
    ("llama3-8b", 1, {"pod": 4, "data": 2, "model": 8}, 2.0, 10.0),
]
SOLVED = [  # model, layers, mesh, GiB of a rank: by messages, and as one integer program
    ("llama3-8b", 1, {"data": 8, "model": 8}, None),
    ("llama3-8b", 1, {"data": 8, "model": 8}, 2.0),
    ("llama3-8b", 32, {"data": 8, "model": 8}, None),
    ("llama3-8b", None, {"data": 8, "model": 8}, None),
    ("llama3-8b", 1, {"pod": 4, "data": 2, "model": 8}, None),
]
WHOLE_S = 60.0  # for one integer program
SOLVERS = """
## Which solver wins where

Seconds of CPU after the candidates are listed. By messages: a bound by message passing, and the pairs that it leaves as an integer
program (HiGHS). Whole: all candidates as one program, relaxed and branched by HiGHS, in 60 s of wall time.

| model | layers | mesh | memory GiB | by messages s | gap | whole s | gap |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    lines = [
        "# How long a placement takes to find",
        "",
        "`python -m tests.bench.shard_scale`: decoder layers, forward and backward, 64 sequences of 4,096 tokens, on DGX H100; nothing",
        "placed by hand. CPU seconds of one process. The gap is what the best answer may be cheaper by; 0 is proved.",
        "",
        "| model | layers | mesh | memory GiB | operators | reading s | choosing s | limit s | wall over limit s | gap |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in ASKED:
        lines.append(row(*one))
        print(lines[-1], flush=True)
    lines.append(SOLVERS)
    for solved in SOLVED:
        lines.append(solved_row(*solved))
        print(lines[-1], flush=True)
    if out is not None:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def asked(name: str, layers: int | None, mesh: dict[str, int], memory_gib: float | None) -> ShardingProblem:
    problem = parse_problem(decoder_case(load_model(name), mesh, layers=layers, batch=64, seq_len=4096))
    memory = None if memory_gib is None else MemoryLimit(limit_bytes=memory_gib * 2**30)
    return replace(problem, machine=Machine(load_cluster("dgx-h100", problem.mesh.ranks)), memory=memory)


def solved_row(name: str, layers: int | None, mesh: dict[str, int], memory_gib: float | None) -> str:
    problem = asked(name, layers, mesh, memory_gib)
    equivalence = find_equivalent(problem.graph, {**problem.input_layouts, **problem.pins}, fold=True)
    candidates = enumerate_candidates(problem, pricing_of(problem.mesh, problem.machine), equivalence)
    shown = [name, "all" if layers is None else layers, " x ".join(map(str, mesh.values())), memory_gib or ""]
    for solve in (by_messages, as_one_program):
        program, started = SolvableProgram(candidates), process_time()
        try:
            cost, bound = solve(program)
            gap = "no answer" if cost is None else f"{100 * max(0.0, cost - bound) / cost:.2g} %"
        except Infeasible as error:
            gap = error.what
        shown += [f"{process_time() - started:.1f}", gap]
    return "| " + " | ".join(map(str, shown)) + " |"


def by_messages(program: SolvableProgram) -> tuple[float | None, float]:
    found, bound = solve_by_messages(program, Deadline())
    return program.cost_of(found), bound


def as_one_program(program: SolvableProgram) -> tuple[float | None, float]:
    deadline = Deadline.after(WHOLE_S)
    program.build()
    relaxed = program.relax(deadline)
    if relaxed is None:
        return None, 0.0
    bound, reduced, values = relaxed
    if program.is_integral(values):
        return program.cost_of(program.read(values)), bound
    found, _ = program.branch_and_bound(np.ones(len(reduced), dtype=bool), deadline)
    return None if found is None else program.cost_of(found), bound


def row(name: str, layers: int | None, mesh: dict[str, int], memory_gib: float | None, limit_s: float | None) -> str:
    started = process_time()
    problem = asked(name, layers, mesh, memory_gib)
    read_s = process_time() - started
    problem = replace(problem, deadline=Deadline.after(limit_s))
    started, wall = process_time(), monotonic()
    try:
        gap = f"{100 * choose(problem)[0].gap:.2g} %"
    except Infeasible as error:
        gap = error.what
    choose_s, over = process_time() - started, monotonic() - wall - (limit_s or 0)
    sizes = " x ".join(map(str, mesh.values()))
    shown = [name, "all" if layers is None else layers, sizes, memory_gib or "", len(problem.operators)]
    shown += [f"{read_s:.1f}", f"{choose_s:.1f}", limit_s or "", f"{max(0.0, over):.1f}" if limit_s else "", gap]
    return "| " + " | ".join(map(str, shown)) + " |"


if __name__ == "__main__":
    main()
