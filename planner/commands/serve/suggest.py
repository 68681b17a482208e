"""`planner suggest --task serve`: which deployment of a model serves requests best."""

from __future__ import annotations

import shlex

from planner.answers.serve import suggest as answers
from planner.export.serving.commands import command
from planner.io import output
from planner.pictures.pareto import pareto_picture
from planner.question.plan_file import refuse_overwrite
from planner.requests.training import Suggest
from planner.serving.reports.pareto import pareto_csv, print_pareto
from planner.serving.reports.text import print_serving
from planner.serving.search import ServingResult
from simulator.config.hf_config import hub_name
from topology import codec
from topology.errors import Infeasible


def suggest(asked: Suggest) -> None:
    """Print the answer to a request, and save the best deployment where `--out` asks for it."""
    for path in (asked.svg, asked.drawn.csv):
        if path is not None:
            refuse_overwrite(path, force=asked.force)
    try:
        found = answers.suggest(asked, output.progress)
    finally:
        output.end_progress()
    if isinstance(found, answers.ComparedDeployments):
        _compared(found, asked)
        return
    if asked.json:
        output.emit_json(found.to_dict())
    else:
        print_serving(found.result, found.over_clients, top=asked.top, start=_start(found.result), out=found.out)
    if asked.out is not None:
        found.save(asked.out, force=asked.force)


def _compared(answer: answers.ComparedDeployments, asked: Suggest) -> None:
    """Print the comparison, and save it if asked to."""
    found = answer.found
    if asked.json:
        output.emit_json(answer.to_dict())
    else:
        print_pareto(found)
    for path, write in ((asked.svg, pareto_picture), (asked.drawn.csv, pareto_csv)):
        if path is not None:
            codec.write_text(path, write(found))
            output.warn(f"saved {path}")


def _start(result: ServingResult) -> str:
    """Return the command of one engine of the best plan, or why there is none."""
    question = result.question
    best = question.stated(result.plans[0].deployment)
    try:
        return shlex.join(command(best, best.pool, hub_name(question.model.name), longest=question.longest))
    except Infeasible as problem:
        return f"no command: {str(problem).splitlines()[0]}"
