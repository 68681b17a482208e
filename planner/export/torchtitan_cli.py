"""torchtitan 0.3.0: a configuration function of its registry, and overrides on the command line.

0.3.0 reads no TOML (`config/manager.py`): `--module` and `--config` choose a function, `--section.key` overrides the
configuration that it returns, and activation checkpointing is a subcommand, which must be last.
"""

from __future__ import annotations

from typing import Any

from planner.export.degrees import to_fsdp_degrees
from planner.export.draft import Draft, Target
from planner.export.job import ExportJob, require_legal
from planner.export.schema import shipped_model
from planner.export.script import (
    MASTER_ADDRESS,
    NODE_RANK,
    NODE_RANK_VALUE,
    ShellExpression,
    command,
    device_lines,
    host_order_notes,
    torchrun_words,
)
from planner.export.torchtitan import TITLE, overlap_not_expressed, parallelism, stage_modules, training, uses_async
from topology.errors import Infeasible

VERSION = "0.3.0"
SUBCOMMAND = "activation_checkpoint"
RECOMPUTE = {"none": "none", "full": "full", "selective-op": "selective"}


def program(job: ExportJob) -> tuple[list[str], Draft]:
    """Return the arguments of torchrun, and a draft of what they set. Raises Infeasible."""
    title = f"{TITLE} {VERSION}"
    fsdp, sharding_notes = to_fsdp_degrees(job.plan, title)
    job = job.with_plan(fsdp)
    notes = require_legal(job, "torchtitan", title)
    known = shipped_model("torchtitan", VERSION, job.question.model)
    plan = job.plan
    if stage_modules(job, "lm_head"):
        raise Infeasible(
            f"{title} splits this pipeline differently",
            why="uneven stages, or more than two per rank, need parallelism.module_fqns_per_model_part, which its command "
            "line cannot hold",
            remedy="--to torchtitan@0.2.2, or a configuration function of your own",
        )
    degrees, not_expressed = parallelism(job)
    degrees["enable_sequence_parallel"] = plan.sequence_parallel
    if plan.cp > 1 and (plan.cp_method or "all_gather") != "all_gather":
        not_expressed = (*not_expressed, f"context parallelism by {plan.cp_method}: {title} gathers keys and values")
    settings: dict[str, Any] = {f"training.{key}": value for key, value in training(job).items()}
    # The predicted step is without CUDA graphs.
    settings["training.disable_cuda_graphs"] = True
    settings |= {f"parallelism.{key}": value for key, value in degrees.items()}
    settings["compile.enable"] = job.question.runtime.compile
    settings["compile.enable_async_tensor_parallel"] = uses_async(plan)
    settings["compile.components"] = ["model", "loss"]
    if plan.recompute not in RECOMPUTE:
        coarse = "every second block" if plan.recompute == "selective" else repr(plan.recompute)
        not_expressed = (*not_expressed, f"recompute {coarse}: {title} selects operators; written as selective")
    mode = RECOMPUTE.get(plan.recompute, "selective")
    words = ["-m", "torchtitan.train", f"--module={known['module']}", f"--config={known['config']}"]
    words += [word for key, value in settings.items() for word in _option(key, value)]
    words.append(f"{SUBCOMMAND}:{mode}")
    draft = Draft(
        body="",
        settings={"--module": known["module"], "--config": known["config"], **settings, SUBCOMMAND: mode},
        not_expressed=(*sharding_notes, *not_expressed, *overlap_not_expressed(plan)),
        needed=(
            "--hf_assets_path: the folder of the tokenizer",
            "data set, steps, optimizer and learning rate, which no plan decides: add their options",
        ),
        notes=notes,
    )
    return words, draft


def _option(key: str, value: Any) -> list[str]:
    """Return one override as tyro reads it: a flag for a boolean, a comma-separated list for a list."""
    if isinstance(value, bool):
        section, _, name = key.rpartition(".")
        return [f"--{section}.{'' if value else 'no_'}{name}"]
    if isinstance(value, list):
        return [f"--{key}={','.join(value)}"]
    return [f"--{key}={value}"]


def write(job: ExportJob) -> Draft:
    """Return a shell script. Raises Infeasible."""
    words, draft = program(job)
    hosts = job.hosts()
    lines, reasons = device_lines(hosts, NODE_RANK_VALUE)
    started = torchrun_words(hosts, node_rank=NODE_RANK, address=MASTER_ADDRESS)
    # The subcommand ends the options, so options added by the user go before it.
    words.insert(-1, ShellExpression('"$@"'))
    return Draft(
        body=f"set -eu\n{lines}exec {command([*started, *words])}\n",
        settings=draft.settings,
        not_expressed=draft.not_expressed,
        needed=draft.needed,
        notes=(*draft.notes, *host_order_notes(hosts)),
        environment=reasons,
    )


TARGET = Target(
    name="torchtitan",
    version=VERSION,
    title=TITLE,
    file_name="torchtitan.sh",
    write=write,
    first_line="#!/bin/sh",
)
