"""`planner check`: a configuration of another tool, judged and improved."""

from __future__ import annotations

from pathlib import Path

from click.exceptions import Exit

from planner.answers import check as answers
from planner.configs.answer import Checked
from planner.configs.folder import CheckedFolder
from planner.configs.formats.configuration import did_you_mean
from planner.configs.stated_rate import Against, Side
from planner.explain.answer_text import assumed_parts, fits_text, print_estimate
from planner.io import output
from planner.io.grids import console, grid
from planner.io.plan_words import plan_in_words
from planner.io.printable import printable
from planner.requests.tools import Check
from simulator.config.estimate import SURE, chance
from simulator.legality.rule import Grade, Problem
from topology.units import two_digits


def check(asked: Check) -> None:
    """Print what `planner check` answers; raise Exit(3) where the configuration is not legal, Exit(2) where it leaves
    open what a verdict needs.
    """
    try:
        found = answers.check(asked, output.progress)
    finally:
        output.end_progress()
    if isinstance(found, CheckedFolder):
        if asked.json or asked.sarif:
            output.emit_json(found.to_sarif() if asked.sarif else found.to_dict())
        else:
            _print_folder(found)
    elif asked.json:
        output.emit_json(found.to_dict())
    elif isinstance(found.checked, Checked):
        _print(found.checked, Path(found.file).name)
    else:
        from planner.commands.serve.check import print_serving  # noqa: PLC0415 - of servers only

        print_serving(found.checked, Path(found.file).name)
    if found.legal is None:
        raise Exit(2)
    if not found.legal:
        raise Exit(3)


def _print(checked: Checked, name: str) -> None:
    configuration = checked.configuration
    version = f" {configuration.version}" if configuration.version else ""
    print(printable(f"file      {name}: {configuration.framework}{version}"))
    if checked.open_length is not None:
        length = f"sequence length {checked.open_length:,} tokens"
        print(f"judged    at {length} (the file does not say it; --seq-len with yours)")
    if checked.found is not None:
        print_estimate(checked.found)
    else:
        _print_without_cost(checked)
    if checked.against is not None:
        _print_against(checked.against)
    if configuration.unknown:
        near = did_you_mean(configuration)
        named = (f"{key} (did you mean {near[key]}?)" if key in near else key for key in configuration.unknown)
        print(printable(f"unknown   {', '.join(named)}"))
    for number, change in enumerate(checked.changes):
        print(
            printable(
                f"{'change' if number == 0 else 'or':9} {change.what}:"
                f" {two_digits(change.step_s)} s, {_fit(change.fit_probability)}"
            )
        )
    if checked.changes:
        print(f"diff      of the {'first ' * (len(checked.changes) > 1)}change alone:")
        print(printable(checked.changes[0].diff))
    if checked.best is not None:
        estimate = checked.best.estimate
        fit = _fit(estimate.memory.fit_probability)
        because = f": {checked.best_because}" if checked.best_because else ""
        print(printable(f"best      {two_digits(estimate.step_s.value)} s, {fit}{because}"))
        print(printable(checked.best.diff))
    elif checked.no_better:
        print(printable(f"best      {checked.no_better}"))


def _print_folder(found: CheckedFolder) -> None:
    table = grid(("file", "kind", "model", "verdict", "fits", "step s"), text=("file", "kind", "model"))
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for row in found.rows:
        cells = ["-"] * 4
        kind = "-"
        if row.checked is not None:
            kind, cells = row.checked.configuration.framework, _cells(row.checked)
        table.add_row(printable(row.file), kind, *(printable(cell) for cell in cells))
    console().print(table)
    for row in found.rows:
        problems = [row.problem] if row.checked is None else [one.message for one in _illegal(row.checked)]
        for message in problems:
            print(printable(f"{row.file}: {message}"))
        if row.checked is None:
            continue
        for question in row.checked.questions:
            print(printable(f"{row.file}: {question.what}: {question.remedy}"))
        for change in row.checked.changes[:1]:
            print(printable(f"{row.file}: better with {change.what}: {two_digits(change.step_s)} s"))
    print(f"{len(found.rows)} configurations in {found.looked_at} files{f'; {found.stopped}' if found.stopped else ''}")


def _illegal(checked: Checked) -> list[Problem]:
    return [problem for problem in checked.problems if problem.grade is Grade.ILLEGAL]


def _cells(checked: Checked) -> list[str]:
    """Return the model, verdict, fit and step of a row."""
    verdict = {True: "legal", False: "not legal", None: "open"}[checked.legal]
    estimate = checked.found.estimate if checked.found is not None else None
    model = checked.found.case.question.model.name if checked.found is not None else "not known"
    if estimate is None:
        return [model, verdict, "-", "-"]
    return [model, verdict, fits_text(estimate), two_digits(estimate.step_s.value)]


def _print_against(stated: Against) -> None:
    where = "inside the predicted range" if stated.side is Side.INSIDE else f"{stated.side} the predicted range"
    print(printable(f"measured  {stated.step_s:.3g} s, {where}: the prediction is {stated.error:+.0%} off"))
    for cause in stated.causes:
        print(printable(f"cause     {cause}"))


def _print_without_cost(checked: Checked) -> None:
    """Print the verdict on a configuration that contradicts itself, or whose model is not known."""
    if checked.stated is not None:
        print(printable(f"plan      {plan_in_words(checked.stated.plan)}"))
    for line in assumed_parts(checked.assumed):
        print(printable(f"assumed   {line}"))
    for problem in checked.problems:
        print(printable(f"{problem.grade!s:9} {problem.message}"))
    for question in checked.questions:
        print(printable(f"question  {question.what}: {question.remedy}"))
    verdicts = {
        None: "open: it cannot be judged before the question is answered",
        False: "not legal: nothing to estimate",
        True: "legal by all rules that need no model; without one there is no step, memory or change",
    }
    print(f"verdict   {verdicts[checked.legal]}")


def _fit(probability: float) -> str:
    if probability >= SURE:
        return "fits"
    return "does not fit" if probability <= 1 - SURE else f"fits with a chance of {chance(probability)}"
