"""Reading config.json: families, defaults, contradictions and hostile input."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.config.hf_config import load_model, model_from_config, shipped_models
from simulator.config.model import Model
from simulator.config.model_families import FAMILIES
from tests.examples import examples
from topology.codec import convert, to_builtins
from topology.errors import BadInput, BadModel

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 688,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
HUGE = pytest.param(10**5000, id="10**5000")  # longer than Python prints
GPT = {"model_type": "gpt", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 1024}


def read(base=LLAMA, /, **changes):
    config = {key: value for key, value in (base | changes).items() if value is not ...}
    return model_from_config(config, name="test")


def refused(base=LLAMA, /, **changes):
    with pytest.raises(BadModel) as caught:
        read(base, **changes)
    assert caught.value.exit_code == 2
    return str(caught.value)


# --- what is read -------------------------------------------------------------------------------------------------


def test_a_complete_config_assumes_nothing():
    assert read().assumed == ()


def test_defaults_that_matter_are_named_with_their_class():
    model = read(num_key_value_heads=..., tie_word_embeddings=...)
    assert model.kv_heads == 8
    assert any("num_key_value_heads" in note and "LlamaConfig" in note for note in model.assumed)
    assert any("tie_word_embeddings" in note for note in model.assumed)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024}, 8192),  # less than is stated
        ({"rope_type": "linear", "factor": 8.0}, 8192),  # what is stated was reached, as of Gemma 3
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 8192),
        ({"rope_type": "yarn", "factor": "4", "original_max_position_embeddings": 32768}, 8192),
    ],
)
def test_a_stretched_rotary_embedding_has_the_positions_that_it_reaches(scaling, positions):
    assert read(max_position_embeddings=8192, rope_scaling=scaling).max_positions == positions


def test_qwen3_head_dim_default_is_the_class_s_and_not_the_quotient():
    model = read(model_type="qwen3")
    assert model.head_dim == 128
    assert any("head_dim" in note and "Qwen3Config" in note for note in model.assumed)


def test_explicit_head_dim_need_not_multiply_to_hidden():
    assert read(head_dim=96).head_dim == 96


def test_code_named_by_the_config_is_only_mentioned():
    model = read(auto_map={"AutoConfig": "evil--os.system"}, trust_remote_code=True)
    assert [note for note in model.assumed if "auto_map" in note]
    assert model.parameters == read().parameters


def test_quantization_is_noted_and_changes_no_count():
    model = read(quantization_config={"quant_method": "fp8"})
    assert model.parameters == read().parameters
    assert any("quantization_config" in note for note in model.assumed)


def test_unknown_fields_are_named_briefly():
    model = read(**{f"future_{i}": i for i in range(40)}, **{"x" * 5000: 1})
    assert "ignored unknown field 'future_0'" in model.assumed
    assert any("more unknown fields" in note for note in model.assumed)
    assert max(map(len, model.assumed)) < 200


def test_irrelevant_and_null_fields_are_silent():
    model = read(rope_theta=1e6, hidden_act="silu", torch_dtype="bfloat16", sliding_window=None, rope_scaling={"a": 1})
    assert model.assumed == ()


def test_python_s_infinity_is_read(tmp_path):
    """Python writes `time_step_limit` of state-space models so."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"time_step_limit": [0.0, float("inf")]}))
    assert load_model(str(path)).layers == 4
    path.write_text(json.dumps(LLAMA | {"model_type": "mamba2", "time_step_limit": [0.0, float("inf")]}))
    with pytest.raises(BadModel, match="unknown model_type"):
        load_model(str(path))


def test_sliding_windows_by_family():
    slide = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    assert read(model_type="mistral", sliding_window=64).windowed_layers == 4
    assert read(model_type="mistral", sliding_window=None).sliding_window == 0
    assert read(model_type="mistral").sliding_window == 4096
    assert read(model_type="qwen2", **slide).windowed_layers == 1
    assert read(model_type="qwen2", **slide | {"use_sliding_window": False}).sliding_window == 0
    assert read(model_type="qwen3_moe", **slide, **MOE).windowed_layers == 4
    types = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    assert read(model_type="gemma2", sliding_window=64, layer_types=types).windowed_layers == 1
    assert read(layer_types=["full_attention"] * 4).windowed_layers == 0
    assert "slide" in refused(layer_types=types)
    assert "layer_types" in refused(model_type="gemma2", layer_types=types[:2])
    assert "layer_types" in refused(model_type="gemma2", layer_types=["linear_attention"] * 4)
    assert "layer_types" in refused(model_type="gemma2", layer_types=[["x"]] * 4)


def test_placement_of_sparse_layers():
    sparse = read(model_type="qwen3_moe", **MOE, decoder_sparse_step=2, mlp_only_layers=[1])
    assert sparse.moe.dense_layer_ids == (0, 1, 2)
    assert sparse.moe_layers == 1
    llama = read(**MOE, first_k_dense_replace=1, n_shared_experts=2)
    assert (llama.moe.dense_layer_ids, llama.moe.shared_ffn) == ((0,), 192)
    assert read(**MOE | {"num_experts": ..., "n_routed_experts": 8}).moe.experts == 8
    assert read(num_experts=0).moe is None
    everywhere = read(**MOE, mlp_only_layers=[0, 1, 2, 3])
    assert everywhere.moe is None
    assert everywhere.assumed


CASE_MODELS = json.loads((Path(__file__).parents[1] / "data" / "models" / "case_models.json").read_text())


@pytest.mark.parametrize("row", CASE_MODELS, ids=lambda row: f"{row['from']}-{row['model']['hidden_size']}")
def test_model_dictionaries_of_measured_runs_are_read(row):
    """Models as published measurements describe them: few keys, none unknown, defaults named."""
    model = model_from_config(row["model"], name=row["from"])
    assert not [note for note in model.assumed if "unknown" in note]
    assert bool(model.moe) == ("num_experts" in row["model"])
    stated = row["model"].get("tie_word_embeddings")
    assert any("tie_word_embeddings" in note for note in model.assumed) == (stated is None)


def test_mixtral_has_one_width():
    config = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    assert read(config, moe_intermediate_size=688) == read(config)
    assert read(config, moe_intermediate_size=688, intermediate_size=...).moe.ffn == 688
    assert "moe_intermediate_size" in refused(config, moe_intermediate_size=96)


def test_stating_what_the_class_always_does_is_fine():
    assert read(model_type="qwen3", head_dim=32, use_qk_norm=True).assumed == ()


def test_case_style_llama_with_experts():
    model = read(**MOE, gated_mlp=True)
    assert model.moe_layers == 4
    assert model.expert_parameters == 8 * 3 * 256 * 96


def test_experts_as_wide_as_the_layer_when_unstated():
    model = read(**MOE | {"moe_intermediate_size": ...})
    assert model.moe.ffn == 688
    assert any("moe_intermediate_size" in note for note in model.assumed)


def test_neutral_gpt_is_megatron_s():
    model = read(GPT)
    assert (model.norm, model.norm_bias, model.qkv_bias, model.attention_out_bias, model.mlp_bias) == (
        "layernorm", True, True, True, True,
    )  # fmt: skip
    assert model.tied_embeddings
    assert not model.gated_mlp
    assert not model.rotary
    assert model.ffn == 1024
    assert model.learned_positions == 0
    assert any("learned position table" in note for note in model.assumed)
    assert read(GPT, max_position_embeddings=128).learned_positions == 128


def test_neutral_gpt_states_otherwise():
    """An MPT without biases (ALiBi, norm weights only): 12 h^2 a layer, norms of width h, tied."""
    stated = GPT | {"num_key_value_heads": 8, "tie_word_embeddings": True}
    model = read(stated, use_bias=False, norm_bias=False, position_embedding_type="alibi")
    assert model.parameters == 4 * (12 * 256**2 + 2 * 256) + 256 + 1024 * 256
    assert model.assumed == ()
    mixed = read(GPT, use_bias=False, attention_bias=True)
    assert (mixed.qkv_bias, mixed.attention_out_bias, mixed.mlp_bias) == (True, True, False)
    assert read(GPT, position_embedding_type="rope").rotary
    assert read(GPT, normalization="RMSNorm").norm_parameters == 256
    assert "intermediate_size" in refused(GPT, gated_mlp=True)
    assert read(GPT, gated_mlp=True, intermediate_size=688).mlp_matmul_parameters(688) == 3 * 256 * 688


def test_gpt2_takes_both_spellings_and_refuses_two_answers():
    new = read(GPT, model_type="gpt2")
    old = {"model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 8, "vocab_size": 1024, "n_positions": 1024}
    assert model_from_config(old, name="gpt2").parameters == new.parameters
    assert new.learned_positions == 1024
    assert "n_embd" in refused(old, hidden_size=512)


def test_deepseek_null_query_rank_means_no_compression():
    config = LLAMA | MOE | {"model_type": "deepseek_v2", "n_shared_experts": 1}
    assert read(config, q_lora_rank=None).latent.q_lora_rank == 0
    absent = read(config)
    assert absent.latent.q_lora_rank == 1536
    assert any("q_lora_rank" in note for note in absent.assumed)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("value", [..., None, 0, -1, 2**31, 2**80, HUGE, True, 4.0, 1e308, "4", [4], {"a": 1}])
def test_sizes_must_be_sane_and_the_key_is_named(key, value):
    assert key in refused(**{key: value})


@pytest.mark.parametrize("value", [0, 3, 16, -4, True, "8", 2.0, HUGE])
def test_key_value_heads_must_divide_heads(value):
    message = refused(num_key_value_heads=value)
    assert "key/value heads" in message or "num_key_value_heads" in message


def test_heads_must_divide_hidden_unless_head_dim_is_stated():
    assert "head_dim" in refused(hidden_size=250)
    assert read(hidden_size=250, head_dim=32).head_dim == 32


def test_gpt_neox_has_no_grouped_queries():
    assert "grouped" in refused(model_type="gpt_neox")
    assert read(model_type="gpt_neox", num_key_value_heads=8).kv_heads == 8


@pytest.mark.parametrize("value", [0, 1, "true", "false", [], 1.0])
def test_flags_must_be_booleans(value):
    assert "tie_word_embeddings" in refused(tie_word_embeddings=value)


def test_family_errors_point_somewhere():
    assert "model_type" in refused(model_type=...)
    assert "mixtral" in refused(model_type="mixtrall")
    assert "qwen3_moe" in refused(model_type="qwen3moe")
    for odd in ["", "a" * 100_000, 7, ["llama"], {"llama": 1}, "\x1b[31mllama"]:
        message = refused(model_type=odd)
        assert len(message) < 1000
        assert "\x1b" not in message
    assert "text_config" in refused(model_type="gemma3", text_config=dict(LLAMA))


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (LLAMA, {"kv_lora_rank": 512}),
        (LLAMA, {"is_encoder_decoder": True}),
        (LLAMA | {"model_type": "qwen2"}, MOE),
        (LLAMA, {"linear_num_key_heads": 16}),
        (GPT | {"model_type": "gpt2"}, {"add_cross_attention": True}),
        (LLAMA, {"vision_config": {"depth": 3}}),
    ],
)
def test_features_the_family_does_not_have_are_refused(base, changes):
    message = refused(base, **changes)
    assert "does not have" in message
    assert next(iter(changes)) in message


def test_features_said_to_be_absent_are_fine():
    assert read(kv_lora_rank=None, is_encoder_decoder=False, mlp_only_layers=[], layer_types=None).assumed == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (MOE | {"num_experts_per_tok": 9}, "9 experts"),
        (MOE | {"num_experts_per_tok": ...}, "num_experts_per_tok"),
        (MOE | {"num_experts": -1}, "num_experts"),
        (MOE | {"n_routed_experts": 16}, "n_routed_experts"),
        (MOE | {"mlp_only_layers": [4]}, "mlp_only_layers"),
        (MOE | {"mlp_only_layers": [True]}, "mlp_only_layers"),
        (MOE | {"mlp_only_layers": 3}, "mlp_only_layers"),
        (MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_contradictory_experts(changes, named):
    assert named in refused(**changes)


@pytest.mark.parametrize("config", [None, [], "llama", 3, [LLAMA]])
def test_a_config_that_is_no_object(config):
    with pytest.raises(BadModel):
        model_from_config(config, name="x")


# --- by name or by path -------------------------------------------------------------------------------------------


def test_contract_names_are_shipped():
    contract = {"llama3-8b", "llama3-70b", "llama3-405b", "llama2-7b", "llama2-70b", "qwen3-8b", "qwen3-30b-a3b"}
    assert contract | {"mixtral-8x7b", "deepseek-v3", "gpt3-175b"} <= set(shipped_models())


@pytest.mark.parametrize("name", shipped_models())
def test_shipped_models_assume_nothing_and_have_a_source(name):
    model = load_model(name.upper())
    assert model.name == name
    assert model.assumed == ()
    from simulator.config import hub_models

    sources = json.loads((hub_models.SHIPPED / "SOURCES.json").read_text())
    assert sources[name]["config"]


def test_hub_names_of_shipped_models_work_without_a_network():
    assert load_model("Qwen/Qwen3-8B") == load_model("qwen3-8b")
    assert load_model("deepseek-ai/deepseek-v3").name == "deepseek-v3"


def test_unknown_names_get_near_ones():
    with pytest.raises(BadModel) as caught:
        load_model("llama3-7b")
    assert "llama3-8b" in str(caught.value).split("do:")[0]
    assert "gpt-neox-20b" in str(caught.value)
    with pytest.raises(BadModel) as caught:
        load_model("meta-llama/llama3_70b")
    assert "llama3-70b" in str(caught.value).split("do:")[0]


@pytest.mark.parametrize("name", ["", "\0", "a" * 100_000, "../../etc/passwd", "SOURCES", "\x1b[2J", "no/such.json"])
def test_odd_names_are_refused_in_a_line(name):
    with pytest.raises((BadModel, BadInput)) as caught:
        load_model(name)
    assert len(str(caught.value)) < 1000
    assert "\x1b" not in str(caught.value)


def test_file_or_directory(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(str(folder)) == load_model(str(folder / "config.json"))
    assert load_model(str(folder)).name == "my-model"
    (tmp_path / "other.json").write_text(json.dumps(LLAMA))
    assert load_model(str(tmp_path / "other.json")).name == "other"
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(BadInput):
        load_model(str(tmp_path / "bad.json"))
    (tmp_path / "pickle.json").write_bytes(b"\x80\x04\x95")
    with pytest.raises(BadInput, match="pickle"):
        load_model(str(tmp_path / "pickle.json"))
    (tmp_path / "list.json").write_text("[" * 50 + "]" * 50)
    with pytest.raises(BadModel):
        load_model(str(tmp_path / "list.json"))


# --- properties ---------------------------------------------------------------------------------------------------

KEYS = sorted(
    set(LLAMA) | set(MOE) | {
        "head_dim", "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "max_position_embeddings", "gated_mlp",
        "attention_bias", "mlp_bias", "use_bias", "norm_bias", "normalization", "position_embedding_type", "qkv_bias",
        "use_parallel_residual", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "n_routed_experts", "num_local_experts", "n_shared_experts", "shared_expert_intermediate_size",
        "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers", "layer_types",
        "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "auto_map",
        "num_nextn_predict_layers", "quantization_config", "text_config", "surprise",
    }
)  # fmt: skip
SMALL = st.integers(1, 64)
ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8)
    | st.sampled_from([10**400, -(2**63), 1e308, "sliding_attention", "alibi"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@examples(20)
@given(
    config=st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), ANY_JSON | SMALL, max_size=12),
    sane=st.booleans(),
)
def test_any_config_is_a_model_or_a_bad_model(family, config, sane):
    base = LLAMA | MOE if sane else {}
    try:
        model = model_from_config(base | config | {"model_type": family}, name="fuzz")
    except BadModel as error:
        message = str(error)
    else:
        check_consistent(model)
        message = "read"
    assert 0 < len(message) < 1000


LINEAR = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=15, deadline=None)
@given(
    layers=st.integers(1, 12),
    head_dim=SMALL,
    groups=st.integers(1, 4),
    kv_heads=st.integers(1, 4),
    widths=st.tuples(SMALL, SMALL, SMALL),
    experts=st.integers(1, 8),
    tied=st.booleans(),
)
def test_sane_configs_are_read_and_round_trip(family, layers, head_dim, groups, kv_heads, widths, experts, tied):
    ffn, expert_ffn, vocab = widths
    spec = FAMILIES[family]
    heads = groups * kv_heads
    config = {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if spec.multi_head_only or spec.latent else kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 32,
        "tie_word_embeddings": tied,
    }
    if spec.experts == "required":
        config |= {"num_experts": experts, "num_experts_per_tok": 1}
        if "intermediate_size" not in spec.expert_width_keys:  # where it is, experts have no width of their own
            config |= {"moe_intermediate_size": expert_ffn}
    if spec.linear:
        config |= {f"linear_{name}": groups for name in LINEAR}
    if spec.indexed:
        config |= {"index_n_heads": groups, "index_head_dim": head_dim, "index_topk": 2}
    model = model_from_config(config, name="sane")
    assert (model.layers, model.hidden, model.heads, model.ffn, model.vocab) == (
        layers, heads * head_dim, heads, ffn, vocab,
    )  # fmt: skip
    assert model.tied_embeddings is tied
    if model.moe:
        assert model.moe.experts == experts
    check_consistent(model)
    assert convert(to_builtins(model), Model, where="round trip") == model


def check_consistent(model):
    assert 0 < model.active_parameters <= model.parameters
    assert 0 <= model.dense_layers <= model.layers
    assert model.dense_layers + model.moe_layers == model.layers
    assert 0 <= model.windowed_layers <= model.layers
    assert model.layer_matmul_parameters <= model.active_parameters
    assert model.attended_keys(64) <= model.attended_keys(64, causal=False) <= 64 * model.layers
    assert model.training_flops_per_token(64) > model.forward_flops_per_token(64) > 0
