"""A plain description of a published mixture of experts is read as that network, and nothing else is."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import simulator.hf_config
from simulator.hf_config import load_model, model_from_config, shipped_models
from topology.errors import BadModel

# DeepSeek-V3 (arXiv 2412.19437, section 4.2) in the words for a Llama with experts, heads as a plain reader derives them.
PLAIN_V3 = {
    "model_type": "llama",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "head_dim": 56,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "gated_mlp": True,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
}


def read(**changes):
    config = {key: value for key, value in (PLAIN_V3 | changes).items() if value is not ...}
    return model_from_config(config, name="test")


def test_a_plain_description_of_every_layer_is_the_network_without_what_the_run_adds():
    published = replace(load_model("deepseek-v3"), multi_token_layers=0, name="test", assumed=())
    assert replace(read(), assumed=()) == published


def test_what_was_filled_in_is_said():
    said = " ".join(read().assumed)
    for word in ("deepseek-v3", "kv_lora_rank 512", "n_shared_experts 1", "first_k_dense_replace 3", "head_dim 56"):
        assert word in said


@pytest.mark.parametrize(("layers", "dense"), [(61, 3), (60, 3), (41, 2), (4, 1), (2, 1)])
def test_a_network_cut_short_keeps_its_share_of_dense_layers(layers, dense):
    assert read(num_hidden_layers=layers).moe.dense_layers == dense


def test_what_is_stated_goes_before_what_was_published():
    model = read(n_shared_experts=2, first_k_dense_replace=5, q_lora_rank=768)
    assert model.moe.shared_ffn == 2 * 2048
    assert model.moe.dense_layers == 5
    assert model.latent.q_lora_rank == 768


OTHERWISE = [
    {"hidden_size": 7168 + 128},
    {"vocab_size": 129281},
    {"num_experts": 128},
    {"num_experts_per_tok": 4},
    {"moe_intermediate_size": 1024},
    {"num_key_value_heads": 64},
    {"intermediate_size": 18433},
    {"head_dim": 128},
    {"gated_mlp": False},
    {"normalization": "layernorm"},
]


@pytest.mark.parametrize("changes", OTHERWISE, ids=lambda change: next(iter(change)))
def test_one_other_dimension_and_it_is_what_it_says(changes):
    model = read(**changes)
    assert model.family == "llama"
    assert model.latent is None
    assert not any("read as" in note for note in model.assumed)


@pytest.mark.parametrize("name", [name for name in shipped_models() if load_model(name).moe])
def test_every_shipped_mixture_is_recognised_by_its_dimensions_alone(name):
    config = json.loads((Path(simulator.hf_config.__file__).parent / "models" / f"{name}.json").read_text())
    moe = load_model(name).moe
    plain = {key: config[key] for key in PLAIN_V3 if key in config} | {
        "model_type": "llama",
        "num_experts": moe.experts,
        "moe_intermediate_size": moe.ffn,
    }
    plain.pop("head_dim", None)
    read_back = model_from_config(plain, name=name)
    assert replace(read_back, assumed=(), max_positions=0) == replace(
        load_model(name), assumed=(), multi_token_layers=0, max_positions=0
    )


junk = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(10**5000), st.text(max_size=4), st.lists(st.integers())
)


@given(st.dictionaries(st.sampled_from([*PLAIN_V3, "first_k_dense_replace", "normalization"]), junk, max_size=4))
def test_whatever_is_stated_is_read_or_refused(changes):
    with contextlib.suppress(BadModel):
        read(**changes)
