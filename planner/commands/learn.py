"""`planner learn`: fit the costs of a runtime to runs with measured time and memory."""

from __future__ import annotations

from pathlib import Path

from planner.io import output
from planner.io.inputs import measurements
from planner.io.printable import printable
from planner.learn.fit import FEWEST, Measured, fit, left_out_errors, measured_of
from planner.learn.logs import read_runs
from planner.learn.next_runs import ask_next
from planner.question.case_fields import case_id
from planner.question.cases import Case, load_case
from planner.question.learned_runtime import LearnedRuntime
from planner.question.plan_file import refuse_overwrite
from planner.requests.runs import Learn
from simulator.fitting.calibrations import Calibrations
from simulator.legality.rules import is_legal
from simulator.runtimes.library import runtime_names, runtime_spec
from topology import codec
from topology.codec import JsonObject
from topology.errors import Infeasible, UserError
from topology.units import two_digits


def learn(asked: Learn) -> None:
    """Print what `planner learn` answers."""
    refuse_overwrite(asked.out, force=asked.force)
    rows = read_runs(asked.file)
    base = _base(asked.runtime, asked.like, rows)
    runs, unmeasured = _runs(rows, base, measurements(asked.profile))
    if not runs and not unmeasured:
        raise Infeasible(
            f"none of the {len(rows)} cases can be used",
            why="the warnings above say what is wrong with them",
            remedy="planner learn --example prints a row that can be used",
        )
    if len(runs) < FEWEST and not unmeasured:
        raise Infeasible(
            f"runs with a measured time or memory: {len(runs)}, too few to learn from",
            remedy=f"give {FEWEST} or more, or add cases that were not run: the answer then says which to run first",
        )
    same, unmeasured, compiled = _of_one_kind(runs, unmeasured)
    found = fit(same, base, compiled=compiled)
    learned = None
    if len(same) >= FEWEST:
        output.progress("left-out errors")
        left_out = left_out_errors(same, found, base, compiled=compiled)
        learned = LearnedRuntime(
            name=asked.runtime, like=base, compile=compiled, rows=len(same), fitted=found.fitted(), left_out=left_out
        )
        codec.write_text(asked.out, codec.to_json(learned) + "\n")
    output.progress("what to run next")
    next_runs = ask_next(same, unmeasured, found, base, compiled=compiled)
    output.end_progress()
    if asked.json:
        _emit(learned, next_runs, asked.out, of=(asked.runtime, base, len(same)))
    else:
        _print(learned, next_runs, asked.out, rows=len(same))


def _base(runtime: str, like: str | None, rows: list[JsonObject]) -> str:
    """Return the description to start from. Raises BadPlan for one that does not exist."""
    known = runtime_names()
    of_cases = [section.get("name") for data in rows if isinstance(section := data.get("runtime"), dict)]
    named = like or (runtime if runtime in known else next((name for name in of_cases if name in known), "pytorch"))
    return runtime_spec(named).names[0]


def _runs(rows: list[JsonObject], base: str, measured: Calibrations) -> tuple[list[Measured], list[Case]]:
    """Return the runs, and the cases without measurements. Warns of those that `base` cannot run."""
    runs: list[Measured] = []
    unmeasured: list[Case] = []
    unused: dict[str, list[str]] = {}  # by reason
    for data in rows:
        stated = data.get("runtime")
        stated_runtime = {**(stated if isinstance(stated, dict) else {}), "name": base}
        try:
            case = load_case({**data, "runtime": stated_runtime}, measured)
            legal = is_legal(case.question.problems(case.plan))
        except UserError as error:
            reason = str(error).removeprefix(f"case {case_id(data)}: ")
            unused.setdefault(reason, []).append(case_id(data))
            continue
        run = measured_of(case)
        if not legal:
            unused.setdefault(f"{base} does not run it", []).append(case_id(data))
        elif run.step_s is None and run.memory_bytes is None:
            unmeasured.append(case)
        else:
            runs.append(run)
    for reason, names in unused.items():
        few = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        output.warn(f"{len(names)} {'cases are' if len(names) > 1 else 'case is'} not used ({few}): {reason}")
    return runs, unmeasured


def _of_one_kind(runs: list[Measured], unmeasured: list[Case]) -> tuple[list[Measured], list[Case], bool]:
    """Return the compiled or the eager runs and cases, whichever are more, and which they are."""
    asked = [run.case for run in runs] or unmeasured
    compiled = sum(case.question.runtime.compile for case in asked) * 2 > len(asked)
    same = [run for run in runs if run.case.question.runtime.compile == compiled]
    if len(same) < len(runs):
        output.warn(
            f"{len(runs) - len(same)} runs are not used: they are {'eager' if compiled else 'compiled'}, the others not"
        )
    return same, [case for case in unmeasured if case.question.runtime.compile == compiled], compiled


def _emit(learned: LearnedRuntime | None, next_runs: list[JsonObject], out: Path, *, of: tuple[str, str, int]) -> None:
    runtime, base, rows = of
    output.emit_json(
        {
            "schema_version": output.SCHEMA_VERSION,
            "runtime": runtime,
            "like": base,
            "rows": rows,
            "fitted": codec.to_builtins(learned.fitted) if learned else {},
            "left_out": learned.left_out if learned else {},
            "ask_next": next_runs,
            "out": str(out) if learned else None,
        }
    )


def _print(learned: LearnedRuntime | None, next_runs: list[JsonObject], out: Path, *, rows: int) -> None:
    if learned:
        print(f"{learned.name}, like {learned.like}, from {rows} runs (fitted; ranges hold four of five fits)")
        for name, one in learned.fitted.items():
            scale, unit = (1e3, " ms") if name.endswith("_s") else (1.0, "")
            value, low, high = (two_digits(end * scale) for end in (one.value, one.low, one.high))
            print(f"  {name.removesuffix('_s').replace('_', ' '):18s} {value:>7}{unit} ({low} to {high})")
        errors = (
            f"{quantity} {'not measured' if value is None else f'{value:.1%}'}"
            for quantity, value in learned.left_out.items()
        )
        print(f"mean error of runs whose group the fit does not know: {', '.join(errors)}")
    else:
        print(f"nothing is learned from {rows} runs: make these first, in this order")
    for plan in next_runs:
        print(printable(f"next: {plan['id']} (its step is known within {plan['step_unsure']:.0%})"))
    if learned:
        print(printable(f"saved {out}"))
