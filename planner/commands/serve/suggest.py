"""`planner suggest --task serve`: which deployment of a model serves requests best."""

from __future__ import annotations

import math
import shlex
import time
from pathlib import Path

from planner.export.serving.commands import command
from planner.export.serving.files import serving_files
from planner.io import output
from planner.requests.serving import Task, refuse, stated
from planner.requests.training import Suggest
from planner.serving import (
    ServingResult,
    flags_of_search,
    over_clients,
    print_serving,
    search_serving,
    serving_document,
    serving_file,
    serving_question,
)
from simulator.config.hf_config import hub_name
from simulator.config.plan import PLAN_FIELDS
from topology import codec
from topology.errors import Infeasible, UserError

# Options of `suggest` that mean nothing when serving; of those with a default it counts whether they were stated.
ONLY_TRAINING = (
    *("global_batch", "all_variants", "compile_model", "param_dtype", "compute_dtype", "max_tp"),
    *("tokens", "deadline", "budget", "runtime", "pick"),
)
SPELLED = {"all_variants": "--all", "compile_model": "--compile"}
DEFAULTED = ("seq_len", "framework", "simulate")


def suggest(asked: Suggest) -> None:
    """Print the answer to a request. Raises UserError for options that only training has."""
    refuse(_of_training(asked), Task.SERVE, SPELLED)
    question = serving_question(flags_of_search(asked))
    out = asked.out
    if out is not None and out.exists() and not asked.force:
        raise UserError(f"{out} is there already", remedy="choose another name, or pass --force")
    limit_s = asked.time_limit
    until_s = time.monotonic() + (math.inf if limit_s is None else limit_s)
    try:
        result = search_serving(question, progress=output.progress, time_limit_s=limit_s)
        load = over_clients(result, until_s=until_s).rows
    finally:
        output.end_progress()
    if asked.json:
        output.emit_json(serving_document(result, load, top=asked.top))
    else:
        print_serving(result, load, top=asked.top, start=_start(result))
    if out is not None:
        _write(result, out)


def _of_training(asked: Suggest) -> list[str]:
    """Return the options that were stated and only training has."""
    parts = [PLAN_FIELDS[name].parameter for name, text in asked.fixed.items() if text is not None]
    others = stated({name: getattr(asked, name) for name in ONLY_TRAINING})
    return [*others, *parts, *(name for name in DEFAULTED if name in asked.said)]


def _write(result: ServingResult, out: Path) -> None:
    """Save the best plan: alone where `out` ends in .json, else in a folder with the files that start it."""
    saved = codec.to_json(serving_file(result.question, result.plans[0].deployment)) + "\n"
    if out.suffix == ".json":
        codec.write_text(out, saved)
        return
    files = _files(result)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in {"plan.json": saved, **files}.items():
        codec.write_text(out / name, text)


def _files(result: ServingResult) -> dict[str, str]:
    """Return the files that start the best plan, by name."""
    question = result.question
    return serving_files(
        result.plans[0].deployment,
        hub_name(question.model.name),
        longest=question.longest,
        gpus_per_node=question.cluster.gpus_per_node,
    )


def _start(result: ServingResult) -> str:
    """Return the command of one engine of the best plan, or why there is none."""
    best, question = result.plans[0].deployment, result.question
    try:
        return shlex.join(command(best, best.pool, hub_name(question.model.name), longest=question.longest))
    except Infeasible as problem:
        return f"no command: {str(problem).splitlines()[0]}"
