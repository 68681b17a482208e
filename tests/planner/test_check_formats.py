"""Configurations of tools that have no export of ours: what they say, judged by sums, and changes as diffs of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from planner.configs.answer import check_text
from planner.configs.asked import Asked, ask
from planner.configs.formats.configuration import CheckFlags, NotAConfiguration
from planner.configs.formats.kinds import YAML_FORMATS
from simulator.runtimes.library import is_described
from tests.planner.test_check_diffs import patched

AXOLOTL = """base_model: NousResearch/Meta-Llama-3.1-8B
datasets:
  - path: mlabonne/FineTome-100k
sequence_len: 4096
gradient_accumulation_steps: 4
micro_batch_size: 2
bf16: auto
gradient_checkpointing: true  # or it will not fit
fsdp:
  - full_shard
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
"""
TORCHTUNE = """# tune run --nproc_per_node 8 full_finetune_distributed --config llama3_1/70B_full
tokenizer:
  max_seq_len: 2048
model:
  _component_: torchtune.models.llama3_1.llama3_1_70b
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
gradient_accumulation_steps: 3
enable_activation_checkpointing: True
fsdp_cpu_offload: True
compile: False
dtype: bf16
"""
LITGPT = """checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3.1-8B
precision: bf16-true
devices: 4
num_nodes: 2
train:
  global_batch_size: 64
  micro_batch_size: 4
  max_seq_length: 512
"""
NANOTRON = """model:
  dtype: bfloat16
  model_config:
    hidden_size: 2048
    intermediate_size: 8192
    num_attention_heads: 32
    num_hidden_layers: 16
    num_key_value_heads: 8
    max_position_embeddings: 8192
    tie_word_embeddings: true
    vocab_size: 128256
optimizer:
  zero_stage: 1
parallelism:
  dp: 4
  pp: 2
  pp_engine: 1f1b
  tp: 2
  tp_mode: REDUCE_SCATTER
tokens:
  batch_accumulation_per_replica: 2
  micro_batch_size: 3
  sequence_length: 4096
"""
GPT_NEOX = """# GPT-2 pretraining setup
{
   "pipe-parallel-size": 1,
   "model-parallel-size": 2,
   "num-layers": 32,
   "hidden-size": 4096,
   "num-attention-heads": 32,
   "seq-length": 2048,
   "max-position-embeddings": 2048,
   "pos-emb": "rotary",
   "no-weight-tying": true,
   "gpt_j_residual": true,
   "zero_optimization": {"stage": 1, "overlap_comm": True},
   "train_micro_batch_size_per_gpu": 1,
   "gradient_accumulation_steps": 2,
   "checkpoint-activations": true,
   "fp16": {"enabled": true},
}
"""
AUTOMODEL = """step_scheduler:
  global_batch_size: 256
  local_batch_size: 4
distributed:
  tp_size: 1
  ep_size: 8
  sequence_parallel: false
parallelizer:
  activation_checkpointing: true
model:
  config:
    pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B
  backend: {attn: te, dispatcher: hybridep, fake_balanced_gate: true, compile_attn: false}
dataset:
  seq_len: 4096
"""
MAXTEXT = """base_config: "base.yml"
model_name: "llama3.1-70b"  # shapes of configs/models
hardware: gpu
dcn_fsdp_parallelism: 2
ici_fsdp_parallelism: 8
per_device_batch_size: 2
max_target_length: 8192
remat_policy: full
"""
OLMO = """model:
  d_model: 4096
  n_heads: 32
  n_layers: 32
  mlp_hidden_size: 22016
  weight_tying: false
  rope: true
  include_bias: false
  layer_norm_type: rms
  layer_norm_with_affine: true
  attention_layer_norm: true
  norm_after: true
  activation_type: swiglu
  max_sequence_length: 4096
  vocab_size: 100278
  embedding_size: 100352
optimizer:
  name: adamw
activation_checkpointing: whole_layer
global_train_batch_size: 1024
device_train_microbatch_size: 2
precision: amp_bf16
fsdp:
  wrapping_strategy: by_block_and_size
  precision: mixed
"""
VERL = """# a step is a mini batch of prompts, each answered n times
actor_rollout_ref:
  model:
    path: Qwen/Qwen3-8B
  actor:
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 4
    fsdp_config:
      param_offload: false
  rollout:
    n: 4
    tensor_model_parallel_size: 2
data:
  train_batch_size: 256
  max_prompt_length: 1024
  max_response_length: 3072
trainer:
  n_gpus_per_node: 8
  nnodes: 1
"""
TEXTS = {
    "axolotl": AXOLOTL,
    "torchtune": TORCHTUNE,
    "litgpt": LITGPT,
    "nanotron": NANOTRON,
    "gpt-neox": GPT_NEOX,
    "nemo-automodel": AUTOMODEL,
    "maxtext": MAXTEXT,
    "olmo": OLMO,
    "verl": VERL,
}


def asked(framework: str, **flags: object) -> Asked:
    return ask(TEXTS[framework], "a.yaml", CheckFlags(**flags))


@pytest.mark.parametrize(
    ("framework", "parameters", "axes", "batch"),
    [  # parameters as published, or by the sum of the shapes; micro batch, sequences of a step, tokens of a sequence
        ("axolotl", 8.03e9, {"dp_shard": 8, "recompute": "full"}, (2, 64, 4096)),
        ("torchtune", 70.55e9, {"dp_shard": 8, "offload": "parameters", "recompute": "full"}, (2, 48, 2048)),
        ("litgpt", 8.03e9, {"dp_shard": 8, "recompute": "full"}, (4, 64, 512)),
        (
            "nanotron",
            1.236e9,
            {"dp_replicate": 4, "tp": 2, "pp": 2, "zero_stage": 1, "schedule": "1F1B"},
            (3, 24, 4096),
        ),
        # 12 h^2 + 13 h a layer, two matrices of 50,304 x h, and the last norm
        (
            "gpt-neox",
            32 * (12 * 4096**2 + 13 * 4096) + 2 * 50304 * 4096 + 2 * 4096,
            {"dp_replicate": 4, "tp": 2},
            (1, 8, 2048),
        ),
        ("nemo-automodel", 30.53e9, {"dp_shard": 8, "ep": 8, "recompute": "full"}, (4, 256, 4096)),
        ("maxtext", 70.55e9, {"dp_shard": 16, "dp_replicate": 1, "recompute": "full"}, (2, 32, 8192)),
        ("olmo", 7.30e9, {"dp_shard": 8, "recompute": "full"}, (2, 1024, 4096)),
        ("verl", 8.19e9, {"dp_shard": 8, "recompute": "full", "cp": 1}, (4, 256, 4096)),
    ],
)
def test_a_file_is_read_as_its_tool_reads_it(framework, parameters, axes, batch) -> None:
    found = asked(framework)

    assert found.configuration.framework == framework
    assert found.configuration.unknown == ()
    assert found.case is not None, (found.problems, found.questions)
    plan, question = found.case.plan, found.case.question
    assert question.model.parameters == pytest.approx(parameters, rel=2e-3)
    assert {axis: getattr(plan, axis) for axis in axes} == axes
    assert (plan.micro_batch_size, question.workload.global_batch_size, question.workload.seq_len) == batch
    assert question.problems(plan) == () or all(one.grade != "illegal" for one in question.problems(plan))


def test_automodels_backend_is_read_or_named() -> None:
    """components/models/common/utils.py: BackendConfig."""
    text = AUTOMODEL.replace("compile_attn: false", "te_fp8: {recipe: mxfp8}")
    found = ask(text, "a.yaml", CheckFlags())

    assert found.configuration.unknown == ("model.backend.te_fp8.recipe",)
    assert found.case.question.runtime.moe_dispatcher == "hybridep"
    assert found.case.question.workload.routing == "balanced"


def test_a_tool_with_a_description_is_predicted_by_it() -> None:
    for one in YAML_FORMATS:
        assert one.runtime == one.framework or not is_described(one.framework)


def test_every_tool_has_a_text_here() -> None:
    assert {one.framework for one in YAML_FORMATS} | {"verl"} == TEXTS.keys()
    for text in TEXTS.values():
        assert (
            sum(one.knows(dict(ask(text, "a.yaml", CheckFlags()).configuration.settings)) for one in YAML_FORMATS) <= 1
        )


@pytest.mark.parametrize(
    ("framework", "change", "key", "value"),
    [
        ("axolotl", {"recompute": "none"}, "gradient_checkpointing", False),
        ("torchtune", {"micro_batch_size": 1}, "batch_size", 1),
        ("litgpt", {"micro_batch_size": 2}, "train.micro_batch_size", 2),
        ("nanotron", {"recompute": "full"}, "parallelism.recompute_layer", True),
        ("gpt-neox", {"tp": 1, "dp_replicate": 8, "micro_batch_size": 1}, "model-parallel-size", None),
        ("nemo-automodel", {"micro_batch_size": 2}, "step_scheduler.local_batch_size", 2),
        ("maxtext", {"recompute": "selective-op"}, "remat_policy", "minimal_with_context"),
        ("olmo", {"dp_replicate": 2, "dp_shard": 4}, "fsdp.sharding_strategy", "HYBRID_SHARD"),
        ("verl", {"dp_shard": 4, "dp_replicate": 2}, "actor_rollout_ref.actor.fsdp_config.fsdp_size", 4),
    ],
)
def test_a_change_is_a_diff_of_the_file(framework, change, key, value, tmp_path: Path) -> None:
    found, flags = asked(framework), CheckFlags()
    diff = found.writer("a.yaml", flags).diff(found.case.plan.with_(**change))
    text = patched(TEXTS[framework], "a.yaml", diff, tmp_path)

    document = yaml.safe_load(text)
    for part in key.split("."):
        document = document.get(part) if document is not None else None
    assert document == value
    again = ask(text, "a.yaml", flags).case
    assert {name: getattr(again.plan, name) for name in change} == change
    assert again.question.workload == found.case.question.workload
    if "#" in TEXTS[framework]:
        assert "#" in text


ARGUMENTS = "per_device_train_batch_size: 1\nmodel_name_or_path: Qwen/Qwen2.5-7B\nbf16: true\n"
BRIDGE_PEFT = """from megatron.bridge.recipes.common import _peft_common

def llama3_8b_peft_config(peft_scheme="lora"):
    cfg = _peft_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B", load_weights=False).to_megatron_provider()
    cfg.peft.dim = 16
    cfg.model.seq_length = 4096
    cfg.train.global_batch_size = 8
    cfg.train.micro_batch_size = 1
    return cfg
"""
EVERY = ("all-linear",)
# What each tool's words mean: kind, rank, modules, frozen weights, dropout.
ADAPTERS = [
    (AXOLOTL + "adapter: qlora\nlora_r: 32\nlora_target_linear: true\n", ("lora", 32, EVERY, "nf4", 0.0)),
    (AXOLOTL + "adapter: lora\nlora_target_modules: [q_proj]\n", ("lora", 8, ("q_proj",), "", 0.0)),
    (
        TORCHTUNE.replace(
            "llama3_1_70b", "qlora_llama3_1_70b\n  lora_attn_modules: ['q_proj', 'output_proj']\n  lora_rank: 16"
        ),
        ("lora", 16, ("q_proj", "o_proj"), "nf4", 0.0),
    ),
    (LITGPT + "lora_r: 8\nquantize: bnb.nf4-dq\n", ("lora", 8, ("q_proj", "v_proj"), "nf4", 0.05)),
    (AUTOMODEL + "peft:\n  dim: 8\n  match_all_linear: true\n", ("lora", 8, EVERY, "", 0.0)),
    (ARGUMENTS + "finetuning_type: lora\nlora_target: all\nquantization_bit: 4\n", ("lora", 8, EVERY, "nf4", 0.0)),
    (ARGUMENTS + "finetuning_type: lora\n", ("lora", 8, EVERY, "bfloat16", 0.0)),
    (ARGUMENTS + "use_peft: true\nlora_r: 4\nuse_dora: true\n", ("dora", 4, ("q_proj", "v_proj"), "", 0.05)),
]


def described(found) -> tuple[object, ...]:
    one = found.case.question.runtime.adapter
    return (one.kind, one.rank, one.target_modules, one.base_weights, one.dropout)


@pytest.mark.parametrize(("text", "adapter"), ADAPTERS)
def test_adapters_of_every_tool_are_read_as_adapters(text: str, adapter: tuple[object, ...]) -> None:
    found = ask(text, "a.yaml", CheckFlags())

    assert described(found) == adapter
    assert found.configuration.unknown == ()


def test_adapters_take_a_part_of_the_memory_of_full_training() -> None:
    """8 bytes of gradients and moments, of four in all, go with what is not trained."""
    full, lora = (
        check_text(ARGUMENTS + more, "a.yaml", CheckFlags(gpus=1, seq_len=2048), search=False).found.estimate.memory
        for more in ("finetuning_type: full\n", "finetuning_type: lora\n")
    )

    assert lora.by_category["optimizer"] + lora.by_category["gradients"] < 0.02 * full.by_category["optimizer"]
    assert lora.peak_bytes.value < 0.4 * full.peak_bytes.value


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (AXOLOTL + "adapter: lora\nload_in_8bit: true\n", "load_in_8bit"),
        (AXOLOTL + "adapter: lora\nlora_modules_to_save: [embed_tokens]\n", "lora_modules_to_save"),
        (ARGUMENTS + "finetuning_type: freeze\n", "finetuning_type freeze"),
        (ARGUMENTS + "finetuning_type: lora\nlora_target: conv1\n", "conv1"),
    ],
)
def test_adapters_that_are_not_modelled_are_asked_about(text: str, what: str) -> None:
    found = check_text(text, "a.yaml", CheckFlags(), search=False)

    assert found.found is None
    assert what in found.questions[0].what


def test_a_recipe_of_megatron_bridge_has_its_adapters() -> None:
    found = ask(BRIDGE_PEFT, "llama3.py", CheckFlags(gpus=8))

    modules = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    assert described(found) == ("lora", 16, modules, "", 0.0)


def test_a_model_that_is_none_of_the_tool_s_own_is_asked_for() -> None:
    other = GPT_NEOX.replace('"pos-emb": "rotary"', '"pos-emb": "rotary", "mlp_type": "llama", "num_kv_heads": 8')

    assert "mlp_type" in ask(other, "a.yaml", CheckFlags()).questions[0].what
    assert "own_7b" in ask(TORCHTUNE.replace("llama3_1_70b", "own_7b"), "a.yaml", CheckFlags()).questions[0].what


def test_a_misspelt_key_is_not_understood() -> None:
    found = ask(AXOLOTL + "gradient_acumulation_steps: 2\n", "a.yaml", CheckFlags())

    assert found.configuration.unknown == ("gradient_acumulation_steps",)


MUON = {
    "a.yaml": (TORCHTUNE.replace("AdamW", "Muon"), "refuses what is no matrix"),
    "a.json": ('{"train_batch_size": 8, "bf16": {"enabled": true}, "optimizer": {"type": "Muon"}}', "DeepSpeed's Muon"),
    "a.sh": (
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py --optimizer muon --num-layers 4 --hidden-size 1024 --bf16"
            " --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 --global-batch-size 8"
        ),
        "whole matrices",
    ),
}


@pytest.mark.parametrize("name", MUON)
def test_muon_is_refused_where_it_is_not_modelled(name: str) -> None:
    text, said = MUON[name]
    model = None if name == "a.sh" else "llama3-8b"

    assert said in str(check_text(text, name, CheckFlags(model=model, cluster="dgx-h100"), search=False))


@pytest.mark.parametrize(("version", "legal"), [("fsdp_version: 1\n", True), ("", True), ("fsdp_version: 2\n", False)])
def test_paged_optimizers_run_on_the_flat_parameters_of_fsdp1(version, legal) -> None:
    """Optimizers of bitsandbytes do not update DTensors (its issue 1633), which FSDP1, accelerate's default, has none
    of.
    """
    text = AXOLOTL.replace("fsdp_config:", f"optimizer: paged_adamw_32bit\n{version}fsdp_config:")
    case = ask(text, "a.yaml", CheckFlags(gpus=8)).case

    assert case.question.legal(case.plan) is legal
    assert any("FSDP1" in line for line in case.assumed) is legal


def test_axolotl_hands_accelerate_the_recomputation_of_fsdp() -> None:
    """`setup_fsdp_envs` sets FSDP_ACTIVATION_CHECKPOINTING; PyYAML reads 4_096 as a number."""
    text = AXOLOTL.replace("gradient_checkpointing: true", "weight_decay: 0.0").replace("len: 4096", "len: 4_096")
    wrapped = ask(f"{text}  activation_checkpointing: true\n", "a.yaml", CheckFlags(gpus=8))

    assert ask(text, "a.yaml", CheckFlags(gpus=8)).case.plan.recompute == "none"
    assert (wrapped.case.plan.recompute, wrapped.case.question.workload.seq_len) == ("full", 4096)
    assert wrapped.configuration.unknown == ()
    without = wrapped.writer("a.yaml", CheckFlags(gpus=8)).diff(wrapped.case.plan.with_(recompute="none"))
    assert "\n-  activation_checkpointing: true" in without


@pytest.mark.parametrize(
    ("keys", "types"),
    [
        ("bf16: true\n", ("float32", "bfloat16", "float32")),
        ("bf16: true\ntorch_dtype: bfloat16\n", ("bfloat16", "bfloat16", "bfloat16")),
        ("bf16: true\ndtype: auto\n", ("bfloat16", "bfloat16", "bfloat16")),
        ("dtype: bfloat16\nfsdp: full_shard\n", ("bfloat16", "bfloat16", "bfloat16")),
        ("bf16: true\ntorch_dtype: bfloat16\nfsdp: full_shard\n", ("float32", "bfloat16", "bfloat16")),
        ("bf16: true\ntorch_dtype: bfloat16\nuse_peft: true\n", ("float32", "bfloat16", "float32")),
        ("finetuning_type: full\npure_bf16: true\n", ("bfloat16", "bfloat16", "bfloat16")),
    ],
)
def test_parameters_have_the_type_in_which_a_trainer_s_script_loads_them(
    keys: str, types: tuple[str, str, str], tmp_path: Path
) -> None:
    """TRL's `dtype` (trainer/model_config.py) and LLaMA-Factory's `pure_bf16`; under mixed precision accelerate's FSDP
    makes what is trained float32 (utils/fsdp_utils.py), as PEFT makes adapters. A diff keeps the types.
    """
    text = ARGUMENTS.replace("bf16: true\n", keys) + "max_length: 2048\n"
    found = ask(text, "a.yaml", CheckFlags(gpus=8))
    runtime, plan = found.case.question.runtime, found.case.plan
    sharded = plan.with_(dp_replicate=1, dp_shard=8, reshard_after_forward=True)
    diff = found.writer("a.yaml", CheckFlags(gpus=8)).diff(sharded)
    edited = patched(text, "a.yaml", diff, tmp_path) if diff else text
    again = ask(edited, "a.yaml", CheckFlags(gpus=8)).case.question.runtime

    assert (runtime.param_dtype, runtime.compute_dtype, runtime.reduce_dtype) == types
    assert (again.param_dtype, again.compute_dtype) == types[:2]


ALST = """deepspeed_config:
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 4
parallelism_config:
  parallelism_config_dp_shard_size: 2
  parallelism_config_sp_size: 2
  parallelism_config_sp_backend: deepspeed
"""  # examples/accelerate_configs/alst_ulysses_4gpu.yaml of TRL


def test_sequence_parallelism_over_deepspeed_takes_ranks_from_data_parallelism(tmp_path: Path) -> None:
    """`ParallelismConfig.total_size` of accelerate 1.15 is the product of all degrees."""
    flags = CheckFlags(model="llama3-8b", seq_len=8192, global_batch=8, micro_batch=1)
    found = ask(ALST, "a.yaml", flags)
    plan = found.case.plan
    wider = plan.with_(dp_replicate=1, cp=4)
    diff = found.writer("a.yaml", flags).diff(wider)

    assert (plan.dp_replicate, plan.cp, plan.cp_method, plan.zero_stage) == (2, 2, "all_to_all", 3)
    assert found.configuration.unknown == ()
    assert ask(patched(ALST, "a.yaml", diff, tmp_path), "a.yaml", flags).case.plan.cp == 4


def test_nodes_that_a_recipe_states_are_those_it_is_checked_on() -> None:
    """As examples/llm_benchmark of NeMo AutoModel state `benchmark.num_nodes`."""
    found = ask(AUTOMODEL + "benchmark:\n  num_nodes: 8\n", "a.yaml", CheckFlags())

    assert found.case.plan.gpus == 64
    assert any("8 on each of the 8 nodes that the file states" in line for line in found.case.assumed)


def test_attention_that_writes_its_scores_is_named_as_not_read() -> None:
    found = ask(ARGUMENTS + "max_length: 2048\nattn_implementation: eager\n", "a.yaml", CheckFlags(gpus=8))

    assert found.configuration.unknown == ("attn_implementation",)


def test_a_trainer_over_megatron_is_not_taken_for_another() -> None:
    """examples/megatron_bridge of LLaMA-Factory: no data parallelism of transformers, whatever its other keys say."""
    text = "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 1\ntensor_model_parallel_size: 2\n"
    with pytest.raises(NotAConfiguration, match="Megatron-Bridge or MCA"):
        ask(f"{text}mixed_precision: bf16_mixed\n", "a.yaml", CheckFlags())


@pytest.mark.parametrize(
    "line",
    [
        "deepspeed --module openrlhf.cli.train_sft --zero_stage 2 --pretrain meta-llama/Meta-Llama-3-8B",
        "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B-Instruct --deepspeed zero2",
        "megatron sft --load Qwen2.5-7B-mcore --tensor_model_parallel_size 2",
    ],
)
def test_commands_of_tools_with_defaults_of_their_own_are_not_taken_for_others(line: str) -> None:
    with pytest.raises(NotAConfiguration, match="OpenRLHF and ms-swift"):
        ask(f"{line}\n", "train.sh", CheckFlags(gpus=8))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("key", "what", "least"), [("offload_optimizer", "optimizer", 1), ("offload_param", "parameters", 3)]
)
def test_what_deepspeed_cannot_move_to_the_host_at_a_stage_is_said(stage: int, key: str, what: str, least: int) -> None:
    """DeepSpeed 0.19.8, runtime/zero/config.py: parameters move at stage 3 only; the optimizer that moves is ZeRO's."""
    zero = {"stage": stage, key: {"device": "cpu"}}
    file = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    flags = CheckFlags(model="llama3.2-1b", gpus=8, seq_len=2048, global_batch=8)
    found = ask(json.dumps(file), "ds.json", flags)

    assert found.case is not None
    assert found.case.plan.offload == (what if stage >= least else "none")
    assert any(f"{key} changes nothing" in line for line in found.assumed) is (stage < least)


FLOAT8 = """[model]
name = "llama3"
flavor = "8B"
converters = ["quantize.linear.float8"]
[training]
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 8
[compile]
enable = true
[quantize.linear.float8]
filter_fqns = ["output", "attention.wk", "router.gate"]
"""


def test_torchtitan_says_by_which_recipe_and_which_products_are_in_float8() -> None:
    """Of 0.2.2, components/quantization/float8.py: tensors unless a recipe is named, and never with its gather;
    utils.py: a module stays as it is whose name has a part of the list in it, the output one only if it is named.
    """

    def asked(more: str) -> Asked:
        return ask(f"{FLOAT8}{more}", "a.toml", CheckFlags(gpus=8))

    plain, rows = asked(""), asked('recipe_name = "rowwise"\n')
    both = asked('recipe_name = "rowwise"\nenable_fsdp_float8_all_gather = true\n')
    without = ask(FLOAT8.replace('"output", ', ""), "a.toml", CheckFlags(gpus=8))

    assert plain.case.question.runtime.low_precision_recipe == "tensorwise"
    assert rows.case.question.runtime.low_precision_recipe == "rowwise"
    assert plain.configuration.unknown == ()
    assert [line for line in plain.assumed if "filter_fqns" in line] == [
        "quantize.linear.float8.filter_fqns: attention.wk counted in float8, like all products of layers"
    ]
    assert any("has no output" in line for line in without.assumed)
    assert both.case is None
    assert "both set" in str(both.problems)
