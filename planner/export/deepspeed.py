"""DeepSpeed: the JSON file that `deepspeed.initialize` takes.

Keys: `deepspeed/runtime/constants.py`, `runtime/zero/config.py`, `runtime/tensor_parallel/config.py` of 0.19.8. JSON
has no comments, so the header is a section of its own, which DeepSpeed ignores.
"""

from __future__ import annotations

from typing import Any

from planner.export.degrees import to_zero_stage
from planner.export.draft import Draft, Target
from planner.export.job import ExportJob, require_legal
from planner.export.script import common_device_list, host_order_notes
from simulator.config.overlap_sites import tp_overlap_label
from topology.errors import Infeasible

VERSION = "0.19.8"
TITLE = f"DeepSpeed {VERSION}"
FILE = "deepspeed.json"


def write(job: ExportJob) -> Draft:
    """Return the configuration. Raises Infeasible for pipelines and experts, which need Python code instead of JSON."""
    plan, runtime = job.plan, job.question.runtime
    if plan.pp > 1:
        raise Infeasible(
            f"{TITLE} has no pipeline in its JSON",
            why=f"pp={plan.pp} needs a PipelineModule in your program",
            remedy="plan with pp 1, or --to megatron",
        )
    if plan.ep > 1:
        raise Infeasible(
            f"{TITLE} has no expert grid in its JSON for a model of your own",
            why=f"ep={plan.ep} needs its MoE layers in your program",
            remedy="plan with ep 1, or --to megatron",
        )
    # FSDP2 degrees become a ZeRO stage; legality is checked for the plan as it is written.
    stage = to_zero_stage(plan)
    written = plan.with_(
        zero_stage=stage,
        dp_replicate=plan.data_parallel,
        dp_shard=1,
        sequence_parallel=False,
        tp_overlap="none",
        recompute=plan.recompute if plan.recompute in {"none", "full"} else "full",
    )
    notes = require_legal(job.with_plan(written), "deepspeed", TITLE)
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    hybrid = stage == 3 and plan.zero_stage is None and plan.dp_replicate > 1
    if hybrid:
        zero["zero_hpz_partition_size"] = plan.dp_shard
    document: dict[str, Any] = {
        "train_batch_size": job.question.workload.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": job.micro_batches,
        "zero_optimization": zero,
    }
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(runtime.compute_dtype)
    if precision:
        document[precision] = {"enabled": True}
    if runtime.reduce_dtype in {"float32", "bfloat16"}:
        document["communication_data_type"] = {"float32": "fp32", "bfloat16": "bf16"}[runtime.reduce_dtype]
    if plan.tp > 1:
        document["tensor_parallel"] = {"autotp_size": plan.tp, "tp_overlap_comm": plan.tp_overlap != "none"}
    if plan.cp > 1:
        document["sequence_parallel_size"] = plan.cp
    hosts = job.hosts()
    devices = common_device_list(hosts, TITLE)
    placed = (f"start it with CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={devices}",) if devices else ()
    return Draft(
        body=document,
        settings=_flat(document),
        not_expressed=_not_expressed(job, hybrid=hybrid),
        needed=(
            f"a program that calls deepspeed.initialize(config={FILE!r}) and sets optimizer and learning rate",
            *placed,
        ),
        run=f"torchrun --nproc-per-node={hosts.ranks_per_host} YOUR_PROGRAM.py",
        notes=(*notes, *host_order_notes(hosts)),
    )


def _not_expressed(job: ExportJob, *, hybrid: bool) -> tuple[str, ...]:
    plan, runtime = job.plan, job.question.runtime
    not_expressed = [f"sequence length {job.question.workload.seq_len}: set it in the program"]
    if plan.zero_stage is None and plan.dp_shard > 1:
        not_expressed.append("FSDP2 is written as ZeRO, which is another implementation")
    if hybrid:
        not_expressed.append(
            f"{plan.dp_replicate} replicas of shards: gradients and optimizer are sharded over all ranks, and parameters "
            f"gathered among {plan.dp_shard} (ZeRO++ hpZ)"
        )
    if plan.sequence_parallel and plan.tp > 1:
        not_expressed.append("sequence parallelism with tensor parallelism: DeepSpeed's AutoTP has none")
    if plan.recompute != "none":
        not_expressed.append(f"recompute {plan.recompute!r}: call your model's gradient_checkpointing_enable()")
    if plan.cp > 1 and plan.cp_method not in {None, "all_to_all"}:
        not_expressed.append(f"context parallelism by {plan.cp_method}: DeepSpeed's is Ulysses, all-to-all over heads")
    if plan.tp_overlap != "none":
        not_expressed.append(
            f"tensor-parallel overlap {tp_overlap_label(plan.tp_overlap)}: written as tp_overlap_comm, which decides by itself where"
        )
    if runtime.compute_dtype == "float8":
        not_expressed.append("float8 products")
    if runtime.compile:
        not_expressed.append("torch.compile of the model: call engine.compile()")
    return tuple(not_expressed)


def _flat(document: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


TARGET = Target(name="deepspeed", version=VERSION, title="DeepSpeed", file_name=FILE, write=write)
