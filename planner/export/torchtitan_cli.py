"""torchtitan 0.3.0: a configuration function of its registry, and overrides on the command line.

0.3.0 reads no TOML any more (`config/manager.py`): `--module` and `--config` choose a function, `--section.key`
overrides what it returns, and activation checkpointing is a subcommand that must come last.
"""

from __future__ import annotations

from typing import Any

from planner.export.degrees import as_degrees
from planner.export.draft import Draft, Target
from planner.export.job import Job, require_legal
from planner.export.schema import shipped_model
from planner.export.script import (
    MASTER_ADDRESS,
    NODE_RANK,
    NODE_RANK_VALUE,
    Raw,
    command,
    device_lines,
    host_order,
    torchrun,
)
from planner.export.torchtitan import TITLE, overlap_unsaid, parallelism, stage_modules, training, uses_async
from topology.errors import Infeasible

VERSION = "0.3.0"
SUBCOMMAND = "activation_checkpoint"
RECOMPUTE = {"none": "none", "full": "full", "selective-op": "selective"}


def program(job: Job) -> tuple[list[str], Draft]:
    """Return what torchrun is to start, and a draft of what it sets. Raises Infeasible."""
    title = f"{TITLE} {VERSION}"
    fsdp, told = as_degrees(job.plan, title)
    job = job.with_plan(fsdp)
    notes = require_legal(job, "torchtitan", title)
    known = shipped_model("torchtitan", VERSION, job.model)
    plan = job.plan
    if stage_modules(job, "lm_head"):
        raise Infeasible(
            f"{title} splits this pipeline differently",
            why="uneven or more than two stages a rank need parallelism.module_fqns_per_model_part, which its command "
            "line cannot hold",
            remedy="--to torchtitan@0.2.2, or a configuration function of your own",
        )
    degrees, unsaid = parallelism(job)
    degrees["enable_sequence_parallel"] = plan.sequence_parallel
    if plan.cp > 1 and (plan.cp_method or "all_gather") != "all_gather":
        unsaid = (*unsaid, f"context parallelism by {plan.cp_method}: {title} gathers keys and values")
    settings: dict[str, Any] = {f"training.{key}": value for key, value in training(job).items()}
    # What was costed is the step without captured graphs.
    settings["training.disable_cuda_graphs"] = True
    settings |= {f"parallelism.{key}": value for key, value in degrees.items()}
    settings["compile.enable"] = job.runtime.compile
    settings["compile.enable_async_tensor_parallel"] = uses_async(plan)
    settings["compile.components"] = ["model", "loss"]
    if plan.recompute not in RECOMPUTE:
        coarse = "every second block" if plan.recompute == "selective" else repr(plan.recompute)
        unsaid = (*unsaid, f"recompute {coarse}: {title} selects operators; written as selective")
    mode = RECOMPUTE.get(plan.recompute, "selective")
    words = ["-m", "torchtitan.train", f"--module={known['module']}", f"--config={known['config']}"]
    words += [word for key, value in settings.items() for word in _option(key, value)]
    words.append(f"{SUBCOMMAND}:{mode}")
    draft = Draft(
        body="",
        settings={"--module": known["module"], "--config": known["config"], **settings, SUBCOMMAND: mode},
        unsaid=(*told, *unsaid, *overlap_unsaid(plan)),
        needed=(
            "--hf_assets_path: the folder of the tokenizer",
            "data set, steps, optimizer and learning rate, which no plan decides: add their options",
        ),
        notes=notes,
    )
    return words, draft


def _option(key: str, value: Any) -> list[str]:
    """Return one override as tyro reads it: flags for booleans, a comma list for lists of words."""
    if isinstance(value, bool):
        section, _, name = key.rpartition(".")
        return [f"--{section}.{'' if value else 'no_'}{name}"]
    if isinstance(value, list):
        return [f"--{key}={','.join(value)}"]
    return [f"--{key}={value}"]


def write(job: Job) -> Draft:
    """Return a shell script. Raises Infeasible."""
    words, draft = program(job)
    hosts = job.hosts()
    lines, reasons = device_lines(hosts, NODE_RANK_VALUE)
    started = torchrun(hosts, node_rank=NODE_RANK, address=MASTER_ADDRESS)
    # The subcommand ends the options, so what a user adds goes before it.
    words.insert(-1, Raw('"$@"'))
    return Draft(
        body=f"set -eu\n{lines}exec {command([*started, *words])}\n",
        settings=draft.settings,
        unsaid=draft.unsaid,
        needed=draft.needed,
        notes=(*draft.notes, *host_order(hosts)),
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
