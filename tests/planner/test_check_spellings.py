"""Tools that spell Megatron-LM's flags or another tool's keys in their own way: what they say is what those say."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.configs.asked import Asked, ask
from planner.configs.formats.bridge import flags_of, precision_flags
from planner.configs.formats.configuration import CheckFlags, did_you_mean
from planner.export.job import ExportJob
from planner.export.mapping import NotStated
from planner.export.targets.registry import export, find_target
from tests.planner.test_check_diffs import patched
from topology.errors import UserError

TEST = """ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
TEST_TYPE: regular
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --max-position-embeddings: 1024
  --vocab-size: 50257
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --sequence-parallel: true
  --bf16: true
"""
PRIMUS = """modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: llama3.1_8B.yaml
    overrides:
      stderr_sink_level: DEBUG
      micro_batch_size: 2
      global_batch_size: 128
      seq_length: ${PRIMUS_SEQ_LENGTH:8192}
      tensor_model_parallel_size: ${PRIMUS_TP:1}
      recompute_granularity: "full"  # or less
      recompute_method: uniform
      recompute_num_layers: 1
"""
PRIMUS_TORCHTITAN = """modules:
  pre_trainer:
    framework: torchtitan
    config: pre_trainer.yaml
    model: llama3.1_8B.yaml
    overrides:
      training:
        local_batch_size: 4
        seq_len: 8192
      activation_checkpoint:
        mode: "none"
"""
RECIPE = '''"""Recipes."""
LONG: int = 16384


def llama3_8b_pretrain_16gpu_h100_bf16_config():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").get_model_config()
    cfg.model.tensor_model_parallel_size = 2  # within a node
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = LONG
    cfg.train.global_batch_size = 128
    cfg.train.micro_batch_size = 1
    cfg.model.recompute_granularity = None
    return cfg


def llama3_8b_pretrain_64gpu_h100_bf16_config():
    cfg = _with_global_batch_size(llama3_8b_pretrain_16gpu_h100_bf16_config(), 1024)
    return cfg
'''
VERL = """set -x
tp=${TP:-2}
ACTOR=(
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${tp}"
)
if [ "$NPU" = 1 ]; then
    ACTOR+=(actor_rollout_ref.actor.strategy=fsdp2)
fi
python3 -m verl.trainer.main_ppo model_engine=megatron \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    data.max_prompt_length=1024 \\
    data.max_response_length=3072 \\
    actor_rollout_ref.rollout.n=4 \\
    "${ACTOR[@]}"
"""


def asked(text: str, where: str, **flags: object) -> Asked:
    found = ask(text, where, CheckFlags(**flags))
    assert found.case is not None, (found.problems, found.questions)
    return found


@pytest.mark.parametrize(
    ("text", "where", "flags", "axes", "batch"),
    [
        (TEST, "model_config.yaml", {}, {"tp": 2, "pp": 2, "sequence_parallel": True}, (4, 32, 1024)),
        (PRIMUS, "a.yaml", {}, {"tp": 1, "zero_stage": 1, "recompute": "full"}, (2, 128, 8192)),
        (PRIMUS, "a.yaml", {"variables": (("PRIMUS_TP", "4"),)}, {"tp": 4, "sequence_parallel": True}, (2, 128, 8192)),
        (PRIMUS_TORCHTITAN, "a.yaml", {}, {"dp_shard": 8, "recompute": "none"}, (4, 32, 8192)),
        (
            RECIPE,
            "a.py",
            {"launch": "run_recipe.py --recipe llama3_8b_pretrain_64gpu_h100_bf16_config"},
            {"tp": 2, "pp": 2, "dp_replicate": 16, "zero_stage": 1},
            (1, 1024, 16384),
        ),
        # 16,384 tokens hold four answers of 4,096; a mini batch is 64 prompts with four answers each.
        (VERL, "a.sh", {}, {"tp": 2, "dp_replicate": 4, "zero_stage": 1, "sequence_parallel": True}, (4, 256, 4096)),
    ],
)
def test_another_spelling_says_the_same(text, where, flags, axes, batch) -> None:
    found = asked(text, where, **flags)

    plan, workload = found.case.plan, found.case.question.workload
    assert {axis: getattr(plan, axis) for axis in axes} == axes
    assert (plan.micro_batch_size, workload.global_batch_size, workload.seq_len) == batch


@pytest.mark.parametrize(
    ("text", "where", "flags", "change", "line"),
    [
        (TEST, "model_config.yaml", {}, {"tp": 4, "dp_replicate": 1}, "  --tensor-model-parallel-size: 4"),
        (
            PRIMUS,
            "a.yaml",
            {},
            {"tp": 2, "dp_replicate": 4, "sequence_parallel": True},
            "      tensor_model_parallel_size: 2",
        ),
        (PRIMUS_TORCHTITAN, "a.yaml", {}, {"recompute": "full"}, "        mode: full"),
        (
            RECIPE,
            "a.py",
            {"launch": "run_recipe.py --recipe llama3_8b_pretrain_16gpu_h100_bf16_config"},
            {"recompute": "full"},
            "    cfg.model.recompute_granularity = 'full'",
        ),
        (
            VERL,
            "a.sh",
            {},
            {"tp": 4, "dp_replicate": 2},
            '    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"',
        ),
    ],
)
def test_a_change_is_written_in_that_spelling(text, where, flags, change, line, tmp_path: Path) -> None:
    found = asked(text, where, **flags)
    after = found.case.plan.with_(**change)

    changed = patched(text, where, found.writer(where, CheckFlags(**flags)).diff(after), tmp_path)

    assert any(one.startswith(line) for one in changed.splitlines()), changed
    assert asked(changed, where, **flags).case.plan == after


def test_a_changed_shape_is_no_named_model() -> None:
    found = asked(f"{PRIMUS}      num_layers: 4\n", "a.yaml")

    assert found.case.question.model.layers == 4
    assert found.case.question.model.name == "a"


def test_several_recipes_are_a_question() -> None:
    with pytest.raises(NotStated, match="llama3_8b_pretrain_16gpu_h100_bf16_config"):
        ask(RECIPE, "a.py", CheckFlags())


def test_what_another_file_sets_makes_no_verdict() -> None:
    """61 layers do not spread over 4 stages, nor do two more, unless the other function says how."""
    text = RECIPE.replace("meta-llama/Meta-Llama-3-8B", "deepseek-ai/DeepSeek-V3")
    text = text.replace("pipeline_model_parallel_size = 2", "pipeline_model_parallel_size = 4")
    text = text.replace("    return cfg\n", "    _set_layout(cfg)\n    return cfg\n", 1)

    found = ask(text, "a.py", CheckFlags(launch="--recipe llama3_8b_pretrain_16gpu_h100_bf16_config"))

    assert (found.problems, found.case, found.stated) == ((), None, None)
    assert "_set_layout()" in found.questions[-1].what


@pytest.mark.parametrize(
    ("change", "why"),
    [("model_engine=veomni", "veomni"), ("model_engine=megatron actor_rollout_ref.actor.engine.tp=8", "engine")],
)
def test_another_engine_of_verl_is_not_read_as_this_one(change: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        ask(VERL.replace("model_engine=megatron", change), "a.sh", CheckFlags())


def test_a_rollout_that_does_not_divide_the_gpus_is_illegal() -> None:
    text = VERL.replace("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=3")
    text = text.replace("    ACTOR+=(actor_rollout_ref.actor.strategy=fsdp2)\n", "")

    assert "rollout" in ask(text, "a.sh", CheckFlags()).problems[0].message


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("  --recompute-granularity: full\n  --recompute-method: block\n  --recompute-num-layers: 2\n", "2 of the 6"),
        ("  --context-parallel-size: 2\n  --cp-comm-type: a2a+p2p\n", "a2a+p2p"),
        (
            "  --num-layers-per-virtual-pipeline-stage: 3\n  --microbatch-group-size-per-virtual-pipeline-stage: 5\n",
            "5",
        ),
    ],
)
def test_what_is_not_modelled_is_a_question_and_no_fault(line: str, why: str) -> None:
    found = ask(TEST + line, "model_config.yaml", CheckFlags())

    assert found.problems == ()
    assert why in found.questions[-1].what


@pytest.mark.parametrize(
    ("text", "where", "wrong", "right"),
    [
        (
            TEST + "  --recompute-granularty: full\n",
            "model_config.yaml",
            "--recompute-granularty",
            "--recompute-granularity",
        ),
        (PRIMUS + "      recompute_granularty: full\n", "a.yaml", "recompute_granularty", "recompute_granularity"),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest(text: str, where: str, wrong: str, right: str) -> None:
    configuration = ask(text, where, CheckFlags()).configuration

    assert wrong in configuration.unknown
    assert did_you_mean(configuration)[wrong] == right


@pytest.mark.parametrize(
    ("flags", "graphs"),
    [
        ("", (False, ())),
        ("--cuda-graph-impl none", (False, ())),
        ("--cuda-graph-impl transformer_engine", (True, ())),
        ("--cuda-graph-impl local --cuda-graph-modules attn moe_router", (True, ("attn", "moe_router"))),
        ("--cuda-graph-impl full_iteration", (True, ())),
        ("--external-cuda-graph --cuda-graph-scope attn", (True, ("attn",))),
        ("--enable-cuda-graph", (True, ())),
    ],
)
def test_cuda_graphs_of_megatron_are_read_in_all_their_spellings(flags: str, graphs: tuple[bool, tuple]) -> None:
    """megatron/training/arguments.py of 0.19.2: no list of modules is the whole layer."""
    batch = "--micro-batch-size 1 --global-batch-size 64"
    text = f"torchrun pretrain_gpt.py --tensor-model-parallel-size 2 {batch} {flags}\n"
    case = asked(text, "run.sh", gpus=8, model="llama3-8b", seq_len=4096).case
    runtime = case.question.runtime if case else None

    assert runtime is not None
    assert (runtime.cuda_graph, runtime.graph_scopes) == graphs


@pytest.mark.parametrize(
    ("flags", "word", "recipe"),
    [  # the name of the precision in megatron/bridge/training/mixed_precision.py
        ("", "bf16_mixed", ("bfloat16", "", (0, 0))),
        ("--fp8-format hybrid", "bf16_with_fp8_delayed_scaling_mixed", ("float8", "delayed", (0, 0))),
        (
            "--fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16",
            "bf16_with_fp8_current_scaling_mixed",
            ("float8", "tensorwise", (1, 1)),
        ),
        (
            "--fp8-format e4m3 --fp8-recipe blockwise",
            "bf16_with_fp8_subchannel_scaling_mixed",
            ("float8", "blockwise", (0, 0)),
        ),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "bf16_with_mxfp8_mixed", ("float8", "mxfp8", (0, 0))),
        ("--fp4-format e2m1 --fp4-recipe nvfp4", "bf16_with_nvfp4_mixed", ("float4", "nvfp4", (0, 0))),
    ],
)
def test_recipes_of_low_precision_are_read_and_written(flags: str, word: str, recipe: tuple) -> None:
    start = "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 4 --vocab-size 32000"
    start += " --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 64"
    named = " ".join(name if value is True else f"{name} {value}" for name, value in precision_flags(word).items())
    case, of_bridge = (
        asked(f"{start} {said}\n", "run.sh", gpus=8, cluster="8xB200").case for said in (f"--bf16 {flags}", named)
    )
    job = ExportJob(name="a run", plan=case.plan, question=case.question)
    again = asked(export(job, find_target("megatron")).text, "again.sh", cluster="8xB200").case

    for one in (case, of_bridge, again):
        runtime = one.question.runtime
        assert (runtime.compute_dtype, runtime.low_precision_recipe, runtime.wide_layers) == recipe
        assert one.question.legal(one.plan)


def test_fields_of_a_precision_go_before_what_its_name_means() -> None:
    named = {"mixed_precision": "bf16_with_fp8_current_scaling_mixed"}
    flags, _ = flags_of(named)
    without, _ = flags_of({**named, "mixed_precision.first_last_layers_bf16": False})

    assert flags["--first-last-layers-bf16"]
    assert "--first-last-layers-bf16" not in without
