"""`planner check` on the command that starts vLLM or SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from planner.configs.formats.configuration import CheckFlags
from planner.configs.serving import VERSIONS, CheckedServing, check_serving
from planner.configs.serving_document import checked_serving_document
from planner.io import output
from planner.io.output import console
from planner.io.printable import printable
from planner.serving import ServingFlags, deployment_text, digits, print_answer


def check_serving_command(
    text: str, where: str, stated: CheckFlags, serving: Mapping[str, Any], *, search: bool, json: bool
) -> None:
    """Print what there is to say about a command; raise Exit(3) where the engine would not run it."""
    try:
        checked = check_serving(text, where, stated, ServingFlags(**serving), search=search, progress=output.progress)
    finally:
        output.end_progress()
    if json:
        output.emit_json(checked_serving_document(where, checked))
    else:
        _print(checked, Path(where).name)
    if not checked.legal:
        raise typer.Exit(3)


def _print(checked: CheckedServing, name: str) -> None:
    screen = console()
    screen.print(printable(f"file      {name}: {checked.engine} {VERSIONS[checked.engine]}"))
    for problem in checked.problems:
        screen.print(printable(f"illegal   {problem}"))
    if checked.answer is not None and checked.answer.estimate is not None:
        print_answer(checked.answer)
    for one in checked.changes:
        estimate = one.plan.estimate
        figures = (
            f"first token {digits(1e3 * estimate.ttft_s.value)} ms, a token {digits(1e3 * estimate.tpot_s.value)} ms, "
            f"{digits(estimate.output_tokens_per_s_per_gpu.value)} tokens/s a GPU"
        )
        screen.print(printable(f"\nbetter    {deployment_text(one.plan.deployment)}: {figures}"))
        screen.print(printable(f"change    {one.what}"))
    if checked.changes:
        print(printable(checked.changes[0].diff))
    elif checked.no_better:
        screen.print(printable(f"\nbest      {checked.no_better}"))
