"""What a search proves, against judging plans one by one: slow, and without any of its shortcuts.

Run as `python tests/bench/exhaustive.py OUT.md`. The search screens memory by a bound, bounds steps, and stops where no
other plan can be faster; here every legal plan has its account (`estimate_plans`), and then plans are replayed, fastest
account first, whatever any bound says of their memory, until no other can be faster than the fastest that surely fits.
For the stages of one pipeline the bound is the solver's; here fillings are drawn at random and improved layer by layer
and mode by mode until nothing helps, many times over: none may be below it.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.question.question import Question, question_of
from planner.search.plan_space.candidates import Bounds
from planner.search.plan_space.stated import exactly
from planner.search.search import SearchOptions
from simulator.analytical.scenario import Scenario
from simulator.memory.plan_memory import PlanMemory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from planner.io.inputs import read_cluster
from planner.question.question import default_runtime
from planner.search.search import suggest
from planner.search.stages.options import cost_blocks, stages_of
from planner.search.stages.solver import solve_stages
from simulator.analytical.estimates import estimate_plans
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import plan_columns
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.legality.frameworks import framework_named
from tests.planner.every_plan import enumerate_candidates

QUESTIONS = (
    ("llama3-8b", "dgx-h100", 8, 64, 4096, "torchtitan", Bounds()),
    ("gpt3-175b", "dgx-a100", 4096, 3072, 2048, "megatron-lm", Bounds(stated={"tp": exactly(8), "pp": exactly(8)})),
    ("mixtral-8x7b", "dgx-h100", 64, 512, 4096, "megatron-lm", Bounds(stated={"tp": exactly(4), "pp": exactly(1)})),
)
CHUNK = 2048
# (model, cluster, GPUs, global batch, framework, plan): pipelines whose stages are filled.
PIPELINES = (
    ("llama3-70b", "dgx-h100", 64, 512, "any", Plan(dp_shard=4, tp=4, sequence_parallel=True, pp=4, schedule="1F1B")),
    (
        "llama3-405b",
        "dgx-h100",
        512,
        512,
        "any",
        Plan(dp_shard=4, tp=8, sequence_parallel=True, pp=16, virtual_stages=2, schedule="Interleaved1F1B"),
    ),
    (
        "llama3-70b",
        "dgx-h100",
        64,
        512,
        "any",
        Plan(dp_shard=4, tp=2, sequence_parallel=True, pp=8, virtual_stages=2, schedule="ZBVZeroBubble"),
    ),
)
STARTS, MOVES = 4, 60


def main(out: Path) -> None:
    """Write the table."""
    lines = [
        "# The printed bound against an exhaustive run",
        "",
        f"Made on {dt.datetime.now(tz=dt.UTC):%Y-%m-%d} by `python tests/bench/exhaustive.py {out}`.",
        "",
        "| question | legal plans | search, s | least of all that surely fit, s | replayed | search, CPU s | all, CPU s |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, machine, gpus, batch, seq_len, which, bounds in QUESTIONS:
        question = question_of(
            load_model(name),
            read_cluster(machine, gpus),
            Workload(seq_len=seq_len, global_batch_size=batch),
            framework=framework_named(which),
            gpus=gpus,
        )
        started = time.process_time()
        found = suggest(question, SearchOptions(bounds=bounds, simulate=False, reasons=False)).search
        searched, started = time.process_time() - started, time.process_time()
        legal, replayed, least_s = _exhaustive(question, bounds)
        spent = time.process_time() - started
        asked = "".join(f", {key} {bounds.spans(key)[0][0]}" for key, values in bounds.stated.items())
        lines.append(
            f"| {name}, {gpus} GPUs of {machine}, {which}{asked} | {legal:,} | {found.bound_s:.6f} | {least_s:.6f} "
            f"| {replayed:,} | {searched:.1f} | {spent:.0f} |"
        )
        print(lines[-1], flush=True)
    lines += [
        "",
        "| pipeline | best found by the search, s | bound, s | best of random fillings improved, s | search, CPU s | improving, CPU s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, machine, gpus, batch, which, plan in PIPELINES:
        lines.append(_pipeline(name, machine, gpus, batch, which, plan))
        print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + "\n")


def _exhaustive(question: Question, bounds: Bounds) -> tuple[int, int, float]:
    """Return how many plans are legal and how many were replayed, and the least step of those that surely fit in s."""
    everything = enumerate_candidates(question, bounds=bounds)
    plans = [plan for start in range(0, len(everything), CHUNK) for plan in everything.plans(start, start + CHUNK)]
    steps = [question.estimate(plans[start : start + CHUNK]).step_s for start in range(0, len(plans), CHUNK)]
    step_s, replayed, least_s = np.concatenate(steps), 0, np.inf
    for row in np.argsort(step_s, kind="stable"):
        if step_s[row] >= least_s:
            break
        held, replayed = PlanMemory(question, plans[row]), replayed + 1
        if held.surely_fits:
            least_s = min(least_s, float(step_s[row]) + held.flush_s)
    return len(plans), replayed, least_s


def _pipeline(name: str, machine: str, gpus: int, batch: int, which: str, plan: Plan) -> str:
    """Return the row of one pipeline: the solver's answer and bound, and what improving random fillings comes to."""
    model, cluster, framework = load_model(name), read_cluster(machine, gpus), framework_named(which)
    workload, runtime = Workload(seq_len=4096, global_batch_size=batch), default_runtime(framework)
    screening = Screening(Scenario(model=model, cluster=cluster, workload=workload, runtime=runtime))
    started = time.process_time()
    columns = plan_columns([plan])
    costs = cost_blocks(screening, [plan], columns, framework.recomputes)
    found = solve_stages(screening, framework, costs, [0], framework.recomputes)
    solved = time.process_time() - started
    started, rng, least = time.process_time(), random.Random(1), np.inf

    def cost(plans: list[Plan]) -> np.ndarray:
        table = estimate_plans(Scenario(model=model, cluster=cluster, workload=workload, runtime=runtime), plans)
        return np.where(table.fits, table.step_s, np.inf)

    for _ in range(STARTS):
        layers = [model.layers // plan.pp + (rank < model.layers % plan.pp) for rank in range(plan.pp)]
        modes = [rng.choice(framework.recomputes) for _ in range(plan.pp)]
        best = float(cost([_filling(plan, layers, modes)])[0])
        if not np.isfinite(best):
            modes = ["full"] * plan.pp
            best = float(cost([_filling(plan, layers, modes)])[0])
        for _ in range(MOVES):
            moves = list(_moves(layers, modes, framework.recomputes, plan.virtual_stages))
            steps = cost([_filling(plan, *move) for move in moves])
            if steps.min() >= best:
                break
            best, (layers, modes) = float(steps.min()), moves[int(steps.argmin())]
        least = min(least, best)
    spent = time.process_time() - started
    what = f"{name}, {gpus} GPUs of {machine}, pp {plan.pp} x {plan.virtual_stages}, {plan.schedule}"
    return f"| {what} | {found.step_s:.6f} | {found.bound_s:.6f} | {least:.6f} | {solved:.1f} | {spent:.0f} |"


def _filling(plan: Plan, layers: list[int], modes: list[str]) -> Plan:
    """Return the plan whose ranks hold so many layers, spread over their stages, each rank in one mode."""
    stages = [0] * (plan.pp * plan.virtual_stages)
    words = [""] * len(stages)
    for rank, (count, mode) in enumerate(zip(layers, modes, strict=True)):
        for number, stage in enumerate(stages_of(plan, rank)):
            stages[stage] = count // plan.virtual_stages + (number < count % plan.virtual_stages)
            words[stage] = mode
    return replace(plan, layers_per_stage=tuple(stages), recompute_per_stage=tuple(words))


def _moves(layers: list[int], modes: list[str], words: tuple[str, ...], stages: int) -> Iterator[tuple[list, list]]:
    """Yield every filling that differs by a layer moved from one rank to another, or by the mode of one rank."""
    for source, target in itertools.permutations(range(len(layers)), 2):
        if layers[source] > stages:
            moved = list(layers)
            moved[source], moved[target] = moved[source] - 1, moved[target] + 1
            yield moved, modes
    for rank, word in itertools.product(range(len(layers)), words):
        if modes[rank] != word:
            yield layers, [*modes[:rank], word, *modes[rank + 1 :]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    main(options.out)
