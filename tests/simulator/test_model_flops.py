"""FLOPs per token against the closed forms that papers and frameworks print."""

import pytest

from simulator.config.hf_config import load_model, model_from_config, shipped_models


def gpt(layers, hidden, heads, vocab=51200):
    config = {"model_type": "gpt", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return model_from_config(config | {"vocab_size": vocab}, name="gpt")


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(24, 2304, 24), (96, 12288, 96), (128, 25600, 160)])
@pytest.mark.parametrize("seq_len", [512, 2048, 8192])
def test_megatron_hardware_flops_with_full_recompute(layers, hidden, heads, seq_len):
    """Narayanan et al. 2021 (arXiv 2104.04473) section 5.1: 96 B s l h^2 (1 + s/6h + V/16lh)."""
    vocab = 51200
    per_token = 96 * layers * hidden**2 * (1 + seq_len / (6 * hidden) + vocab / (16 * layers * hidden))
    model = gpt(layers, hidden, heads, vocab)
    assert model.training_flops_per_token(seq_len, recompute_layers=1) == pytest.approx(per_token, rel=1e-12)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(48, 6144, 64), (96, 12288, 96), (105, 20480, 128)])
def test_korthikanti_model_flops(layers, hidden, heads):
    """Korthikanti et al. 2022 (arXiv 2205.05198) equation 7: 72 B L s h^2 (1 + s/6h + V/12hL)."""
    vocab, s = 51200, 2048
    per_token = 72 * layers * hidden**2 * (1 + s / (6 * hidden) + vocab / (12 * hidden * layers))
    assert gpt(layers, hidden, heads, vocab).training_flops_per_token(s) == pytest.approx(per_token, rel=1e-12)


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "llama3-70b", "llama3-405b"])
@pytest.mark.parametrize("seq_len", [4096, 8192, 131072])
def test_palm_and_torchtitan_convention(name, seq_len):
    """6 N + 12 L H Q T with N without the embedding (PaLM appendix B; torchtitan get_nparams_and_flops).

    N there includes norms, which multiply nothing: less than 0.01% of these models.
    """
    model = load_model(name)
    n = model.parameters - model.embedding_parameters
    analytical = 6 * n + 12 * model.layers * model.heads * model.head_dim * seq_len
    assert model.training_flops_per_token(seq_len) == pytest.approx(analytical, rel=1e-4)
    assert model.training_flops_per_token(seq_len) < analytical


def test_causal_attention_is_half_the_square():
    model = load_model("llama3-8b")
    assert 2 * model.attention_flops_per_token(8192) == model.attention_flops_per_token(8192, causal=False)
    assert model.forward_flops_per_token(8192) == 2 * model.matmul_parameters() + model.attention_flops_per_token(8192)
    assert model.training_flops_per_token(8192, causal=True) == pytest.approx(3 * model.forward_flops_per_token(8192))


@pytest.mark.parametrize("seq_len", [1, 100, 4096, 4097, 32768])
def test_window_against_counting_every_key(seq_len):
    """Mistral-7B, window 4096: sum min(i, w) over positions i; the diagonal's half is left out as in s/2."""
    model = load_model("mistral-7b")
    counted = sum(min(i, 4096) for i in range(1, seq_len + 1)) / seq_len
    per_layer = model.attended_keys(seq_len) / model.layers
    assert abs(per_layer - counted) <= 0.5


def test_alternating_windows_lie_between_full_and_windowed():
    model = load_model("gemma2-9b")
    assert (model.sliding_window, model.windowed_layers) == (4096, 21)
    assert model.attended_keys(4096) == 42 * 2048
    assert model.attended_keys(8192) == 21 * 4096 + 21 * (4096 - 1024)
    assert model.attended_keys(8192, causal=False) == 21 * 8192 + 21 * 4096


def test_mixture_counts_chosen_experts_only():
    model = load_model("mixtral-8x7b")
    dense_equivalent = 32 * (model.attention_matmul_parameters + 2 * 3 * 4096 * 14336 + 4096 * 8) + 32000 * 4096
    assert model.matmul_parameters() == dense_equivalent


def test_tied_head_is_multiplied_though_it_has_no_parameters():
    model = load_model("llama3.2-1b")
    assert model.head_parameters == 0
    assert model.matmul_parameters() == model.layer_matmul_parameters + 128256 * 2048


def test_latent_attention_scores_use_its_own_widths():
    model = load_model("deepseek-v3")
    assert model.attention_flops_per_token(1, causal=False) == 2 * 128 * (192 + 128) * 61


@pytest.mark.parametrize("name", shipped_models())
def test_the_parts_of_a_model_add_up(name):
    model = load_model(name)
    layers = model.dense_layers * model.dense_layer_parameters if model.dense_layers else 0
    layers += model.moe_layers * model.moe_layer_parameters if model.moe else 0
    ends = model.embedding_parameters + model.head_parameters + model.norm_parameters
    assert layers + ends == model.parameters
