"""`planner learn`: what runs with measured time and memory teach of the runtime that made them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from planner.commands.flags import options
from planner.io import output
from planner.io.inputs import measurements
from planner.io.printable import printable
from planner.learn.fit import FEWEST, Measured, fit, left_out_errors, measured_of
from planner.learn.next_runs import ask_next
from planner.learn.runs_file import read_runs
from planner.question.cases import Case, case_id, load_case
from planner.question.learned_runtime import LearnedRuntime
from planner.question.plan_file import refuse_overwrite
from simulator.legality.rules import is_legal
from simulator.runtimes.library import runtime_names, runtime_spec
from topology import codec
from topology.errors import Infeasible, UserError


def learn(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Cases: .json, .jsonl or .csv; measured.log names a log.")
    ],
    runtime: Annotated[str, typer.Option("--runtime", help="What the runtime is called, known here or not.")],
    out: Annotated[Path, typer.Option("--out", help="Write the learned runtime to this file.")],
    like: Annotated[
        str | None,
        typer.Option("--like", help="The description to start from; default: the name, else the cases' own."),
    ] = None,
    profile: options.Profile = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace a file.")] = False,
    json: options.Json = False,
) -> None:
    """Fit what a runtime's description leaves open to runs, and say which runs would teach most.

    The file can then be given as --runtime to validate, estimate and suggest. Cases without a measured time or memory are
    candidates for the next runs. What was measured may be left to the log of a run (torchtitan, Megatron-LM or DeepSpeed),
    which `measured.log` of its case names.
    """
    refuse_overwrite(out, force=force)
    rows = read_runs(file)
    base = _base(runtime, like, rows)
    measured = measurements(profile)
    runs: list[Measured] = []
    unmeasured: list[Case] = []
    for data in rows:
        stated = data.get("runtime")
        stated_runtime = {**(stated if isinstance(stated, dict) else {}), "name": base}
        try:
            case = load_case({**data, "runtime": stated_runtime}, measured)
            legal = is_legal(case.question.problems(case.plan))
        except UserError as error:
            output.warn(f"case {case_id(data)} is not used: {error}")
            continue
        run = measured_of(case)
        if not legal:
            output.warn(f"case {case_id(data)} is not used: {base} does not run it")
        elif run.step_s is None and run.memory_bytes is None:
            unmeasured.append(case)
        else:
            runs.append(run)
    if len(runs) < FEWEST:
        raise Infeasible(
            f"{len(runs)} runs with a measured time or memory are too few to learn from",
            remedy=f"give {FEWEST} or more; 20 that differ in model and degrees say most",
        )
    learned, next_runs = _learn(runs, unmeasured, base, runtime)
    codec.write_text(out, codec.to_json(learned) + "\n")
    _answer(learned, next_runs, out, json=json)


def _base(runtime: str, like: str | None, rows: list[dict[str, Any]]) -> str:
    """Return the description to start from. Raises BadPlan for one that does not exist."""
    known = runtime_names()
    of_cases = [section.get("name") for data in rows if isinstance(section := data.get("runtime"), dict)]
    named = like or (runtime if runtime in known else next((name for name in of_cases if name in known), "pytorch"))
    return runtime_spec(named).names[0]


def _learn(
    runs: list[Measured], unmeasured: list[Case], base: str, name: str
) -> tuple[LearnedRuntime, list[dict[str, Any]]]:
    compiled = sum(run.case.question.runtime.compile for run in runs) * 2 > len(runs)
    same = [run for run in runs if run.case.question.runtime.compile == compiled]
    if len(same) < len(runs):
        output.warn(
            f"{len(runs) - len(same)} runs are not used: they are {'eager' if compiled else 'compiled'}, the others not"
        )
    found = fit(same, base, compiled=compiled)
    output.progress("left-out errors")
    left_out = left_out_errors(same, found, base, compiled=compiled)
    output.progress("what to run next")
    next_runs = ask_next(same, unmeasured, found, compiled=compiled)
    output.end_progress()
    learned = LearnedRuntime(
        name=name, like=base, compile=compiled, rows=len(same), fitted=found.fitted(), left_out=left_out
    )
    return learned, next_runs


def _answer(learned: LearnedRuntime, next_runs: list[dict[str, Any]], out: Path, *, json: bool) -> None:
    if json:
        output.emit_json(
            {
                "schema_version": output.SCHEMA_VERSION,
                "runtime": learned.name,
                "like": learned.like,
                "rows": learned.rows,
                "fitted": codec.to_builtins(learned.fitted),
                "left_out": learned.left_out,
                "ask_next": next_runs,
                "out": str(out),
            }
        )
        return
    print(f"{learned.name}, like {learned.like}, from {learned.rows} runs (fitted; ranges hold four of five fits)")
    for name, one in learned.fitted.items():
        scale, unit = (1e3, " ms") if name.endswith("_s") else (1.0, "")
        print(f"  {name:18s} {one.value * scale:8.3g}{unit}  {one.low * scale:.3g} to {one.high * scale:.3g}")
    for quantity, value in learned.left_out.items():
        print(
            f"left out group by group, {quantity}: " + ("not measured" if value is None else f"{value:.1%} in the mean")
        )
    for plan in next_runs:
        print(printable(f"next: {plan['id']} (its step is known within a factor of {1 + plan['step_unsure']:.2f})"))
    print(printable(f"saved {out}"))
