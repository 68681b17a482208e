"""`planner report`: one run, measured against predicted, and which term is to blame."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from planner.commands.flags import options
from planner.io import output
from planner.io.inputs import measurements
from planner.io.printable import printable
from planner.pictures.timelines import timelines
from planner.question.plan_file import refuse_overwrite
from planner.runs import profile_update, report_text
from planner.runs.report_html import to_html
from planner.runs.run_report import RunReport, load_run
from planner.runs.runs_store import plan_words
from planner.runs.timelines import side_by_side
from topology import codec
from topology.errors import PlannerError
from topology.redact import redact as redact_text


def report(
    run: Annotated[str, typer.Argument(help="Directory of a run, or its id in planner runs.")],
    tolerance: options.Tolerance = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as one self-contained page.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Write both timelines as an SVG picture.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write both timelines for Perfetto.")] = None,
    learn: Annotated[
        Path | None, typer.Option("--learn", help="Add the run's operators by shape to this profile.")
    ] = None,
    profile: options.Profile = None,
    strict: options.Strict = False,
    force: Annotated[bool, typer.Option("--force", help="Let output replace files.")] = False,
    redact: options.Redact = False,
    json: options.Json = False,
) -> None:
    """Show predicted and measured for every quantity of a run, with signed errors, and explain the difference.

    Exit code 4 when the step is outside --tolerance percent, without it outside its predicted interval; 1 when a run
    that failed is asked to be within a tolerance.
    """
    for path in (html, picture, trace):
        if path is not None:
            refuse_overwrite(path, force=force)
    found = load_run(run, measured=measurements(profile, strict=strict))
    answer = found.answer(tolerance)
    if learn is not None:
        answer["learned"] = _learn(found, learn)
    with output.redacted(redact):
        if json:
            output.emit_json(answer)
        else:
            _print(answer)
    _write(found, answer, html=html, picture=picture, trace=trace, hide=redact_text if redact else str)
    if tolerance is not None and answer["within"] is None:
        raise PlannerError(
            "nothing could be held against the tolerance",
            why=f"the run is {answer['status']}"
            if found.document.get("predicted")
            else "the run was not predicted: only saved plans on the planned GPUs are",
        )
    if answer["within"] is False:
        raise typer.Exit(4)


def _print(answer: dict[str, Any]) -> None:
    screen = output.console()
    screen.print(printable(f"{answer['model']}, {plan_words(answer['plan'])}"))
    partial = "" if answer["complete"] else ", not complete"
    screen.print(printable(f"run {answer['id']} of {answer['taken_at']}: {answer['status']}{partial}"))

    def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        if not rows:
            return
        grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for index, head in enumerate(heads):
            grid.add_column(head, justify="left" if index == 0 else "right", overflow="fold")
        for row in rows:
            grid.add_row(*(printable(cell) for cell in row))
        screen.print()
        screen.print(grid)

    table(("quantity", "predicted", "80% range", "source", "measured", "error"), report_text.quantity_rows(answer))
    table(("where the step went", "predicted s", "measured s", "difference s"), report_text.term_rows(answer))
    if answer["blame"]:
        screen.print(printable(f"to blame: {answer['blame']}"))
    table(("collective", "side", "calls", "seconds", "exposed s"), report_text.collective_rows(answer))
    table(("setting", "requested", "took effect", "agree"), report_text.effect_rows(answer))
    if "learned" in answer:
        table(("operator in the step", "calls", "measured s", "expected s", "error"), report_text.learned_rows(answer))
    if any(row["error"] is not None for row in answer["quantities"]):
        screen.print()
        screen.print("Errors and differences are predicted / measured - 1 and predicted - measured.")
    for note in answer["notes"]:
        screen.print(printable(f"note: {note}"))


def _learn(found: RunReport, profile: Path) -> dict[str, Any]:
    lesson = profile_update.add_run_to_profile(found, profile)
    output.warn(f"{profile}: {lesson.samples} operators of the run, {lesson.fresh} of them new")
    return dict(codec.to_builtins(lesson))


def _write(
    found: RunReport,
    answer: dict[str, Any],
    *,
    html: Path | None,
    picture: Path | None,
    trace: Path | None,
    hide: Callable[[str], str],
) -> None:
    words = plan_words(answer["plan"])
    drawn = ""
    if found.simulated or found.measured:
        drawn = timelines(found.simulated, found.slowest, title=f"{answer['model']}, {words}")
    elif picture or trace:
        raise PlannerError("there is no timeline to write", why="; ".join(found.notes))
    if html:
        codec.write_text(html, hide(to_html(answer, words, drawn)))
        output.warn(f"saved {html}")
    if picture:
        codec.write_text(picture, hide(drawn))
        output.warn(f"saved {picture}")
    if trace:
        codec.write_text(trace, hide(codec.to_json(side_by_side(found.simulated, found.measured), indent=None)))
        output.warn(f"saved {trace}: open it at https://ui.perfetto.dev")
