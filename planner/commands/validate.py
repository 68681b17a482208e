"""`planner validate`: the predictor against measured runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.io import output
from planner.io.grids import console, grid
from planner.io.inputs import measurements, warn_of_doubts
from planner.io.printable import printable
from planner.learn.logs import read_runs
from planner.question.learned_runtime import LearnedCalibrations, in_place, read_learned
from planner.requests.runs import Validate
from planner.validate.validation import ErrorSummary, Summary, ValidationRow, summarise, validate_case
from topology.errors import Infeasible, OutOfTolerance, UserError


def validate(asked: Validate) -> None:
    """Print what `planner validate` answers."""
    measured = measurements(asked.profile, strict=asked.strict)
    learned = None if asked.runtime is None else read_learned(asked.runtime)
    if learned is not None:
        measured = LearnedCalibrations(measured, learned)
    of_files: list[tuple[str, ValidationRow]] = []
    try:
        for name in asked.files:
            for index, data in enumerate(read_runs(name)):
                row = validate_case(in_place(data, learned), measured=measured)
                of_files.append((Path(name).name, row))
                if index % 20 == 0:
                    output.progress(f"{name}: row {index + 1}")
    finally:
        output.end_progress()
    rows = [row for _, row in of_files]
    summary = summarise(rows)
    names = dict.fromkeys(name for name, _ in of_files)
    parts = {name: summarise(row for of, row in of_files if of == name) for name in names}
    if asked.json:
        listed = [{**row, "file": name} for name, row in of_files]
        whole = {**summary, "by_file": parts}
        output.emit_json({"schema_version": output.SCHEMA_VERSION, "rows": listed, "summary": whole})
    else:
        _print(rows, {**parts, "all": summary})
    if summary["skipped"] == summary["rows"]:
        raise Infeasible(
            "nothing was compared",
            why="every row was skipped" if rows else "the files hold no case",
            remedy="see the reason of each row" if rows else "give files with cases",
        )
    warn_of_doubts(measured)
    if asked.tolerance is not None:
        _hold(summary, asked.tolerance)


def _hold(summary: Summary, tolerance: float) -> None:
    if not summary["step"] and not summary["memory"]:
        raise UserError(
            f"nothing could be compared with a tolerance of {tolerance:g}%",
            why=f"{summary['skipped']} of {summary['rows']} rows were skipped, and no other has a measurement",
            remedy="give cases with measured steps or memory, that can be predicted",
        )
    over = [
        f"{quantity} {100 * figures['mean_abs']:.1f}%"
        for quantity in ("step", "memory")
        if (figures := summary[quantity]) and 100 * figures["mean_abs"] > tolerance
    ]
    if over:
        raise OutOfTolerance(
            f"mean absolute error above {tolerance:g}%: {', '.join(over)}",
            remedy="look at the worst rows of the report",
        )


def _print(rows: Sequence[ValidationRow], summaries: Mapping[str, Summary]) -> None:
    screen = console()
    table = grid(("case", "step s", "measured", "error", "GiB error", "in range"), gap=2)
    for row in rows:
        error, predicted = row["error"], row["predicted"]
        if row["skipped"] or predicted is None:
            continue
        step = predicted["step_s"]
        measured = "-" if error["step"] is None else f"{step / (1 + error['step']):.4g}"
        held = {True: "yes", False: "no", None: "-"}[row["within_interval"]]
        cells = [f"{step:.4g}", measured, _percent(error["step"]), _percent(error["memory"]), held]
        table.add_row(printable(str(row["id"])), *cells)
    screen.print(table)
    for row in rows:
        if row["skipped"]:
            screen.print(printable(f"skipped {row['id']}: {row['skipped']}"))
    totals = grid(("file", "rows", "skip", "step", "bias", "held", "mem", "bias", "held", "fit"))
    for name, part in summaries.items():
        outcome = part["outcomes"]
        right = f"{outcome['right']}/{outcome['right'] + outcome['wrong']}"
        cells = [str(part["rows"]), str(part["skipped"]), *_cells(part["step"]), *_cells(part["memory"]), right]
        totals.add_row(printable(name), *cells)
    screen.print()
    screen.print(totals)
    screen.print("step and memory: mean absolute error; bias: mean signed error; held: inside the 80% interval;")
    screen.print("fit: predicted fit or out-of-memory as it happened. Errors are predicted/measured - 1.")


def _cells(part: ErrorSummary | None) -> list[str]:
    if part is None:
        return ["-", "-", "-"]
    return [f"{part['mean_abs']:.1%}", f"{part['bias']:+.1%}", f"{part['coverage']:.0%}"]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"
