"""The decoder's parts against plain float64 arithmetic, written out from the papers and sharing no code with it."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from executor.model.decoder import (  # noqa: E402 - as above
    ROPE_BASE,
    Decoder,
    init_weights,
)
from simulator.config.hf_config import load_model  # noqa: E402 - as above
from simulator.config.model import LatentAttention, MixtureOfExperts, Model  # noqa: E402 - as above

BASE = {
    "name": "tiny",
    "family": "x",
    "layers": 2,
    "hidden": 24,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 6,
    "ffn": 40,
    "vocab": 64,
}
LATENT = LatentAttention(q_lora_rank=10, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
MOE = MixtureOfExperts(experts=4, experts_per_token=2, ffn=16)


def tiny(**changes: object) -> Model:
    return Model(**{**BASE, **changes})


MODELS = {
    "grouped": tiny(qkv_bias=True, qk_norm=True),
    "window": tiny(sliding_window=3, sliding_layers=1),
    "latent": tiny(latent=LATENT, kv_heads=4),
    "latent-plain-queries": tiny(
        latent=LatentAttention(q_lora_rank=0, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5),
        kv_heads=4,
    ),
    "shared": tiny(moe=MixtureOfExperts(experts=4, experts_per_token=2, ffn=16, shared_ffn=12, dense_layers=1)),
    "gated": tiny(moe=MixtureOfExperts(experts=4, experts_per_token=2, ffn=16, shared_ffn=12, shared_gate=True)),
    "biased": tiny(moe=MixtureOfExperts(experts=4, experts_per_token=2, ffn=16, router_bias=True)),
}


def norm(x, weight):
    return x / ((x**2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x, position: int):
    """Rotate the pairs (i, i + d/2) of one head's vector by position x base^(-2i/d)."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * ROPE_BASE ** (-2 * i / len(x))
        c, s = math.cos(angle), math.sin(angle)
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return out


def attend(queries, keys, values, window: int):
    """Attention of one head, query by query; all (S, width)."""
    rows = []
    for t in range(len(queries)):
        first = max(0, t - window + 1) if window else 0
        scores = (keys[first : t + 1] @ queries[t]) / math.sqrt(queries.shape[1])
        weights = (scores - scores.max()).exp()
        rows.append(weights / weights.sum() @ values[first : t + 1])
    return torch.stack(rows)


def attention(w, x, model: Model, window: int):
    def turn(rows):
        return torch.stack([rotated(row, t) for t, row in enumerate(rows)])

    heads = []
    if model.latent is None:
        d, group = model.head_dim, model.heads // model.kv_heads
        q, k, v = (x @ w[f"{n}.weight"].T + w.get(f"{n}.bias", 0) for n in ("wq", "wk", "wv"))
        for h in range(model.heads):
            mine, theirs = slice(h * d, h * d + d), slice(h // group * d, h // group * d + d)
            qh, kh = q[:, mine], k[:, theirs]
            if model.qk_norm:
                qh, kh = norm(qh, w["q_norm.weight"]), norm(kh, w["k_norm.weight"])
            heads.append(attend(turn(qh), turn(kh), v[:, theirs], window))
    else:
        m = model.latent
        n, r, v = m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim
        narrow = norm(x @ w["wq_a.weight"].T, w["q_norm.weight"]) if m.q_lora_rank else x
        q = narrow @ w["wq_b.weight"].T
        down = x @ w["wkv_a.weight"].T
        up = norm(down[:, : m.kv_lora_rank], w["kv_norm.weight"]) @ w["wkv_b.weight"].T
        shared = turn(down[:, m.kv_lora_rank :])
        for h in range(model.heads):
            qh, kv = q[:, h * (n + r) : (h + 1) * (n + r)], up[:, h * (n + v) : (h + 1) * (n + v)]
            queries = torch.cat((qh[:, :n], turn(qh[:, n:])), 1)
            heads.append(attend(queries, torch.cat((kv[:, :n], shared), 1), kv[:, n:], window))
    return torch.cat(heads, 1) @ w["wo.weight"].T


def swiglu(x, w1, w2, w3):
    gate = x @ w1.T
    return (gate * torch.sigmoid(gate) * (x @ w3.T)) @ w2.T


def sparse(w, x, moe: MixtureOfExperts):
    rows = []
    for token in x:
        scores = (w["router.weight"] @ token).softmax(0)
        ranked = scores + w.get("router_bias", torch.zeros(moe.experts))
        chosen = sorted(range(moe.experts), key=lambda e: -ranked[e].item())[: moe.experts_per_token]
        total = sum(scores[e] for e in chosen)
        out = sum(
            scores[e] / total * swiglu(token, w["experts.w1"][e], w["experts.w2"][e], w["experts.w3"][e])
            for e in chosen
        )
        if moe.shared_ffn:
            one = swiglu(token, *(w[f"shared.w{i}.weight"] for i in (1, 2, 3)))
            out = out + (one * torch.sigmoid(w["shared_gate.weight"] @ token) if moe.shared_gate else one)
        rows.append(out)
    return torch.stack(rows)


def forward(weights, tokens, model: Model):
    """Return logits (S, V) of one sequence."""

    def part(prefix):
        return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}

    x = weights["tok_embeddings.weight"][tokens]
    for layer in range(model.layers):
        w = part(f"layers.{layer}.")
        inner = norm(x, w["attention_norm.weight"])
        x = x + attention(part(f"layers.{layer}.attention."), inner, model, model.layer_kinds[layer].window)
        inner = norm(x, w["ffn_norm.weight"])
        if model.layer_kinds[layer].sparse:
            x = x + sparse(part(f"layers.{layer}.moe."), inner, model.moe)
        else:
            x = x + swiglu(inner, *(w[f"feed_forward.w{i}.weight"] for i in (1, 2, 3)))
    return norm(x, weights["norm.weight"]) @ weights["output.weight"].T


@pytest.mark.parametrize("name", MODELS)
def test_the_decoder_computes_what_is_written_in_the_papers(name: str) -> None:
    """Logits and every gradient, to 2^10 units in the last place of float64, of weights wide enough to matter."""
    model = MODELS[name]
    decoder = Decoder(model).double()
    init_weights(decoder, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():  # norms, biases and attention that differ from their start
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    tokens = torch.randint(model.vocab, (2, 9), generator=generator)
    decoder.set_positions(torch.arange(9), torch.float64)

    found = decoder(tokens)
    found.square().sum().backward()

    plain = {key: value.detach().clone().requires_grad_() for key, value in decoder.named_parameters()}
    expected = torch.stack([forward(plain, row, model) for row in tokens])
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=2**-42, atol=2**-42 * float(expected.detach().abs().max()))
    for key, parameter in decoder.named_parameters():
        if not parameter.requires_grad:
            continue
        theirs = plain[key].grad
        torch.testing.assert_close(
            parameter.grad,
            theirs,
            rtol=0,
            atol=2**-38 * float(theirs.abs().max()),
            msg=lambda said, key=key: f"{key}: {said}",
        )


def test_layers_are_made_as_their_kinds_say() -> None:
    moe = MixtureOfExperts(experts=4, experts_per_token=2, ffn=16, dense_layers=2, dense_layer_ids=(0, 2))
    model = tiny(layers=4, sliding_window=8, sliding_layers=(3,), moe=moe)

    blocks = Decoder(model).layers.values()

    assert [block.moe is not None for block in blocks] == [False, True, False, True]
    assert [block.attention.core.window for block in blocks] == [0, 0, 0, 8]


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite", "mistral-7b"])
def test_models_of_these_kinds_have_as_many_parameters_as_their_shapes_say(name: str) -> None:
    model = load_model(name)
    with torch.device("meta"):
        decoder = Decoder(model)

    assert sum(p.numel() for p in decoder.parameters()) == model.parameters
