"""`planner suggest --task serve`: which deployment of a model serves requests best."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.commands.flags.serving_flags import Task, refuse, stated, typed
from planner.export.serving.commands import command
from planner.export.serving.files import serving_files
from planner.io import output
from planner.serving import (
    ServingFlags,
    ServingResult,
    over_clients,
    print_serving,
    search_serving,
    serving_document,
    serving_file,
    serving_question,
)
from simulator.config.hf_config import hub_name
from topology import codec
from topology.errors import Infeasible, UserError

# Options of `suggest` that mean nothing when serving; of those with a default it counts whether the command line has them.
ONLY_TRAINING = (
    *("global_batch", "all_variants", "compile_model", "param_dtype", "compute_dtype"),
    *("max_tp", "tp", "pp", "cp", "ep"),
    *("dp_shard", "dp_replicate", "tokens", "deadline", "budget", "schedule", "virtual_stages", "micro_batch"),
    *("recompute", "runtime", "pick", "offload", "ep_overlap"),
)
SPELLED = {"all_variants": "--all", "compile_model": "--compile", "global_batch": "--global-batch"}
DEFAULTED = ("seq_len", "framework", "simulate")


def suggest_serving(given: Mapping[str, Any]) -> None:
    """Print the answer to the arguments of `suggest`. Raises UserError for options that only training has."""
    others = [name for name in stated({name: given[name] for name in ONLY_TRAINING}) if given[name] is not None]
    others += [name for name in DEFAULTED if typed(given["context"], name)]
    refuse(others, Task.SERVE, SPELLED)
    counts = given["gpus"]
    if counts is not None and not (counts.strip().isdigit() and 0 < int(counts.strip()[:12]) <= 1 << 20):
        raise UserError(f"--gpus {counts!r} is not a number", remedy="give one number of GPUs with --task serve")
    flags = ServingFlags(
        model=given["model"],
        cluster=given["cluster"],
        gpu=given["gpu"],
        gpus=None if counts is None else int(counts),
        objective=given["objective"].value if typed(given["context"], "objective") else None,
        gpu_price=given["gpu_price"],
        profile=given["profile"],
        strict=given["strict"],
        **given["serving"],
    )
    question = serving_question(flags)
    out = given["out"]
    if out is not None and out.exists() and not given["force"]:
        raise UserError(f"{out} is there already", remedy="choose another name, or pass --force")
    limit_s = given["time_limit"]
    until_s = time.monotonic() + (math.inf if limit_s is None else limit_s)
    try:
        result = search_serving(question, progress=output.progress, time_limit_s=limit_s)
        load = over_clients(result, until_s=until_s).rows
    finally:
        output.end_progress()
    if given["json"]:
        output.emit_json(serving_document(result, load, top=given["top"]))
    else:
        print_serving(result, load, top=given["top"], start=_start(result))
    if out is not None:
        _write(result, out)


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
