"""Hugging Face accelerate: the YAML file of `accelerate launch --config_file`, with FSDP2 and its parallelism config.

Keys: `commands/config/config_args.py` (ClusterConfig) and `commands/launch.py` of 1.15.0. Its mesh axes are
dp_replicate, dp_shard, cp, sp, tp, the last fastest (`parallelism_config.py`).
"""

from __future__ import annotations

from typing import Any

from planner.export.degrees import to_fsdp_degrees
from planner.export.draft import Draft, Target
from planner.export.job import ExportJob, require_legal
from planner.export.script import common_device_list, host_order_notes
from planner.export.yaml_text import yaml_text
from simulator.config.overlap_sites import tp_overlap_label
from simulator.config.plan import Plan
from topology.errors import Infeasible

VERSION = "1.15.0"
TITLE = f"accelerate {VERSION}"
FILE = "accelerate.yaml"
PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float8": "fp8", "float32": "no"}
ROTATE = {"ring": "alltoall", "all_gather": "allgather"}


def write(job: ExportJob) -> Draft:
    """Return the configuration. Raises Infeasible for pipelines and experts, which accelerate does not have."""
    plan, runtime = job.plan, job.question.runtime
    _refuse(plan)
    plan, sharding_notes = to_fsdp_degrees(plan, TITLE)
    if plan.dp_shard == 1 and plan.dp_replicate > 1 and plan.tp * plan.cp > 1:
        raise Infeasible(
            f"{TITLE} combines tensor or context parallelism with sharding only", remedy="plan with dp_shard > 1"
        )
    recompute = plan.recompute if plan.recompute in {"none", "full"} else "full"
    written = plan.with_(recompute=recompute, tp_overlap="none")
    notes = require_legal(job.with_plan(written), "pytorch", TITLE)
    hosts = job.hosts()
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "num_machines": hosts.count,
        "num_processes": plan.gpus,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "main_training_function": "main",
        "mixed_precision": PRECISION[runtime.compute_dtype],
        "gpu_ids": common_device_list(hosts, TITLE) or "all",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": plan.reshard_after_forward is not False,
            "fsdp_activation_checkpointing": recompute == "full",
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": plan.dp_replicate,
            "parallelism_config_dp_shard_size": plan.dp_shard,
            "parallelism_config_tp_size": plan.tp,
            "parallelism_config_cp_size": plan.cp,
        },
    }
    if plan.dp_shard * plan.tp * plan.cp == 1:  # replicas only: nothing to shard, so no FSDP
        document["distributed_type"] = "MULTI_GPU" if plan.dp_replicate > 1 else "NO"
        del document["fsdp_config"], document["parallelism_config"]
    if plan.cp > 1:
        document["parallelism_config"]["parallelism_config_cp_comm_strategy"] = ROTATE[plan.cp_method or "all_gather"]
    if runtime.compile:
        document["dynamo_config"] = {"dynamo_backend": "inductor"}
    settings = {key: value for key, value in document.items() if not isinstance(value, dict)}
    for section in ("fsdp_config", "parallelism_config", "dynamo_config"):
        settings |= {f"{section}.{key}": value for key, value in document.get(section, {}).items()}
    machines = (
        ("--machine_rank, --main_process_ip and --main_process_port differ by host: pass them to accelerate launch",)
        if hosts.count > 1
        else ()
    )
    return Draft(
        body=yaml_text(document),
        settings=settings,
        not_expressed=(*sharding_notes, *_not_expressed(job, plan, recompute)),
        needed=machines,
        run=f"accelerate launch --config_file {FILE} YOUR_PROGRAM.py",
        notes=(*notes, *host_order_notes(hosts)),
    )


def _refuse(plan: Plan) -> None:
    for axis, what in (("pp", "pipeline"), ("ep", "expert")):
        if getattr(plan, axis) > 1:
            raise Infeasible(
                f"{TITLE} has no {what} parallelism",
                why=f"the plan has {axis}={getattr(plan, axis)}",
                remedy=f"plan with {axis} 1, or --to torchtitan",
            )
    if plan.cp_method == "all_to_all" and plan.cp > 1:
        raise Infeasible(f"{TITLE} splits heads for context parallelism only with DeepSpeed", remedy="--to deepspeed")


def _not_expressed(job: ExportJob, plan: Plan, recompute: str) -> list[str]:
    """Return what the file cannot express of `plan`, which is written with recompute mode `recompute`."""
    not_expressed = [f"sequence length {job.question.workload.seq_len}: set it in the program"]
    not_expressed.append(
        f"micro batch {plan.micro_batch_size} and {job.micro_batches} accumulated: set them in the program "
        f"(per_device_train_batch_size, gradient_accumulation_steps)"
    )
    if plan.tp > 1 and plan.sequence_parallel:
        not_expressed.append("sequence parallelism with tensor parallelism: the model's own tp_plan decides")
    if recompute != plan.recompute:
        not_expressed.append(
            f"recompute {plan.recompute!r}: accelerate recomputes whole blocks or nothing; written as full"
        )
    if plan.tp_overlap != "none":
        not_expressed.append(f"tensor-parallel overlap {tp_overlap_label(plan.tp_overlap)}")
    if job.question.runtime.compute_dtype == "float8":
        not_expressed.append("the recipe of float8: set fp8_config")
    if job.question.runtime.param_dtype != "float32":
        not_expressed.append(f"parameters stored in {job.question.runtime.param_dtype}: load the model in that type")
    return not_expressed


TARGET = Target(name="accelerate", version=VERSION, title="accelerate", file_name=FILE, write=write)
