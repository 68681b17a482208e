"""torchtitan up to 0.2.2: a TOML file, read by its ConfigManager from `--job.config_file`."""

from __future__ import annotations

import shlex
from typing import Any

import tomli_w

from planner.export.degrees import to_fsdp_degrees
from planner.export.draft import Draft, Target
from planner.export.job import ExportJob, require_legal
from planner.export.schema import shipped_model
from planner.export.script import common_device_list, host_order_notes, torchrun_words
from planner.export.torchtitan import (
    ROTATE,
    TITLE,
    overlap_not_expressed,
    parallelism,
    stage_modules,
    training,
    uses_async,
)
from simulator.config.plan import Plan

VERSION = "0.2.2"
FILE = "torchtitan.toml"
# `selective_ac_option`: every second block, or by operator (distributed/activation_checkpoint.py).
RECOMPUTE = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "selective": {"mode": "selective", "selective_ac_option": "2"},
    "selective-op": {"mode": "selective", "selective_ac_option": "op"},
}


def write(job: ExportJob) -> Draft:
    """Return the configuration, which torchrun starts. Raises Infeasible."""
    title = f"{TITLE} {VERSION}"
    fsdp, sharding_notes = to_fsdp_degrees(job.plan, title)
    job = job.with_plan(fsdp)
    notes = require_legal(job, "torchtitan", title)
    known = shipped_model("torchtitan", VERSION, job.question.model)
    degrees, not_expressed = parallelism(job)
    plan = job.plan
    if plan.cp > 1:
        method = plan.cp_method or "all_gather"
        if method in ROTATE:
            degrees["context_parallel_rotate_method"] = ROTATE[method]
        else:
            not_expressed = (*not_expressed, f"context parallelism by {method}: {TITLE} has ring and all-gather")
    if uses_async(plan):
        degrees["enable_async_tensor_parallel"] = True
    if plan.tp > 1 and not plan.sequence_parallel:
        not_expressed = (*not_expressed, f"tensor parallelism without sequence parallelism: {title} always uses both")
    if not _uses_mixed_precision(plan) and job.question.runtime.param_dtype != job.question.runtime.compute_dtype:
        # distributed/utils.py, maybe_enable_amp: "only supported when FSDP/HSDP/CP is enabled"
        dtype_text = f"in {job.question.runtime.param_dtype}, in which parameters are stored; 0.3.0 does as planned"
        note = f"with tensor or pipeline parallelism alone {title} computes {dtype_text}"
        not_expressed = (*not_expressed, f"computing in {job.question.runtime.compute_dtype}: {note}")
    modules = stage_modules(job, "output")
    if modules:
        degrees["module_fqns_per_model_part"] = modules
    document: dict[str, Any] = {
        "job": {"description": job.name},
        "model": {"name": known["module"], "flavor": known["flavor"]},
        "training": training(job),
        "parallelism": degrees,
        "activation_checkpoint": {"mode": "none"} | RECOMPUTE.get(plan.recompute, {}),
        "compile": {"enable": job.question.runtime.compile, "components": ["model", "loss"]},
    }
    if plan.recompute not in RECOMPUTE:
        not_expressed = (*not_expressed, f"recompute {plan.recompute!r} is not a mode of {title}; written as none")
    hosts = job.hosts()
    started = shlex.join(torchrun_words(hosts, node_rank="0", address="FIRST_HOST"))
    if hosts.count > 1:
        started += f" (--node-rank 0 to {hosts.count - 1})"
    devices = common_device_list(hosts, title) if hosts.same_devices else ""
    placed = (f"start it with CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={devices}",) if devices else ()
    if hosts.devices_matter and not hosts.same_devices:
        placed = ("hosts use different GPUs in a different order: export to slurm or skypilot, which can express that",)
    return Draft(
        body=tomli_w.dumps(document),
        settings={f"{section}.{key}": value for section, table in document.items() for key, value in table.items()},
        not_expressed=(*sharding_notes, *not_expressed, *overlap_not_expressed(plan)),
        needed=(
            "model.hf_assets_path: the folder of the tokenizer",
            "training.dataset, training.steps, optimizer and learning rate, which no plan decides",
            *placed,
        ),
        run=f"{started} -m torchtitan.train --job.config_file {FILE}",
        notes=(*notes, *host_order_notes(hosts)),
    )


def _uses_mixed_precision(plan: Plan) -> bool:
    """Return whether this version computes in mixed precision: with FSDP, or by autocast without parallelism."""
    return plan.dp_shard * plan.cp > 1 or (plan.tp == 1 and plan.pp == 1)


def program(job: ExportJob) -> tuple[list[str], Draft]:
    """Return the arguments of torchrun, and the draft of the file that they name."""
    return ["-m", "torchtitan.train", "--job.config_file", FILE], write(job)


TARGET = Target(
    name="torchtitan",
    version=VERSION,
    title=TITLE,
    file_name=FILE,
    write=write,
)
