"""`planner suggest --task serve`: which deployment of a model serves requests best."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from planner.export.serving.commands import command
from planner.export.serving.files import serving_files
from planner.io import output
from planner.serving.asked import serving_question
from planner.serving.crossings import over_load
from planner.serving.documents import serving_document
from planner.serving.search import ServingResult, search_serving
from planner.serving.text import print_serving
from simulator.config.hf_config import hub_name
from topology.codec import write_text
from topology.errors import Infeasible, UserError

# Options of `suggest` that mean something only when serving, and those that mean nothing then.
ONLY_SERVING = (
    "isl",
    "osl",
    "concurrency",
    "request_rate",
    "ttft",
    "tpot",
    "engine",
    "weights",
    "kv_cache",
    "separate",
)
ONLY_TRAINING = (
    "gpu",
    "global_batch",
    "all_variants",
    "compile_model",
    "param_dtype",
    "max_tp",
    "tp",
    "pp",
    "cp",
    "ep",
    "dp_shard",
    "dp_replicate",
    "tokens",
    "deadline",
    "budget",
    "schedule",
    "virtual_stages",
    "micro_batch",
    "recompute",
    "profile",
    "strict",
    "pick",
    "offload",
)


def suggest_serving(given: Mapping[str, Any]) -> None:
    """Print the answer to the arguments of `suggest`. Raises UserError for options that only training has."""
    _refuse(given, ONLY_TRAINING, "training", "serve")
    counts = given["gpus"]
    if counts is not None and not counts.strip().isdigit():
        raise UserError(f"--gpus {counts!r} is not a number", remedy="give one number of GPUs with --task serve")
    question = serving_question(
        model=given["model"],
        cluster=given["cluster"],
        gpus=None if counts is None else int(counts),
        engine=given["engine"] or "vllm",
        objective=given["objective"].value,
        isl=given["isl"],
        osl=given["osl"],
        concurrency=given["concurrency"],
        request_rate=given["request_rate"],
        ttft=given["ttft"],
        tpot=given["tpot"],
        weights=given["weights"],
        kv_cache=given["kv_cache"],
        gpu_price=given["gpu_price"],
        separate=given["separate"],
    )
    out, force = given["out"], given["force"]
    if out is not None and out.exists() and not force:
        raise UserError(f"{out} is there already", remedy="choose another folder, or pass --force")
    try:
        result = search_serving(question, progress=output.progress, time_limit_s=given["time_limit"])
        load = over_load(result)
    finally:
        output.end_progress()
    files = _files(result) if out is not None else {}
    if given["json"]:
        output.emit_json(serving_document(result, load, top=given["top"]))
    else:
        print_serving(result, load, top=given["top"], start=_start(result))
    for name, text in files.items():
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / name, text)


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


def refuse_serving_options(given: Mapping[str, Any]) -> None:
    """Raise UserError where an option that only serving has was given for training."""
    _refuse(given, ONLY_SERVING, "serving", "train")


def _refuse(given: Mapping[str, Any], names: tuple[str, ...], whose: str, task: str) -> None:
    stated = [name for name in names if given[name] not in (None, False)]
    if stated:
        flags = ", ".join("--" + name.replace("_", "-") for name in stated)
        raise UserError(
            f"{flags}: an option of {whose}",
            why=f"the task is {task}",
            remedy=f"leave it out, or use --task {'serve' if task == 'train' else 'train'}",
        )
