"""torchtitan 0.3.0: a configuration function of its registry, and overrides on the command line.

0.3.0 reads no TOML (`config/manager.py`): `--module` and `--config` choose a function, `--section.key` overrides the
configuration that it returns, and activation checkpointing is a subcommand, which must be last. The function is a
module of its own, written next to the command: the functions that torchtitan ships cover few models. Its loss has one
piece, or 8 as in torchtitan's functions if the plan was predicted for 0.3.0.
"""

from __future__ import annotations

from typing import Any

from planner.export.draft import Draft, Target
from planner.export.frameworks.torchtitan import TITLE, prepared
from planner.export.frameworks.torchtitan_fields import COMMAND_LINE, RECOMPUTE_0_3, SUBCOMMAND, stage_modules
from planner.export.frameworks.torchtitan_models import CONFIG_FUNCTION, CONFIG_MODULE, registry_model
from planner.export.job import ExportJob
from planner.export.mapping import write as settings_of
from planner.export.script import ShellExpression, started_script
from simulator.runtimes.library import is_later_version
from topology.errors import Infeasible

VERSION = "0.3.0"


def program(job: ExportJob) -> tuple[list[str], Draft]:
    """Return the arguments of torchrun, and a draft of what they set. Raises Infeasible."""
    title = f"{TITLE} {VERSION}"
    job, not_expressed, notes = prepared(job, title)
    plan, facts = job.plan, job.facts()
    pieces = is_later_version(job.question.runtime)
    known = registry_model(job.question.model, job.question.workload, VERSION, loss_in_pieces=pieces)
    if stage_modules(facts, plan, "lm_head"):
        raise Infeasible(
            f"{title} splits this pipeline differently",
            why="uneven stages, or more than two per rank, need parallelism.module_fqns_per_model_part,"
            " which its command line cannot hold",
            remedy="--to torchtitan@0.2.2, or a configuration function of your own",
        )
    if plan.cp > 1 and (plan.cp_method or "all_gather") != "all_gather":
        not_expressed = (*not_expressed, f"context parallelism by {plan.cp_method}: {title} gathers keys and values")
    if plan.recompute not in RECOMPUTE_0_3:
        coarse = "every second block" if plan.recompute == "selective" else repr(plan.recompute)
        not_expressed = (*not_expressed, f"recompute {coarse}: {title} selects operators; written as selective")
    settings = settings_of(COMMAND_LINE, facts)
    mode = settings.pop(SUBCOMMAND)
    # The step was predicted without CUDA graphs.
    settings["training.disable_cuda_graphs"] = True
    chosen = {"--module": CONFIG_MODULE, "--config": CONFIG_FUNCTION}
    words = ["-m", "torchtitan.train", *(f"{key}={value}" for key, value in chosen.items())]
    words += [word for key, value in settings.items() for word in _option(key, value)]
    # The subcommand ends the options, so options added by the user go before it.
    words += [ShellExpression('"$@"'), f"{SUBCOMMAND}:{mode}"]
    draft = Draft(
        body="",
        settings={**chosen, **settings, SUBCOMMAND: mode},
        not_expressed=(*not_expressed, f"attention kernel: {title} runs FlexAttention, predicted as cuDNN's"),
        needed=(
            "--hf_assets_path: the folder of the tokenizer",
            "data set, steps, optimizer and learning rate, which no plan decides: append their options",
        ),
        notes=notes,
        files=known.files,
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
    """Return a shell script that writes its configuration function and starts the ranks. Raises Infeasible."""
    words, draft = program(job)
    return started_script(job, words, draft)


TARGET = Target(
    name="torchtitan",
    version=VERSION,
    title=TITLE,
    file_name="torchtitan.sh",
    write=write,
    table=COMMAND_LINE,
    first_line="#!/bin/sh",
    run="sh torchtitan.sh",
)
