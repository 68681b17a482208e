"""Megatron-LM: arguments of `pretrain_gpt.py`, model included, in a script that starts it under torchrun.

Flags: `megatron/training/arguments.py` and the dataclasses it reads, as megatron-core 0.19.2 ships them. Its default
rank order tp-cp-ep-dp-pp names the fastest axis first (`megatron/core/parallel_state.py`), which is that of
`rank_grid`.
"""

from __future__ import annotations

from typing import Any

from planner.export.degrees import to_zero_stage
from planner.export.draft import Draft, Target
from planner.export.job import ExportJob, require_legal
from planner.export.script import (
    MASTER_ADDRESS,
    NODE_RANK,
    NODE_RANK_VALUE,
    command,
    device_lines,
    export_lines,
    host_order_notes,
    torchrun_words,
)
from simulator.config.model import Model
from simulator.config.overlap_sites import tp_overlap_label
from simulator.config.plan import Plan

VERSION = "0.19.2"
TITLE = f"Megatron-LM (megatron-core {VERSION})"
PROGRAM = "pretrain_gpt.py"
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
CONTEXT = {"ring": "p2p", "all_gather": "all_gather", "all_to_all": "a2a"}
CONNECTIONS = "Megatron-LM requires it with tensor or context parallelism: kernels then run in launch order"
# Megatron-LM requires it below Blackwell only, which schedules the kernels of several queues in order.
BLACKWELL = 100


def _flags(values: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that are set: values other than False and None."""
    return {flag: value for flag, value in values.items() if value is not None and value is not False}


def model_flags(model: Model) -> dict[str, Any]:
    """Return the flags of the model's shape; True stands for a flag without a value."""
    moe, latent = model.moe, model.latent
    flags: dict[str, Any] = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn,
        "--num-attention-heads": model.heads,
        "--group-query-attention": latent is None and model.kv_heads < model.heads,
        "--num-query-groups": model.kv_heads if latent is None and model.kv_heads < model.heads else None,
        "--kv-channels": None if latent else model.head_dim,
        "--vocab-size": model.vocab,
        "--normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "--position-embedding-type": "rope" if model.rotary else "learned_absolute",
        "--swiglu": model.gated_mlp,
        "--disable-bias-linear": not model.mlp_bias,
        "--add-qkv-bias": model.qkv_bias and not model.mlp_bias,
        "--qk-layernorm": model.qk_norm,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
    }
    if latent:
        flags |= {
            "--multi-latent-attention": True,
            "--q-lora-rank": latent.q_lora_rank or None,
            "--kv-lora-rank": latent.kv_lora_rank,
            "--qk-head-dim": latent.qk_nope_head_dim,
            "--qk-pos-emb-head-dim": latent.qk_rope_head_dim,
            "--v-head-dim": latent.v_head_dim,
        }
    if moe:
        routed = [int(kind.sparse) for kind in model.layer_kinds]
        flags |= {
            "--num-experts": moe.experts,
            "--moe-router-topk": moe.experts_per_token,
            "--moe-ffn-hidden-size": moe.ffn,
            "--moe-shared-expert-intermediate-size": moe.shared_ffn or None,
            "--moe-layer-freq": None if all(routed) else str(routed).replace(" ", ""),  # its parser accepts no blanks
            "--moe-grouped-gemm": True,
            "--moe-token-dispatcher-type": "alltoall",
        }
    return _flags(flags)


def parallel_flags(job: ExportJob) -> dict[str, Any]:
    """Return the flags of degrees, batch, schedule, recompute and dtypes."""
    plan, runtime = job.plan, job.question.runtime
    stage = to_zero_stage(plan)
    fully = stage in SHARDING
    overlaps = stage >= 1 and plan.data_parallel * plan.cp > 1
    uneven = bool(plan.layers_per_stage) and plan.pp > 1
    low = {"bfloat16": "--bf16", "float16": "--fp16", "float8": "--bf16"}.get(runtime.compute_dtype, "")
    flags: dict[str, Any] = {
        "--tensor-model-parallel-size": plan.tp,
        "--sequence-parallel": plan.sequence_parallel and plan.tp > 1,
        "--pipeline-model-parallel-size": plan.pp,
        "--num-virtual-stages-per-pipeline-rank": plan.virtual_stages
        if plan.virtual_stages > 1 and not uneven
        else None,
        "--pipeline-model-parallel-layout": pipeline_layout(plan.layers_per_stage) if uneven else None,
        "--context-parallel-size": plan.cp,
        "--cp-comm-type": CONTEXT[plan.cp_method or "ring"] if plan.cp > 1 else None,
        "--expert-model-parallel-size": plan.ep if job.question.model.moe else None,
        "--expert-tensor-parallel-size": _expert_tp(plan) if job.question.model.moe else None,
        "--moe-expert-capacity-factor": plan.capacity_factor,
        "--moe-pad-expert-input-to-capacity": plan.capacity_factor is not None,
        "--micro-batch-size": plan.micro_batch_size,
        "--global-batch-size": job.question.workload.global_batch_size,
        "--seq-length": job.question.workload.seq_len,
        "--max-position-embeddings": max(job.question.workload.seq_len, job.question.model.max_positions),
        "--use-distributed-optimizer": stage >= 1,
        "--overlap-grad-reduce": overlaps,
        "--overlap-param-gather": overlaps,
        "--use-megatron-fsdp": fully,
        "--data-parallel-sharding-strategy": SHARDING.get(stage),
        "--num-distributed-optimizer-instances": plan.dp_replicate
        if plan.zero_stage is None and fully and plan.dp_replicate > 1
        else None,
        "--ckpt-format": "fsdp_dtensor" if fully else None,
        "--no-gradient-accumulation-fusion": fully,
        "--recompute-granularity": "full"
        if plan.recompute == "full"
        else "selective"
        if plan.recompute == "selective"
        else None,
        "--recompute-method": "uniform" if plan.recompute == "full" else None,
        "--recompute-num-layers": 1 if plan.recompute == "full" else None,
        "--tp-comm-overlap": plan.tp_overlap != "none",
        "--grad-reduce-in-bf16": runtime.reduce_dtype == "bfloat16",
        "--fp8-format": "hybrid" if runtime.compute_dtype == "float8" else None,
    }
    if low:
        flags[low] = True
    return _flags(flags)


def _expert_tp(plan: Plan) -> int:
    """Return the tensor-parallel degree of experts: without sequence parallelism, they are sharded too."""
    return 1 if plan.sequence_parallel else plan.tp


def pipeline_layout(layers: tuple[int, ...]) -> str:
    """Return the stages in Megatron-LM's layout notation: E embedding, t layer, L loss, | between stages."""
    stages = ["t" * count for count in layers]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return "|".join(stages)


def flag_words(flags: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for flag, value in flags.items():
        words += [flag] if value is True else [flag, str(value)]
    return words


def program(job: ExportJob) -> tuple[list[str], Draft]:
    """Return the arguments of torchrun, and a draft of what they set. Raises Infeasible."""
    not_expressed = []
    if job.plan.recompute not in {"none", "full", "selective"}:
        not_expressed.append(
            f"recompute {job.plan.recompute!r}: written as selective, which recomputes core attention only"
        )
        job = job.with_plan(job.plan.with_(recompute="selective"))
    notes = require_legal(job, "megatron-lm", TITLE)
    plan, model, runtime = job.plan, job.question.model, job.question.runtime
    flags = model_flags(model) | parallel_flags(job)
    if plan.zero_stage is None and plan.dp_shard > 1:
        not_expressed.append("FSDP2 is written as Megatron-FSDP, which is another implementation")
    if plan.recompute_per_stage:
        not_expressed.append(
            f"recompute per stage ({', '.join(plan.recompute_per_stage)}): one mode holds for all stages"
        )
    if plan.tp_overlap not in {"none", "ring"}:
        not_expressed.append(
            f"tensor-parallel overlap {tp_overlap_label(plan.tp_overlap)}: written as --tp-comm-overlap, which takes rings"
        )
    if (
        runtime.param_dtype == "bfloat16" and job.question.framework.name != "megatron-lm"
    ):  # Megatron-LM's own meaning of it
        not_expressed.append("parameters stored in bfloat16 only: Megatron-LM keeps float32 copies in its optimizer")
    if runtime.compile:
        not_expressed.append("torch.compile of the model: Megatron-LM compiles single functions only")
    not_expressed += _model_not_expressed(model)
    if runtime.optimizer not in {"adam", "adamw"}:
        not_expressed.append(f"optimizer {runtime.optimizer}: left at Adam")
    return [PROGRAM, *flag_words(flags)], Draft(
        body="",
        settings=flags,
        not_expressed=tuple(not_expressed),
        needed=(
            f"{PROGRAM} of a Megatron-LM checkout",
            "data, tokenizer, learning rate, iterations and checkpoints, which no plan decides: append their flags",
            "numbers of the model that cost nothing, such as --rotary-base, --norm-epsilon and the router's losses",
        ),
        notes=notes,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": CONNECTIONS} if needs_one_connection(job) else {},
    )


def _model_not_expressed(model: Model) -> list[str]:
    """Return what of the model the flags of pretrain_gpt.py cannot express."""
    not_expressed = []
    if model.windowed_layers:
        not_expressed.append(
            f"sliding window of {model.sliding_window} in {model.windowed_layers} layers: add --window-size"
        )
    if model.norms_per_layer != 2 or model.qk_norm_wide:
        not_expressed.append(
            f"the norms of {model.family}: Megatron-LM has two a layer, and per-head ones on queries and keys"
        )
    if model.parallel_residual:
        not_expressed.append("attention and feed-forward in parallel: Megatron-LM runs one after the other")
    if model.attention_out_bias != model.mlp_bias or model.head_bias:
        not_expressed.append("biases on some projections only: Megatron-LM has them on all or none")
    if model.gated_mlp and model.family.startswith("gemma"):
        not_expressed.append("the GELU in its gates: written as --swiglu, which costs the same")
    if model.multi_token_layers:
        not_expressed.append(f"{model.multi_token_layers} multi-token prediction layers: add --mtp-num-layers")
    return not_expressed


def needs_one_connection(job: ExportJob) -> bool:
    plan = job.plan
    early = job.question.cluster.slowest_kind.compute_capability < BLACKWELL
    return early and (plan.tp > 1 or plan.cp > 1) and to_zero_stage(plan) not in SHARDING


def write(job: ExportJob) -> Draft:
    """Return a shell script. Raises Infeasible."""
    words, draft = program(job)
    hosts = job.hosts()
    devices, reasons = device_lines(hosts, NODE_RANK_VALUE)
    queue = export_lines(draft.environment, dict.fromkeys(draft.environment, "1"))
    started = torchrun_words(hosts, node_rank=NODE_RANK, address=MASTER_ADDRESS)
    return Draft(
        body=f'set -eu\n{queue}{devices}exec {command([*started, *words])} "$@"\n',
        settings=draft.settings,
        not_expressed=draft.not_expressed,
        needed=draft.needed,
        notes=(*draft.notes, *host_order_notes(hosts)),
        environment=draft.environment | reasons,
    )


TARGET = Target(
    name="megatron",
    version=VERSION,
    title="Megatron-LM",
    file_name="megatron.sh",
    write=write,
    first_line="#!/bin/sh",
)
