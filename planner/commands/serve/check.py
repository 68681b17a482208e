"""What `planner check` prints of a command that starts a server."""

from __future__ import annotations

from planner.configs.serving import VERSIONS, CheckedServing
from planner.io.grids import console
from planner.io.printable import printable
from planner.serving.reports.plan_text import print_answer
from planner.serving.reports.text import deployment_text
from topology.units import two_digits


def print_serving(checked: CheckedServing, name: str) -> None:
    """Print the verdict on a command and what would be better."""
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
