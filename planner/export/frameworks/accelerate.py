"""Hugging Face accelerate: the YAML file of `accelerate launch --config_file`, with FSDP2 and its parallelism
config.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.export.degrees import masters_alone, to_fsdp_degrees
from planner.export.draft import Draft, Target
from planner.export.frameworks.accelerate_fields import TABLE, kind
from planner.export.job import ExportJob, require_legal
from planner.export.mapping import nested
from planner.export.mapping import write as settings_of
from planner.export.script import common_device_list, host_order_notes, run_line
from planner.export.yaml_text import yaml_text
from simulator.config.overlap_sites import tp_overlap_label
from simulator.config.plan import Plan
from topology.codec import JsonObject
from topology.errors import Infeasible

VERSION = "1.15.0"
TITLE = f"accelerate {VERSION}"
FILE = "accelerate.yaml"


def write(job: ExportJob) -> Draft:
    """Return the configuration. Raises Infeasible for pipelines and experts, which accelerate does not have."""
    plan = job.plan
    _refuse(plan)
    plan, sharding_notes = to_fsdp_degrees(plan, TITLE)
    job, types_notes = masters_alone(job, TITLE)
    if plan.dp_shard == 1 and plan.dp_replicate > 1 and plan.tp * plan.cp > 1:
        raise Infeasible(
            f"{TITLE} combines tensor or context parallelism with sharding only", remedy="plan with dp_shard > 1"
        )
    recompute = plan.recompute if plan.recompute in {"none", "full"} else "full"
    written = plan.with_(recompute=recompute, tp_overlap="none", ep_overlap="none")
    notes = require_legal(job.with_plan(written), "pytorch", TITLE)
    hosts = job.hosts()
    facts = job.with_plan(written).facts()
    if plan.offload != "none" and kind(facts) != "FSDP":
        raise Infeasible(f"{TITLE} moves sharded parameters to host memory only", remedy="plan with dp_shard > 1")
    settings: JsonObject = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": hosts.count,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "main_training_function": "main",
        "gpu_ids": common_device_list(hosts, TITLE) or "all",
        **settings_of(TABLE, facts),
    }
    if kind(facts) == "FSDP":
        settings |= {
            "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    machines = (
        ("--machine_rank, --main_process_ip and --main_process_port differ by host: pass them to accelerate launch",)
        if hosts.count > 1
        else ()
    )
    return Draft(
        body=yaml_text(nested(settings)),
        settings=settings,
        not_expressed=(*sharding_notes, *types_notes, *_not_expressed(job, plan, recompute)),
        needed=(*machines, *_program_needs(job, kind(facts))),
        run=run_line(job, ["accelerate", "launch", "--config_file", FILE, "YOUR_PROGRAM.py"]),
        notes=(*notes, *host_order_notes(hosts)),
        plan=written,
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


def _not_expressed(job: ExportJob, plan: Plan, recompute: str) -> Iterator[str]:
    """Return the settings of `plan` that the file cannot express; its recompute mode is `recompute`."""
    yield f"sequence length {job.question.workload.seq_len}: set it in the program"
    yield (
        f"micro batch {plan.micro_batch_size} and {job.micro_batches} accumulated: set them in the program "
        f"(per_device_train_batch_size, gradient_accumulation_steps)"
    )
    if plan.tp > 1 and plan.sequence_parallel:
        yield "sequence parallelism with tensor parallelism: the model's own tp_plan decides"
    if recompute != plan.recompute:
        yield f"recompute {plan.recompute!r}: accelerate recomputes whole blocks or nothing; written as full"
    if plan.tp_overlap != "none":
        yield f"tensor-parallel overlap {tp_overlap_label(plan.tp_overlap)}"
    if plan.ep_overlap != "none":
        yield "all-to-all of experts alongside compute"
    if job.question.runtime.compute_dtype == "float8":
        yield "the recipe of float8: set fp8_config"


def _program_needs(job: ExportJob, distributed: str) -> list[str]:
    """Return notes on types that the user's program decides: accelerate's own choices differ from the plan's."""
    runtime, needs = job.question.runtime, []
    if runtime.param_dtype != "float32":
        needs.append(
            f"the model loaded in {runtime.param_dtype}; mixed_precision stays no, as accelerate stores parameters in"
            " float32 with any other"
        )
    if distributed == "FSDP" and runtime.reduce_dtype != runtime.compute_dtype:
        # utils/dataclasses.py, set_mixed_precision: without a policy it reduces in the type of mixed precision.
        needs.append(
            f"gradients reduced in {runtime.reduce_dtype}, which no key says: Accelerator(fsdp_plugin="
            "FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=MixedPrecisionPolicy("
            f"param_dtype=torch.{runtime.activation_dtype}, reduce_dtype=torch.{runtime.reduce_dtype}, "
            f"output_dtype=torch.{runtime.activation_dtype})))"
        )
    return needs


TARGET = Target(name="accelerate", version=VERSION, title="accelerate", file_name=FILE, write=write, table=TABLE)
