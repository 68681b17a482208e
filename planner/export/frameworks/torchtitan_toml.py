"""torchtitan up to 0.2.2: a TOML file, read by its ConfigManager from `--job.config_file`."""

from __future__ import annotations

from collections.abc import Iterator

import tomli_w

from planner.export.draft import Draft, Target
from planner.export.frameworks.torchtitan import TITLE, prepared
from planner.export.frameworks.torchtitan_fields import RECOMPUTE, ROTATE, TOML
from planner.export.frameworks.torchtitan_models import FLAVOR_MODULE, toml_model
from planner.export.job import ExportJob
from planner.export.mapping import nested
from planner.export.mapping import write as settings_of
from planner.export.script import common_device_list, host_order_notes, run_line, torchrun_words
from simulator.config.plan import Plan

VERSION = "0.2.2"
FILE = "torchtitan.toml"


def write(job: ExportJob) -> Draft:
    """Return the configuration, which torchrun starts. Raises Infeasible."""
    title = f"{TITLE} {VERSION}"
    job, not_expressed, notes = prepared(job, title)
    known = toml_model(job.question.model, job.question.workload, VERSION)
    settings = {
        "job.description": job.name,
        "model.name": known.module,
        "model.flavor": known.flavor,
        **settings_of(TOML, job.facts()),
    }
    if known.files:
        settings["experimental.custom_import"] = FLAVOR_MODULE
    hosts = job.hosts()
    devices = common_device_list(hosts, title) if hosts.same_devices else ""
    placed: tuple[str, ...] = ()
    if hosts.devices_matter and not hosts.same_devices:
        placed = ("hosts use different GPUs in a different order: export to slurm or skypilot, which can express that",)
    return Draft(
        body=tomli_w.dumps(nested(settings)),
        settings=settings,
        not_expressed=(*not_expressed, *_not_expressed(job, title)),
        needed=(
            "model.hf_assets_path: the folder of the tokenizer",
            "training.dataset, training.steps, optimizer and learning rate, which no plan decides",
            *placed,
        ),
        run=run_line(
            job, [*torchrun_words(hosts, node_rank="0", address="FIRST_HOST"), *_arguments()], devices=devices
        ),
        notes=(*notes, *host_order_notes(hosts)),
        files=known.files,
    )


def _not_expressed(job: ExportJob, title: str) -> Iterator[str]:
    plan, runtime = job.plan, job.question.runtime
    if plan.cp > 1 and (plan.cp_method or "all_gather") not in ROTATE:
        yield f"context parallelism by {plan.cp_method}: {TITLE} has ring and all-gather"
    if plan.tp > 1 and not plan.sequence_parallel:
        yield f"tensor parallelism without sequence parallelism: {title} always uses both"
    if not _uses_mixed_precision(plan) and runtime.param_dtype != runtime.compute_dtype:
        # distributed/utils.py, maybe_enable_amp: "only supported when FSDP/HSDP/CP is enabled"
        dtype_text = f"in {runtime.param_dtype}, in which parameters are stored; 0.3.0 does as planned"
        note = f"with tensor or pipeline parallelism alone {title} computes {dtype_text}"
        yield f"computing in {runtime.compute_dtype}: {note}"
    if plan.recompute not in RECOMPUTE:
        yield f"recompute {plan.recompute!r} is not a mode of {title}; written as none"


def _uses_mixed_precision(plan: Plan) -> bool:
    """Return whether this version computes in mixed precision: with FSDP, or by autocast without parallelism."""
    return plan.dp_shard * plan.cp > 1 or (plan.tp == 1 and plan.pp == 1)


def _arguments() -> list[str]:
    return ["-m", "torchtitan.train", "--job.config_file", FILE]


def program(job: ExportJob) -> tuple[list[str], Draft]:
    """Return the arguments of torchrun, and the draft of the file that they name."""
    return _arguments(), write(job)


TARGET = Target(name="torchtitan", version=VERSION, title=TITLE, file_name=FILE, write=write, table=TOML)
