"""`planner check`: a configuration of another tool, judged and improved."""

from __future__ import annotations

from pathlib import Path

from click.exceptions import Exit

from planner.answers import check as answers
from planner.configs.answer import Checked
from planner.configs.serving import VERSIONS, CheckedServing
from planner.explain.answer_text import print_estimate
from planner.io import output
from planner.io.grids import console
from planner.io.plan_words import plan_in_words
from planner.io.printable import printable
from planner.requests.tools import Check
from planner.serving.reports.plan_text import print_answer
from planner.serving.reports.text import deployment_text
from simulator.config.estimate import SURE, chance
from topology.units import two_digits


def check(asked: Check) -> None:
    """Print what `planner check` answers; raise Exit(3) where the configuration is not legal, Exit(2) where it leaves
    open what a verdict needs.
    """
    try:
        found = answers.check(asked, output.progress)
    finally:
        output.end_progress()
    name = Path(found.file).name
    if asked.json:
        output.emit_json(found.to_dict())
    elif isinstance(found.checked, CheckedServing):
        _print_serving(found.checked, name)
    else:
        _print(found.checked, name)
    if found.legal is None:
        raise Exit(2)
    if not found.legal:
        raise Exit(3)


def _print(checked: Checked, name: str) -> None:
    configuration = checked.configuration
    version = f" {configuration.version}" if configuration.version else ""
    print(printable(f"file      {name}: {configuration.framework}{version}"))
    if checked.found is not None:
        print_estimate(checked.found)
    else:
        _print_without_cost(checked)
    if configuration.unknown:
        print(printable(f"unknown   {', '.join(configuration.unknown)}"))
    for number, change in enumerate(checked.changes):
        print(
            printable(
                f"{'change' if number == 0 else 'or':9} {change.what}:"
                f" {change.step_s:.3g} s, {_fit(change.fit_probability)}"
            )
        )
    if checked.changes:
        print(printable(checked.changes[0].diff))
    if checked.best is not None:
        estimate = checked.best.estimate
        fit = _fit(estimate.memory.fit_probability)
        print(printable(f"best      {estimate.step_s.value:.3g} s, {fit}"))
        print(printable(checked.best.diff))
    elif checked.no_better:
        print(printable(f"best      {checked.no_better}"))


def _print_without_cost(checked: Checked) -> None:
    """Print the verdict on a configuration that contradicts itself, or whose model is not known."""
    if checked.stated is not None:
        print(printable(f"plan      {plan_in_words(checked.stated.plan)}"))
    for line in checked.assumed:
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


def _print_serving(checked: CheckedServing, name: str) -> None:
    screen = console()
    screen.print(printable(f"file      {name}: {checked.engine} {VERSIONS[checked.engine]}"))
    for problem in checked.problems:
        screen.print(printable(f"illegal   {problem}"))
    if checked.answer is not None and checked.answer.estimate is not None:
        print_answer(checked.answer)
    for one in checked.changes:
        estimate = one.plan.estimate
        figures = (
            f"first token {two_digits(1e3 * estimate.ttft_s.value)} ms,"
            f" a token {two_digits(1e3 * estimate.tpot_s.value)} ms,"
            f" {two_digits(estimate.output_tokens_per_s_per_gpu.value)} tokens/s a GPU"
        )
        screen.print(printable(f"\nbetter    {deployment_text(one.plan.deployment)}: {figures}"))
        screen.print(printable(f"change    {one.what}"))
    if checked.changes:
        print(printable(checked.changes[0].diff))
    elif checked.no_better:
        screen.print(printable(f"\nbest      {checked.no_better}"))
