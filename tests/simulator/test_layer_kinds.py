"""What every layer of a network is, and how many of each kind every stage holds: against a count layer by layer."""

from dataclasses import replace

import pytest

from simulator.columns.plan_table import plan_table
from simulator.config.hf_config import load_model, model_from_config, shipped_models
from simulator.config.model import LayerKind, Model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.pipeline.stages import rank_of_stage, stage_layers, stage_layout
from simulator.runtimes.library import runtime_spec

DENSE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 24,
}
SPARSE = {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LISTED = ["dense", "sparse", "sparse", "dense"] * 6
MIXED = ["full_attention", "sliding_attention", "full_attention"] * 8

# What transformers' classes make of each config, layer by layer: is it sparse, has it a window.
# Qwen3MoeDecoderLayer, DeepseekV3DecoderLayer, Llama4TextDecoderLayer, Qwen2Config, Gemma2Config, Gemma3TextConfig.
CONFIGS = {
    "sparse step": (
        {**SPARSE, "model_type": "qwen3_moe", "decoder_sparse_step": 2},
        lambda i: (i + 1) % 2 == 0,
        lambda _: False,
    ),
    "listed dense": (
        {**SPARSE, "model_type": "qwen3_moe", "mlp_only_layers": [0, 7, 8, 20], "decoder_sparse_step": 3},
        lambda i: i not in {0, 7, 8, 20} and (i + 1) % 3 == 0,
        lambda _: False,
    ),
    "first dense": (
        {**SPARSE, "model_type": "llama", "first_k_dense_replace": 3, "moe_layer_freq": 2},
        lambda i: i >= 3 and i % 2 == 0,
        lambda _: False,
    ),
    "interleaved": (
        {**SPARSE, "model_type": "llama", "interleave_moe_layer_step": 2},
        lambda i: i in range(1, 24, 2),
        lambda _: False,
    ),
    "types": (
        {**SPARSE, "model_type": "qwen3_moe", "mlp_layer_types": LISTED},
        lambda i: LISTED[i] == "sparse",
        lambda _: False,
    ),
    "qwen2 windows": (
        {**DENSE, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 20},
        lambda _: False,
        lambda i: i >= 20,
    ),
    "qwen2_moe windows": (
        {**SPARSE, "model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 9},
        lambda _: True,
        lambda i: (i + 1) % 2 == 1 and i < 9,
    ),
    "gemma2 windows": ({**DENSE, "model_type": "gemma2"}, lambda _: False, lambda i: (i + 1) % 2 == 1),
    "gemma3 windows": (
        {**DENSE, "model_type": "gemma3_text", "sliding_window_pattern": 6},
        lambda _: False,
        lambda i: (i + 1) % 6 != 0,
    ),
    "listed windows": (
        {**DENSE, "model_type": "gemma2", "layer_types": MIXED},
        lambda _: False,
        lambda i: MIXED[i] == "sliding_attention",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_says_what_each_layer_is(name: str) -> None:
    config, sparse, slides = CONFIGS[name]
    model = model_from_config(config, name=name)

    assert [kind.sparse for kind in model.layer_kinds] == [sparse(i) for i in range(24)]
    assert [kind.window > 0 for kind in model.layer_kinds] == [slides(i) for i in range(24)]
    assert model.moe_layers == sum(map(sparse, range(24)))
    assert model.windowed_layers == sum(map(slides, range(24)))


@pytest.mark.parametrize("name", shipped_models())
def test_shipped_networks_count_their_layers(name: str) -> None:
    model = load_model(name)

    assert len(model.layer_kinds) == model.layers
    assert model.dense_layers == sum(not kind.sparse for kind in model.layer_kinds)
    assert model.parameters - model.embedding_parameters - model.head_parameters == sum(
        model.moe_layer_parameters if kind.sparse else model.dense_layer_parameters for kind in model.layer_kinds
    ) + (model.norm_parameters if model.final_norm else 0)


def test_numbers_alone_put_dense_layers_first_and_spread_windows() -> None:
    deepseek, gemma = load_model("deepseek-v3"), load_model("gemma2-9b")

    assert replace(deepseek, moe=replace(deepseek.moe, dense_layer_ids=())).layer_kinds == deepseek.layer_kinds
    assert replace(gemma, sliding_layers=tuple(range(0, 42, 2))).layer_kinds == gemma.layer_kinds
    assert load_model("llama3-8b").layer_kinds == (LayerKind(sparse=False, window=0),) * 32


def test_a_network_cut_short_keeps_the_kinds_of_its_first_layers() -> None:
    model = model_from_config(CONFIGS["listed windows"][0], name="gemma2")

    assert replace(model, layers=5).layer_kinds == model.layer_kinds[:5]


def test_a_number_that_contradicts_the_named_layers_is_refused() -> None:
    deepseek = load_model("deepseek-v3")

    with pytest.raises(ValueError, match="named"):
        replace(deepseek.moe, dense_layers=2)


# --- stages -----------------------------------------------------------------------------------------------------------

PLANS = [
    Plan(pp=4),
    Plan(pp=3, virtual_stages=2, schedule="Interleaved1F1B"),
    Plan(pp=2, virtual_stages=2, schedule="ZBVZeroBubble"),
    Plan(pp=4, layers_per_stage=(1, 9, 10, 4)),
]
MODELS = {
    **{name: model_from_config(config, name=name) for name, (config, _, _) in CONFIGS.items()},
    **{name: load_model(name) for name in ("deepseek-v3", "deepseek-v2-lite", "qwen3-30b-a3b", "llama3-8b")},
}


def by_hand(model: Model, plan: Plan, runtime: str) -> list[tuple[int, int]]:
    """Return (dense, sparse) layers of every pipeline rank, dealing out the layers one by one."""
    counts = stage_layers(model.layers, plan, runtime_spec(runtime).pipeline)
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    held = [[0, 0] for _ in range(plan.pp)]
    for index, stage in enumerate(stage_of):
        held[rank_of_stage(stage, plan.pp, plan.schedule or "")][model.layer_kinds[index].sparse] += 1
    return [(dense, sparse) for dense, sparse in held]


@pytest.mark.parametrize("runtime", ["torchtitan", "megatron-lm"])
@pytest.mark.parametrize("name", MODELS)
def test_stages_hold_the_kinds_of_layers_that_lie_on_them(name: str, runtime: str) -> None:
    model = MODELS[name]
    plans = [p for p in PLANS if not p.layers_per_stage or sum(p.layers_per_stage) == model.layers]
    table = plan_table(plans, Workload(seq_len=128, global_batch_size=24))

    layout = stage_layout(model, table, runtime_spec(runtime).pipeline)

    for row, plan in enumerate(plans):
        dense, sparse = (layers[row, : plan.pp].tolist() for layers in layout.layers)
        assert list(zip(dense, sparse, strict=True)) == by_hand(model, plan, runtime)


def test_every_other_sparse_layer_leaves_half_of_each_stage_dense() -> None:
    """decoder_sparse_step 2 over 24 layers and 4 stages: 3 dense layers a stage."""
    table = plan_table([Plan(pp=4)], Workload(seq_len=128, global_batch_size=4))
    layout = stage_layout(MODELS["sparse step"], table, runtime_spec("megatron-lm").pipeline)

    assert layout.dense[0].tolist() == [3, 3, 3, 3]
    assert layout.moe[0].tolist() == [3, 3, 3, 3]


def test_merged_ranks_stand_for_as_many_layers() -> None:
    table = plan_table(PLANS[:3], Workload(seq_len=128, global_batch_size=24))
    spec = runtime_spec("torchtitan").pipeline
    for name in ("sparse step", "listed dense", "first dense", "types"):
        layout = stage_layout(MODELS[name], table, spec, merged=True)
        dense, sparse = layout.layers

        assert (dense * layout.rank_count).sum(axis=1).tolist() == [MODELS[name].dense_layers] * len(table)
        assert (sparse * layout.rank_count).sum(axis=1).tolist() == [MODELS[name].moe_layers] * len(table)


def test_modes_by_stage_count_the_layers_of_their_stages() -> None:
    model = MODELS["listed dense"]
    plan = Plan(pp=4, recompute_per_stage=("none", "full", "none", "full"))
    table = plan_table([plan], Workload(seq_len=128, global_batch_size=4))

    layout = stage_layout(model, table, runtime_spec("megatron-lm").pipeline)

    expected = by_hand(model, plan, "megatron-lm")
    for mode, ranks in (("none", (0, 2)), ("full", (1, 3))):
        dense, sparse = (counts[0] for counts in layout.by_mode[mode])
        assert [(dense[r], sparse[r]) for r in range(4)] == [expected[r] if r in ranks else (0, 0) for r in range(4)]
