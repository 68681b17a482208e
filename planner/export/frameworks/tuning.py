"""Files of fine-tuning tools, with or without adapters: torchtune, axolotl, LLaMA-Factory, NeMo AutoModel.

Keys: recipes/configs/llama3_1/8B_{full,lora,qlora}*.yaml of torchtune 0.6 (@bd2a0fc7); src/axolotl/utils/schemas of
axolotl 0.18 (@067b021c), and what its validation.py refuses; hparams/ of LLaMA-Factory 0.9 (@ff6d4d12) with
TrainingArguments of transformers 5.3; recipes/, components/distributed/config.py and components/_peft/lora.py of NeMo
AutoModel (@36044ad3). `planner.configs.formats` reads the same keys. A setting without a key is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from planner.export.degrees import to_fsdp_degrees
from planner.export.draft import Draft, Target
from planner.export.job import ExportJob, require_legal
from planner.export.mapping import Settings, nested
from planner.export.script import run_line
from planner.export.yaml_text import yaml_text
from simulator.config.adapter import ALL_LINEAR, DORA, LORA, MODULES, Adapter
from simulator.config.hf_config import hub_name
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.savers import ACTIVATION_OFFLOAD, CHUNKED_LOSS, LINEAR_LOSS, OPTIMIZER_IN_BACKWARD
from topology.errors import Infeasible

PLAIN_LOSS = "torch.nn.CrossEntropyLoss"
# Names of classes in torchtune's and AutoModel's recipes.
TORCH = {
    "adamw": "torch.optim.AdamW",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit",
    "pagedadamw": "bitsandbytes.optim.PagedAdamW",
    "pagedadamw8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "adafactor": "torch.optim.Adafactor",
    "lion": "bitsandbytes.optim.Lion",
    "sgd": "torch.optim.SGD",
}
# transformers, training_args.py: OptimizerNames.
HUGGING_FACE = {
    "adamw": "adamw_torch_fused",
    "adamw8bit": "adamw_bnb_8bit",
    "pagedadamw": "paged_adamw_32bit",
    "pagedadamw8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "lion": "lion_32bit",
    "sgd": "sgd",
}
_MATRICES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
# Families whose builders torchtune names `<family>_<size>`, with an `lora_` and a `qlora_` of each
# (torchtune/models/*/_model_builders.py of 0.6).
_BUILDERS = re.compile(r"(llama2|llama3|llama3_1|llama3_2|llama3_3|mistral|gemma|qwen2)_\d+(_\d+)?b")


def trained_modules(adapter: Adapter, title: str) -> set[str]:
    """Return the names in transformers of the matrices with adapters. Raises Infeasible."""
    if ALL_LINEAR in adapter.target_modules:
        return set(_MATRICES.values())
    parts = {part for word in adapter.target_modules for part in MODULES[word.lower()]}
    if unknown := sorted(parts - _MATRICES.keys()):
        raise Infeasible(f"{title} has no adapters on {', '.join(unknown)}", why=f"known: {', '.join(_MATRICES)}")
    return {_MATRICES[part] for part in parts}


def torchtune_model(name: str) -> str:
    """Return the builder of a model. Raises Infeasible if torchtune has none."""
    word = re.sub(r"[^a-z0-9]+", "_", name.rpartition("/")[2].casefold()).strip("_")
    if not (found := _BUILDERS.fullmatch(word)):
        raise Infeasible(
            f"torchtune has no builder of {name[:60]} by its name",
            why="known: Llama 2 to 3.3, Mistral 7B, Gemma and Qwen2",
            remedy="--to axolotl, or --to llama-factory",
        )
    return f"torchtune.models.{found[1]}.{word}"


def _refuse_others(title: str, what: str, asked: Iterable[str], known: Iterable[str]) -> None:
    """Raise Infeasible for settings without keys in a tool's file."""
    if lacking := [word for word in asked if word not in set(known)]:
        raise Infeasible(
            f"no file of {title} is written with {what} {', '.join(lacking)}",
            why=f"written are {', '.join(known) or 'none'}",
        )


def _savers_of(runtime: Runtime) -> set[str]:
    return {*runtime.savers, *({LINEAR_LOSS} if "linear_loss" in runtime.fused else ())}


def _written(job: ExportJob, title: str, axes: tuple[str, ...], savers: tuple[str, ...]) -> tuple[ExportJob, list[str]]:
    """Return the job as a tool can write it, and the settings that are left out. Raises Infeasible."""
    adapter, runtime = job.question.runtime.adapter, job.question.runtime
    plan, notes = to_fsdp_degrees(job.plan, title)
    degrees = [axis for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep") if getattr(plan, axis) > 1]
    _refuse_others(title, "the degrees", degrees, axes)
    _refuse_others(title, "the savers", sorted(_savers_of(runtime)), savers)
    _refuse_others(title, "products in", [runtime.compute_dtype], ("bfloat16", "float32"))
    if adapter is not None:
        _refuse_others(title, "adapters of kind", [adapter.kind], (LORA, DORA))
        _refuse_others(title, "frozen weights in", [adapter.base_weights or "bfloat16"], ("bfloat16", "float32", "nf4"))
    recompute = plan.recompute if plan.recompute in {"none", "full"} else "full"
    left_out = [*notes]
    if recompute != plan.recompute:
        left_out.append(f"recompute {plan.recompute!r}: {title} recomputes whole blocks or nothing; written as full")
    if plan.offload == "optimizer" or (plan.offload != "none" and not _sharded(plan)):
        raise Infeasible(f"{title} moves sharded parameters to host memory with the optimizer, or nothing")
    for what, word in (("tensor-parallel products", plan.tp_overlap), ("experts' all-to-all", plan.ep_overlap)):
        if word != "none":
            left_out.append(f"overlap {word} of {what}: {title} has no key for it")
    job = job.with_plan(plan.with_(recompute=recompute, tp_overlap="none", ep_overlap="none"))
    return job, [*left_out, *require_legal(job, "pytorch", title)]


def _optimizer(job: ExportJob, title: str, words: dict[str, str]) -> str:
    name = job.question.runtime.optimizer
    _refuse_others(title, "the optimizer", [name], words)
    return words[name]


def _torch_words(plan: Plan) -> dict[str, str]:
    """Return the optimizers' classes. bitsandbytes' do not update DTensors (its issue 1633), torchao's do."""
    if plan.dp_shard == plan.tp == plan.cp == 1:
        return TORCH
    kept = {name: word for name, word in TORCH.items() if not word.startswith("bitsandbytes.")}
    return {**kept, "adamw8bit": "torchao.optim.AdamW8bit"}


def _reduction(plan: Plan, runtime: Runtime, title: str, word: str) -> list[str]:
    """Return what is left out of a plan whose gradients are reduced in another type than the tool's."""
    differs = plan.data_parallel * plan.cp > 1 and runtime.reduce_dtype != word
    return [f"gradients reduced in {runtime.reduce_dtype}: {title} reduces them in {word} then"] if differs else []


def _sharded(plan: Plan) -> bool:
    """Return whether FSDP2 shards parameters: it does so over the ranks of a sequence, too."""
    return plan.dp_shard * plan.cp > 1


def _replicas_alone(plan: Plan, title: str) -> bool:
    """Return whether ranks are replicas. Raises Infeasible with other mesh axes, which require sharding."""
    replicas = plan.dp_shard == 1 and plan.dp_replicate > 1
    if replicas and plan.tp * plan.cp > 1:
        raise Infeasible(
            f"{title} combines tensor or context parallelism with sharding only", remedy="plan with dp_shard > 1"
        )
    return replicas


def _packed(adapter: Adapter | None) -> bool:
    return adapter is not None and adapter.packed


def _draft(job: ExportJob, settings: Settings, left_out: Iterable[str], run: list[str], *needed: str) -> Draft:
    data = (
        "data set, epochs and learning rate, which no plan decides: add their keys; keys of other releases may differ, "
        "and this file was not tried with the tool"
    )
    return Draft(
        body=yaml_text(nested(settings)),
        settings=settings,
        not_expressed=tuple(left_out),
        needed=(data, *needed),
        run=run_line(job, run),
    )


# --- torchtune --------------------------------------------------------------------------------------------------------


def write_torchtune(job: ExportJob) -> Draft:
    """Return the configuration of a recipe: `full_finetune_distributed`, or `lora_finetune_distributed`."""
    title, adapter = "torchtune 0.6", job.question.runtime.adapter
    # Tensor parallelism requires a plan of modules for each model (`tensor_parallel_plan`), which is not written.
    axes = ("dp_shard",) if adapter else ("dp_replicate", "dp_shard")
    in_backward = () if adapter or job.micro_batches > 1 else (OPTIMIZER_IN_BACKWARD,)  # else its recipes refuse it
    job, left_out = _written(job, title, axes, (CHUNKED_LOSS, ACTIVATION_OFFLOAD, *in_backward))
    plan, runtime = job.plan, job.question.runtime
    if runtime.param_dtype != runtime.compute_dtype:
        left_out.append(f"parameters in {runtime.param_dtype}: dtype names one type for parameters and products")
    left_out += _reduction(plan, runtime, title, runtime.compute_dtype)
    component = torchtune_model(job.question.model.name)
    settings: Settings = {"model._component_": component}
    if adapter:
        module, _, name = component.rpartition(".")
        settings["model._component_"] = f"{module}.{'qlora' if _packed(adapter) else 'lora'}_{name}"
        words = trained_modules(adapter, title)
        mlp = {"gate_proj", "up_proj", "down_proj"}
        if words & mlp not in (set(), mlp):
            raise Infeasible(f"{title} adapts all matrices of the feed-forward network or none: {', '.join(words)}")
        attention = sorted("output_proj" if word == "o_proj" else word for word in words - mlp)
        settings |= {
            "model.lora_attn_modules": attention,
            "model.apply_lora_to_mlp": bool(words & mlp),
            "model.lora_rank": adapter.rank,
            "model.lora_dropout": adapter.dropout,
            "model.use_dora": adapter.kind == DORA,
        }
    elif plan.gpus > 1:
        settings |= {"data_parallel_replicate_dim": plan.dp_replicate, "data_parallel_shard_dim": plan.dp_shard}
    in_pieces = CHUNKED_LOSS in runtime.savers
    settings |= {
        "tokenizer.max_seq_len": job.question.workload.seq_len,
        "batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": job.micro_batches,
        "enable_activation_checkpointing": plan.recompute == "full",
        "enable_activation_offloading": ACTIVATION_OFFLOAD in runtime.savers,
        "optimizer_in_bwd": OPTIMIZER_IN_BACKWARD in runtime.savers,
        "optimizer._component_": _optimizer(job, title, _torch_words(plan)),
        "loss._component_": "torchtune.modules.loss.LinearCrossEntropyLoss" if in_pieces else PLAIN_LOSS,
        "dtype": {"bfloat16": "bf16", "float32": "fp32"}[runtime.compute_dtype],
        "compile": bool(runtime.compile),
    }
    if plan.gpus > 1:
        settings |= {
            "fsdp_cpu_offload": plan.offload == "parameters",
            "fsdp_reshard_after_forward": plan.reshard_after_forward is not False,
        }
    recipe = "lora_finetune" if adapter else "full_finetune"
    where = "distributed" if plan.gpus > 1 else "single_device"
    ranks = [f"--nproc_per_node={min(plan.gpus, job.question.cluster.gpus_per_node)}"] if plan.gpus > 1 else []
    run = ["tune", "run", *ranks, f"{recipe}_{where}", "--config", "torchtune.yaml"]
    return _draft(job, settings, left_out, run, "tokenizer, checkpointer and dataset of the recipe's own example")


# --- Hugging Face's trainers ------------------------------------------------------------------------------------------


def write_axolotl(job: ExportJob) -> Draft:
    """Return axolotl's file, which `axolotl train` starts under accelerate."""
    title, adapter = "axolotl 0.18", job.question.runtime.adapter
    axes = ("dp_replicate", "dp_shard", "tp", "cp")
    away = (ACTIVATION_OFFLOAD,) if job.plan.recompute != "none" else ()  # axolotl has this with checkpoints only
    job, left_out = _written(job, title, axes, (LINEAR_LOSS, *away))
    plan, runtime = job.plan, job.question.runtime
    _replicas_alone(plan, title)
    held = "float32" if _sharded(plan) else runtime.compute_dtype
    if runtime.param_dtype != held and adapter is None:
        left_out.append(f"parameters in {runtime.param_dtype}: {title} holds them in {held} then")
    left_out += _reduction(plan, runtime, title, runtime.compute_dtype)
    words = {**HUGGING_FACE}
    if plan.tp > 1:
        words = {name: word for name, word in words.items() if not word.endswith("8bit")}
    elif _sharded(plan):  # bitsandbytes' optimizer does not run on DTensors; torchao's does
        words["adamw8bit"] = "adamw_torch_8bit"
    settings: Settings = {
        "base_model": hub_name(job.question.model.name),
        "sequence_len": job.question.workload.seq_len,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": job.micro_batches,
        "gradient_checkpointing": plan.recompute == "full",
        "bf16": runtime.compute_dtype == "bfloat16",
        "optimizer": _optimizer(job, title, words),
        "torch_compile": bool(runtime.compile),
    }
    settings |= {"gradient_checkpointing_kwargs.use_reentrant": False} if plan.recompute == "full" else {}
    settings |= {"tensor_parallel_size": plan.tp} if plan.tp > 1 else {}
    if plan.sequence_parallel and plan.tp > 1:
        left_out.append("sequence parallelism: transformers' plan of each model says where it is used")
    if plan.cp > 1:  # requires flash-attn's own kernels
        settings |= {"context_parallel_size": plan.cp, "attn_implementation": "flash_attention_2"}
    if _sharded(plan):
        settings |= {
            "fsdp_version": 2,
            "dp_shard_size": plan.dp_shard,
            "fsdp_config.reshard_after_forward": plan.reshard_after_forward is not False,
            "fsdp_config.offload_params": plan.offload == "parameters",
            "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        }
        settings |= {"dp_replicate_size": plan.dp_replicate} if plan.dp_replicate > 1 else {}
    if adapter:
        every = trained_modules(adapter, title)
        settings |= {
            "adapter": "qlora" if _packed(adapter) else "lora",
            "load_in_4bit": _packed(adapter),
            "lora_r": adapter.rank,
            "lora_alpha": 2 * adapter.rank,
            "lora_dropout": adapter.dropout,
            "lora_target_modules": sorted(every),
            "peft_use_dora": adapter.kind == DORA,
        }
    if LINEAR_LOSS in _savers_of(runtime):
        settings |= {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True}
    settings |= {"activation_offloading": True} if ACTIVATION_OFFLOAD in runtime.savers else {}
    scale = ("lora_alpha, which axolotl asks for: twice the rank here",) if adapter else ()
    return _draft(job, settings, left_out, ["axolotl", "train", "axolotl.yaml"], *scale)


def write_factory(job: ExportJob) -> Draft:
    """Return LLaMA-Factory's file: TrainingArguments with its own words for adapters."""
    title, adapter = "LLaMA-Factory 0.9", job.question.runtime.adapter
    job, left_out = _written(job, title, ("dp_replicate", "dp_shard"), (LINEAR_LOSS,))
    plan, runtime = job.plan, job.question.runtime
    if plan.dp_shard > 1 and plan.dp_replicate > 1:
        raise Infeasible(f"{title} has no key for replicas of FSDP", remedy="plan with dp_replicate 1")
    # The tool refuses it together with mixed precision, under which FSDP would make the parameters float32.
    pure = adapter is None and runtime.param_dtype == runtime.compute_dtype == "bfloat16"
    left_out += _reduction(plan, runtime, title, runtime.compute_dtype if plan.dp_shard > 1 else runtime.param_dtype)
    frozen = "" if adapter is None else adapter.base_weights or runtime.param_dtype
    if frozen not in {"", "nf4", runtime.compute_dtype}:
        left_out.append(f"frozen weights in {frozen}: {title} loads them in {runtime.compute_dtype}")
    settings: Settings = {
        "model_name_or_path": hub_name(job.question.model.name),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora" if adapter else "full",
        "cutoff_len": job.question.workload.seq_len,
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": job.micro_batches,
        "gradient_checkpointing": plan.recompute == "full",
        "bf16": runtime.compute_dtype == "bfloat16" and not pure,
        "optim": _optimizer(job, title, HUGGING_FACE),
        "torch_compile": bool(runtime.compile),
        "enable_liger_kernel": LINEAR_LOSS in _savers_of(runtime),
        "disable_gradient_checkpointing": plan.recompute == "none",
        "use_reentrant_gc": False,
    }
    settings |= {"pure_bf16": True} if pure else {}
    if plan.dp_shard > 1:
        settings |= {
            "fsdp": "full_shard auto_wrap" + (" offload" if plan.offload == "parameters" else ""),
            "fsdp_config.version": 2,
            "fsdp_config.reshard_after_forward": plan.reshard_after_forward is not False,
        }
    if adapter:
        settings |= {
            "lora_rank": adapter.rank,
            "lora_target": ",".join(sorted(trained_modules(adapter, title))),
            "lora_dropout": adapter.dropout,
            "use_dora": adapter.kind == DORA,
        }
        settings |= {"quantization_bit": 4, "quantization_type": "nf4"} if _packed(adapter) else {}
    return _draft(job, settings, left_out, ["llamafactory-cli", "train", "llama_factory.yaml"], "template of the model")


# --- NeMo AutoModel ---------------------------------------------------------------------------------------------------


def write_automodel(job: ExportJob) -> Draft:
    """Return AutoModel's file, for its FSDP2 or, if nothing is sharded, DDP: its mesh requires sharding."""
    title, adapter = "NeMo AutoModel", job.question.runtime.adapter
    job, left_out = _written(job, title, ("dp_replicate", "dp_shard", "tp", "cp"), ())
    plan, runtime = job.plan, job.question.runtime
    left_out += _reduction(plan, runtime, title, "float32" if _sharded(plan) else runtime.param_dtype)
    replicas = _replicas_alone(plan, title)
    settings: Settings = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "model._target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "model.pretrained_model_name_or_path": hub_name(job.question.model.name),
        "model.torch_dtype": {"bfloat16": "bf16"}.get(runtime.param_dtype, runtime.param_dtype),
        "step_scheduler.local_batch_size": plan.micro_batch_size,
        "step_scheduler.global_batch_size": job.question.workload.global_batch_size,
        "packed_sequence.packed_sequence_size": job.question.workload.seq_len,
        "distributed.strategy": "ddp" if replicas else "fsdp2",
        "distributed.tp_size": plan.tp,
        "distributed.cp_size": plan.cp,
        "distributed.activation_checkpointing": plan.recompute == "full",
        "optimizer._target_": _optimizer(job, title, _torch_words(plan)),
        "compile.enabled": bool(runtime.compile),
    }
    if not replicas:
        settings |= {
            "distributed.dp_replicate_size": plan.dp_replicate,
            "distributed.sequence_parallel": bool(plan.sequence_parallel) and plan.tp > 1,
        }
    if _sharded(plan):
        settings |= {"distributed.reshard_after_forward": plan.reshard_after_forward is not False}
    if plan.offload == "parameters":
        settings |= {"distributed.offload_policy._target_": "torch.distributed.fsdp.CPUOffloadPolicy"}
    if adapter:
        settings |= {
            "peft._target_": "nemo_automodel.components._peft.lora.PeftConfig",
            "peft.target_modules": sorted(trained_modules(adapter, title)),
            "peft.dim": adapter.rank,
            "peft.dropout": adapter.dropout,
            "peft.dropout_position": "pre",  # of adapters' inputs, as it is costed; the default is outputs
            "peft.use_dora": adapter.kind == DORA,
        }
        settings |= {"quantization.load_in_4bit": True} if _packed(adapter) else {}
    ranks = f"--nproc-per-node={min(plan.gpus, job.question.cluster.gpus_per_node)}"
    return _draft(job, settings, left_out, ["automodel", "automodel.yaml", ranks], "dataset of the tool's own example")


def _target(name: str, version: str, title: str, file: str, write: Callable[[ExportJob], Draft]) -> Target:
    return Target(name=name, version=version, title=title, file_name=file, write=write)


TUNING: tuple[Target, ...] = (
    _target("torchtune", "0.6", "torchtune", "torchtune.yaml", write_torchtune),
    _target("axolotl", "0.18", "axolotl", "axolotl.yaml", write_axolotl),
    _target("llama-factory", "0.9", "LLaMA-Factory", "llama_factory.yaml", write_factory),
    _target("automodel", "2025", "NeMo AutoModel", "automodel.yaml", write_automodel),
)
