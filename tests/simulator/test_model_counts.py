"""Parameter counts against figures that others published, against transformers' own modules, and tensor by tensor."""

import json
from pathlib import Path

import pytest

from simulator.config.hf_config import load_model, model_from_config, shipped_models
from simulator.config.model import Model

HUB = "Hugging Face model API, safetensors.total of "
KERAS = "keras-hub preset metadata `params`, "

# The Hub's totals for Llama 2 count every element of the files, and those hold one vector of head_dim / 2 = 64 rotary
# frequencies a layer, which are no parameters.
ROTARY = "less 64 rotary frequencies a layer"

# Exact totals as published, each with where it was read.
PUBLISHED: dict[str, tuple[int, str]] = {
    "llama2-7b": (6_738_417_664 - 32 * 64, HUB + f"meta-llama/Llama-2-7b-hf @01c7f73d, {ROTARY}"),
    "llama2-13b": (13_015_866_880 - 40 * 64, HUB + f"meta-llama/Llama-2-13b-hf @5c31dfb6, {ROTARY}"),
    "llama2-70b": (68_976_653_312 - 80 * 64, HUB + f"meta-llama/Llama-2-70b-hf @3aba440b, {ROTARY}"),
    "llama3-8b": (8_030_261_248, HUB + "meta-llama/Llama-3.1-8B @d04e592b"),
    "llama3-70b": (70_553_706_496, HUB + "meta-llama/Llama-3.1-70B @349b2ddb"),
    "llama3-405b": (405_853_388_800, HUB + "meta-llama/Llama-3.1-405B @b906e4dc"),
    "llama3.2-1b": (1_235_814_400, HUB + "meta-llama/Llama-3.2-1B-Instruct"),
    "llama3.2-3b": (3_212_749_824, HUB + "meta-llama/Llama-3.2-3B-Instruct @0cb88a4f"),
    "mistral-7b": (7_241_732_096, "GGUF header general.parameter_count; together.ai API table (fine-tunes of v0.1)"),
    "mixtral-8x7b": (46_702_792_704, KERAS + "mixtral_8_7b_en"),
    "mixtral-8x22b": (140_620_634_112, HUB + "mistral-community/Mixtral-8x22B-v0.1"),
    "qwen2.5-7b": (7_615_616_512, "GGUF header general.parameter_count of Qwen2.5-7B-Instruct"),
    "qwen2.5-72b": (72_706_203_648, KERAS + "qwen2.5_instruct_72b_en"),
    "qwen3-8b": (8_190_735_360, HUB + "Qwen/Qwen3-8B @b968826d"),
    "qwen3-32b": (32_762_123_264, HUB + "Qwen/Qwen3-32B; " + KERAS + "qwen3_32b_en"),
    "qwen3-30b-a3b": (30_532_122_624, "GGUF header general.parameter_count of Qwen3-30B-A3B"),
    "qwen3-235b-a22b": (235_093_634_560, HUB + "Qwen/Qwen3-235B-A22B; " + KERAS + "qwen3_moe_235b_a22b_en"),
    "deepseek-v2": (235_741_434_880, HUB + "deepseek-ai/DeepSeek-V2"),
    "deepseek-v2-lite": (15_706_484_224, HUB + "deepseek-ai/DeepSeek-V2-Lite"),
    "deepseek-v3": (671_026_419_200, "shard headers of deepseek-ai/DeepSeek-V3, main model, scales left out"),
    "gpt-oss-20b": (20_914_757_184, "transformers 5.23 modules; arXiv 2508.10925, table 1: 20.91 B"),
    "gpt-oss-120b": (116_829_156_672, "transformers 5.23 modules; arXiv 2508.10925, table 1: 116.83 B"),
    "kimi-k2": (1_026_408_232_448, "together.ai API table, paramCount; shard headers of moonshotai/Kimi-K2-Instruct"),
    "gpt2": (124_439_808, "Colossal-AI GPT benchmark table (numel of gpt2_small); GPT2LMHeadModel.num_parameters()"),
    "gpt2-xl": (1_557_611_200, KERAS + "gpt2_extra_large_en"),
    "gpt-neox-20b": (20_554_567_680, "model card of EleutherAI/gpt-neox-20b, n_parameters"),
    "gemma-2b": (2_506_172_416, KERAS + "gemma_2b_en"),
    "gemma-7b": (8_537_680_896, KERAS + "gemma_7b_en"),
    "gemma2-9b": (9_241_705_984, HUB + "google/gemma-2-9b"),
    "gemma2-27b": (27_227_128_320, KERAS + "gemma2_27b_en"),
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_shipped_model_has_the_published_number_of_parameters(name):
    assert load_model(name).parameters == PUBLISHED[name][0], PUBLISHED[name][1]


def test_every_shipped_model_of_a_published_checkpoint_is_in_the_table():
    assert set(shipped_models()) - set(PUBLISHED) == {"gpt3-175b", "tiny-llama"}


def _llama_like(layers, hidden, heads, kv, ffn, vocab, **more):
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab}
    return sizes | {"num_key_value_heads": kv, "intermediate_size": ffn} | more


QWEN_MOE = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
QWEN_CODER = {"num_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 2560}
NOT_SHIPPED = [
    (
        "qwen2_moe",
        _llama_like(24, 2048, 16, 16, 5632, 151936, shared_expert_intermediate_size=5632, **QWEN_MOE),
        14_315_784_192,
        KERAS + "qwen1.5_moe_2.7b_en",
    ),
    (
        "qwen3_moe",
        _llama_like(62, 6144, 96, 8, 8192, 151936, head_dim=128, **QWEN_CODER),
        480_154_875_392,
        HUB + "Qwen/Qwen3-Coder-480B-A35B-Instruct @9d90cf8f",
    ),
    ("olmo2", _llama_like(32, 4096, 32, 32, 11008, 100352), 7_298_617_344, HUB + "allenai/OLMo-2-1124-7B @7df9a825"),
    ("olmo2", _llama_like(40, 5120, 40, 40, 13824, 100352), 13_716_198_400, HUB + "allenai/OLMo-2-1124-13B @3fefddc1"),
    (
        "phi3",
        _llama_like(40, 5120, 40, 10, 17920, 100352),
        14_659_507_200,
        "GGUF header general.parameter_count of microsoft/phi-4",
    ),
    ("gemma2", _llama_like(26, 2304, 8, 4, 9216, 256000, head_dim=256), 2_614_341_888, HUB + "google/gemma-2-2b"),
    ("llama", _llama_like(32, 4096, 32, 32, 11008, 32016), 6_738_546_688, "together.ai API table, CodeLlama-7b"),
    ("mistral", _llama_like(32, 4096, 32, 8, 14336, 32768), 7_248_023_552, KERAS + "mistral_0.3_7b_en"),
]


@pytest.mark.parametrize(("model_type", "config", "published", "source"), NOT_SHIPPED)
def test_other_checkpoints_have_the_published_number_of_parameters(model_type, config, published, source):
    assert model_from_config({"model_type": model_type} | config, name="x").parameters == published, source


# Biderman et al. 2023 (arXiv 2304.01373), table 1: non-embedding parameters; vocabulary 50304, untied.
PYTHIA = [
    (6, 512, 8, 18_915_328),
    (12, 768, 12, 85_056_000),
    (24, 1024, 16, 302_311_424),
    (16, 2048, 8, 805_736_448),
    (24, 2048, 16, 1_208_602_624),
    (32, 2560, 32, 2_517_652_480),
    (32, 4096, 32, 6_444_163_072),
    (36, 5120, 40, 11_327_027_200),
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "non_embedding"), PYTHIA)
def test_pythia_paper_table_1(layers, hidden, heads, non_embedding):
    config = {"model_type": "gpt_neox", "num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": 50304}
    config |= {"num_attention_heads": heads, "intermediate_size": 4 * hidden}
    model = model_from_config(config, name="pythia")
    assert model.parameters - model.embedding_parameters - model.head_parameters == non_embedding


def test_deepseek_v3_with_its_prediction_module_fills_the_checkpoint():
    """The Hub counts BF16 3,918,786,560 and F8 680,571,043,840 elements, and FP32 scales besides the selection bias.

    The file repeats embedding and head for the module, which `multi_token_parameters` counts once (in the base).
    """
    model = load_model("deepseek-v3")
    weights = 3_918_786_560 + 680_571_043_840
    selection_bias = 256 * (58 + 1)
    repeated = 2 * model.vocab * model.hidden
    assert model.parameters + model.multi_token_parameters + repeated == weights + selection_bias


def test_deepseek_v3_active_parameters_as_its_authors_count_them():
    """README_WEIGHTS.md (corrected): 36.6 B activated, output head counted, input embedding not."""
    model = load_model("deepseek-v3")
    assert round((model.active_parameters - model.embedding_parameters) / 1e9, 1) == 36.6


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.2), ("qwen3-30b-a3b", 3.4), ("qwen3-235b-a22b", 22.2)],
)
def test_active_parameters_of_mixtures(name, billions):
    """Mixtral blog posts: 12.9 B and 39 B; Qwen3 technical report: 3.3 B and 22 B (rounded down there)."""
    assert round(load_model(name).active_parameters / 1e9, 1) == billions


# Narayanan et al. 2021 (arXiv 2104.04473) equation 2 with V = 51200 and s = 2048, and table 1's billions.
MEGATRON_TABLE_1 = [
    (24, 2304, 24, 1.7),
    (30, 3072, 32, 3.6),
    (36, 4096, 32, 7.5),
    (40, 6144, 48, 18.4),
    (48, 8192, 64, 39.1),
    (60, 10240, 80, 76.1),
    (80, 12288, 96, 145.6),
    (96, 16384, 128, 310.1),
    (105, 20480, 128, 529.6),
    (128, 25600, 160, 1008.0),
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "billions"), MEGATRON_TABLE_1)
def test_megatron_gpt_paper_table_1(layers, hidden, heads, billions):
    config = {"model_type": "gpt", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    config |= {"vocab_size": 51200, "max_position_embeddings": 2048}
    model = model_from_config(config, name="megatron")
    analytical = 12 * layers * hidden**2 + 13 * layers * hidden + (51200 + 2048) * hidden
    assert model.parameters == analytical + 2 * hidden  # the formula leaves out the final norm
    assert round(model.parameters / 1e9, 1) == billions


def test_gpt3_175b_is_the_paper_s():
    """Brown et al. 2020, table 2.1 says 175.0 B, with the nominal 50257 tokens and all approximations; 0.3% apart."""
    assert load_model("gpt3-175b").parameters == pytest.approx(175.0e9, rel=0.003)


# llm-foundry's benchmark README prints the exact count of its MPT models: (layers, hidden, heads, seq_len, count).
# They are the GPT of Megatron, every bias included, tied, with a learned table of seq_len positions.
MPT = [
    (12, 768, 12, 512, 124_131_840),
    (12, 768, 12, 2048, 125_311_488),
    (24, 1024, 16, 65536, 420_997_120),
    (24, 1536, 12, 2048, 760_470_528),
    (24, 2048, 16, 2048, 1_315_950_592),
    (32, 2560, 20, 65536, 2_814_366_720),
    (32, 4096, 32, 2048, 6_658_859_008),
    (40, 5120, 40, 4096, 12_864_440_320),
    (48, 7168, 56, 8192, 30_019_254_272),
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "seq_len", "count"), MPT)
def test_llm_foundry_benchmark_table(layers, hidden, heads, seq_len, count):
    config = {"model_type": "gpt", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    config |= {"vocab_size": 50368, "max_position_embeddings": seq_len, "gated_mlp": False}
    assert model_from_config(config, name="mpt").parameters == count


TRANSFORMERS = json.loads((Path(__file__).parents[1] / "data" / "models" / "transformers_counts.json").read_text())


@pytest.mark.parametrize("row", TRANSFORMERS["rows"], ids=lambda row: row["id"])
def test_every_family_counts_as_transformers_own_modules(row):
    model = model_from_config(row["config"], name=row["id"])
    assert model.parameters == row["parameters"] + row["selection_bias"]


def test_transformers_table_covers_every_family_it_can():
    from simulator.config.model_families import FAMILIES

    assert {row["config"]["model_type"] for row in TRANSFORMERS["rows"]} == set(FAMILIES) - {"gpt"}


# --- tensor by tensor: names and shapes of the state dict, written out by hand ------------------------------------


def _elements(tensors):
    total = 0
    for shape in tensors.values():
        size = 1
        for width in shape:
            size *= width
        total += size
    return total


def _llama_state(m: Model, *, qkv_bias=False, qk_norm=False, sandwich=False):
    h, d = m.hidden, m.head_dim
    t = {"model.embed_tokens.weight": (m.vocab, h), "model.norm.weight": (h,)}
    if not m.tied_embeddings:
        t["lm_head.weight"] = (m.vocab, h)
    for i in range(m.layers):
        p = f"model.layers.{i}"
        for proj, heads in (("q", m.heads), ("k", m.kv_heads), ("v", m.kv_heads)):
            t[f"{p}.self_attn.{proj}_proj.weight"] = (heads * d, h)
            if qkv_bias:
                t[f"{p}.self_attn.{proj}_proj.bias"] = (heads * d,)
        t[f"{p}.self_attn.o_proj.weight"] = (h, m.heads * d)
        if qk_norm:
            t[f"{p}.self_attn.q_norm.weight"] = t[f"{p}.self_attn.k_norm.weight"] = (d,)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if sandwich else []
        t |= {f"{p}.{norm}.weight": (h,) for norm in norms}
        t |= _gated_mlp(f"{p}.mlp", h, m.ffn)
    return t


def _gated_mlp(prefix, hidden, width, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = names
    return {
        f"{prefix}.{gate}.weight": (width, hidden),
        f"{prefix}.{up}.weight": (width, hidden),
        f"{prefix}.{down}.weight": (hidden, width),
    }


def _sparse_state(m: Model, state, *, experts_at, router, names=("gate_proj", "up_proj", "down_proj")):
    """Replace the dense feed-forward of every sparse layer by a router and experts."""
    for i in range(m.moe.dense_layers, m.layers):
        for key in [key for key in state if key.startswith(f"model.layers.{i}.mlp.")]:
            del state[key]
        state[f"model.layers.{i}.{router}.weight"] = (m.moe.experts, m.hidden)
        for e in range(m.moe.experts):
            state |= _gated_mlp(f"model.layers.{i}.{experts_at}.{e}", m.hidden, m.moe.ffn, names)
    return state


def _deepseek_state(m: Model):
    h, a = m.hidden, m.latent
    t = {"model.embed_tokens.weight": (m.vocab, h), "model.norm.weight": (h,), "lm_head.weight": (m.vocab, h)}
    for i in range(m.layers):
        p = f"model.layers.{i}"
        query = m.heads * (a.qk_nope_head_dim + a.qk_rope_head_dim)
        if a.q_lora_rank:
            t[f"{p}.self_attn.q_a_proj.weight"] = (a.q_lora_rank, h)
            t[f"{p}.self_attn.q_a_layernorm.weight"] = (a.q_lora_rank,)
            t[f"{p}.self_attn.q_b_proj.weight"] = (query, a.q_lora_rank)
        else:
            t[f"{p}.self_attn.q_proj.weight"] = (query, h)
        t[f"{p}.self_attn.kv_a_proj_with_mqa.weight"] = (a.kv_lora_rank + a.qk_rope_head_dim, h)
        t[f"{p}.self_attn.kv_a_layernorm.weight"] = (a.kv_lora_rank,)
        t[f"{p}.self_attn.kv_b_proj.weight"] = (m.heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)
        t[f"{p}.self_attn.o_proj.weight"] = (h, m.heads * a.v_head_dim)
        t[f"{p}.input_layernorm.weight"] = t[f"{p}.post_attention_layernorm.weight"] = (h,)
        t |= _gated_mlp(f"{p}.mlp", h, m.ffn)
    t = _sparse_state(m, t, experts_at="mlp.experts", router="mlp.gate")
    for i in range(m.moe.dense_layers, m.layers):
        t |= _gated_mlp(f"model.layers.{i}.mlp.shared_experts", h, m.moe.shared_ffn)
        if m.family == "deepseek_v3":
            t[f"model.layers.{i}.mlp.gate.e_score_correction_bias"] = (m.moe.experts,)
    return t


def _gpt2_state(m: Model):
    h = m.hidden
    t = {"wte.weight": (m.vocab, h), "wpe.weight": (m.learned_positions, h), "ln_f.weight": (h,), "ln_f.bias": (h,)}
    for i in range(m.layers):
        for norm in ("ln_1", "ln_2"):
            t[f"h.{i}.{norm}.weight"] = t[f"h.{i}.{norm}.bias"] = (h,)
        for name, rows, columns in (
            ("attn.c_attn", h, 3 * h),
            ("attn.c_proj", h, h),
            ("mlp.c_fc", h, m.ffn),
            ("mlp.c_proj", m.ffn, h),
        ):
            t[f"h.{i}.{name}.weight"] = (rows, columns)
            t[f"h.{i}.{name}.bias"] = (columns,)
    return t


def _neox_state(m: Model):
    h = m.hidden
    t = {"gpt_neox.embed_in.weight": (m.vocab, h), "embed_out.weight": (m.vocab, h)}
    t |= {"gpt_neox.final_layer_norm.weight": (h,), "gpt_neox.final_layer_norm.bias": (h,)}
    for i in range(m.layers):
        p = f"gpt_neox.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            t[f"{p}.{norm}.weight"] = t[f"{p}.{norm}.bias"] = (h,)
        for name, rows, columns in (
            ("attention.query_key_value", 3 * h, h),
            ("attention.dense", h, h),
            ("mlp.dense_h_to_4h", m.ffn, h),
            ("mlp.dense_4h_to_h", h, m.ffn),
        ):
            t[f"{p}.{name}.weight"] = (rows, columns)
            t[f"{p}.{name}.bias"] = (rows,)
    return t


def _mixtral_state(m: Model):
    return _sparse_state(
        m,
        _llama_state(m),
        experts_at="block_sparse_moe.experts",
        router="block_sparse_moe.gate",
        names=("w1", "w3", "w2"),
    )


STATES = {
    "llama2-7b": _llama_state,
    "llama3-405b": _llama_state,
    "llama3.2-1b": _llama_state,
    "mistral-7b": _llama_state,
    "gemma-7b": _llama_state,
    "qwen2.5-72b": lambda m: _llama_state(m, qkv_bias=True),
    "qwen3-8b": lambda m: _llama_state(m, qk_norm=True),
    "gemma2-27b": lambda m: _llama_state(m, sandwich=True),
    "mixtral-8x22b": _mixtral_state,
    "qwen3-30b-a3b": lambda m: _sparse_state(
        m, _llama_state(m, qk_norm=True), experts_at="mlp.experts", router="mlp.gate"
    ),
    "deepseek-v2-lite": _deepseek_state,
    "deepseek-v3": _deepseek_state,
    "gpt2-xl": _gpt2_state,
    "gpt-neox-20b": _neox_state,
}


@pytest.mark.parametrize("name", sorted(STATES))
def test_tensor_by_tensor(name):
    model = load_model(name)
    assert _elements(STATES[name](model)) == model.parameters


def test_qwen3_235b_has_the_tensors_its_index_lists():
    """The index of Qwen3-235B-A22B lists 36,945 tensors: the layout above is that of the checkpoint."""
    model = load_model("qwen3-235b-a22b")
    state = _sparse_state(model, _llama_state(model, qk_norm=True), experts_at="mlp.experts", router="mlp.gate")
    assert len(state) == 36_945
    assert _elements(state) == model.parameters
