"""Kernels of serving next to published times of kernels by themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from simulator.config.model import MixtureOfExperts
from simulator.serving.engine import engine_of
from simulator.serving.expert_choice import on_fullest_rank
from simulator.serving.kernels import Kernels, windowed_pairs
from topology.catalog.clusters import cluster
from topology.catalog.gpus import gpu_kind


@pytest.mark.parametrize(
    ("hidden", "width", "experts", "measured_ms"),
    [
        (7168, 2048 // 16, 256, {1024: 0.486, 4096: 1.102, 16384: 3.578}),
        (6144, 2048 // 8, 256, {64: 0.283, 256: 0.370, 1024: 0.559, 3072: 1.025}),
        (7168, 2048, 384, {96: 3.06, 8192: 14.0, 16384: 23.3}),
    ],
)
def test_products_of_experts_beside_kernels_by_themselves(
    hidden: int, width: int, experts: int, measured_ms: dict[int, float]
) -> None:
    """Both products of 8 experts a token in float8 blocks on one H200 (vLLM 0.20, ai-dynamo/aiconfigurator
    moe_perf.txt).
    """
    kernels = Kernels(gpu=cluster("dgx-h200", 1).slowest_kind, weights="float8")
    tokens = np.array([float(count) for count in measured_ms])
    visited = experts * (1 - (1 - 8 / experts) ** tokens)
    found = kernels.expert_products(8 * tokens, visited, 2 * width, hidden)
    found = found + kernels.expert_products(8 * tokens, visited, hidden, width)
    found = found + kernels.moved(2.0 * 8 * tokens * hidden * 2, 0.0)
    assert 1e3 * found == pytest.approx(np.array(list(measured_ms.values())), rel=0.23)


@pytest.mark.parametrize(
    ("machine", "program", "stored", "shape", "measured_ms"),
    [
        ("dgx-h200", "vllm", "int4", (7168, 2048 // 8, 8, 384), {1: 0.035, 64: 0.401, 1024: 0.806, 8192: 4.074}),
        ("dgx-h200", "sglang", "float8", (6144, 2048 // 8, 8, 256), {1: 0.034, 64: 0.393, 1024: 0.478, 8192: 1.747}),
        ("dgx-b200", "sglang", "float4", (6144, 2048 // 8, 8, 256), {1: 0.018, 64: 0.132, 1024: 0.209, 8192: 0.500}),
        ("dgx-b200", "trtllm", "float4", (7168, 2048 // 8, 8, 256), {1: 0.022, 64: 0.154, 1024: 0.238, 8192: 0.597}),
        ("dgx-b200", "trtllm", "float8", (6144, 2048 // 8, 8, 256), {1: 0.032, 256: 0.222, 1024: 0.349, 8192: 1.057}),
        ("dgx-b200", "trtllm", "mxfp4", (2880, 2880, 4, 128), {1: 0.025, 64: 0.275, 1024: 0.312, 8192: 0.884}),
    ],
)
def test_listed_kernels_of_experts(
    machine: str, program: str, stored: str, shape: tuple[int, int, int, int], measured_ms: dict[int, float]
) -> None:
    """Shapes of GLM-5, Kimi K2, DeepSeek-R1 and gpt-oss-120b, evenly loaded (ai-dynamo/aiconfigurator
    moe_perf.parquet; DeepSeek-R1's of the same kernels as vLLM 0.19 calls them, where its router keeps all groups).
    """
    hidden, width, chosen, experts = shape
    kernels = Kernels(gpu=cluster(machine, 1).slowest_kind, weights=stored, program=program)
    rows = chosen * np.array([float(count) for count in measured_ms])
    found = kernels.experts_s(rows, np.minimum(rows, experts), experts, hidden, width, 2)
    assert 1e3 * found == pytest.approx(np.array(list(measured_ms.values())), rel=0.30)


@pytest.mark.parametrize(("ranks", "measured_ms"), [(4, {1024: 0.116, 8192: 0.409}), (8, {1024: 0.085, 8192: 0.321})])
def test_experts_of_a_rank_pass_the_tokens_of_others(ranks: int, measured_ms: dict[int, float]) -> None:
    """DeepSeek-R1's experts in nvfp4, each cut over four GPUs, SGLang 0.5.14 on B300 (ai-dynamo/aiconfigurator
    @095f58a5, moe_perf.parquet, power_law_1.01): a rank with an eighth of the experts is not eight times as quick.
    """
    kernels = Kernels(gpu=gpu_kind("B300 SXM"), weights="float4", program="sglang")
    tokens = np.array([float(count) for count in measured_ms])
    here = 256 / ranks
    own = kernels.experts_s(8 * tokens / ranks, np.full(2, here), here, 7168, 2048 // 4, 2)
    found = own + kernels.passed_by_s(tokens * (1 - 1 / ranks), 7168)

    assert 1e3 * found == pytest.approx(np.array(list(measured_ms.values())), rel=0.35)


@pytest.mark.parametrize(
    ("gpu", "bits", "measured_us"),
    [
        ("B200 SXM", 8, {8: 105, 16: 105, 32: 159, 64: 138, 128: 164}),
        ("B200 SXM", 16, {8: 224, 16: 228, 32: 326, 64: 240, 128: 288}),
    ],
)
def test_latent_attention_by_heads(gpu: str, bits: int, measured_us: dict[int, float]) -> None:
    """128 answers with 8,192 keys each, SGLang 0.5.14 (ai-dynamo/aiconfigurator @095f58a5,
    generation_mla_perf.parquet): 32 heads take longer than 64. Of each 9 us are the kernel with hardly any keys.
    """
    kernels = Kernels(gpu=gpu_kind(gpu), weights="float8", program="sglang")
    for heads, measured in measured_us.items():
        found = 128 * 8192 * kernels.latent_key_s(heads, 2.0 * heads * 1088, 576 * bits / 8, bits)
        assert 1e6 * found + 9 == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize("ranks", [1, 8])
def test_popular_experts_are_multiplied_while_the_rest_are_read(ranks: int) -> None:
    """DeepSeek-R1's experts in blocks of 8 bits, whole on eight GPUs or cut over eight, on the fullest rank under
    uneven loads: TensorRT-LLM 1.3.0rc20 on H200 (ai-dynamo/aiconfigurator @095f58a5, moe_perf.parquet,
    power_law_1.01). No constant was fitted to such loads.
    """
    measured = {
        8: {1024: 0.557, 2048: 0.764, 4096: 1.168, 8192: 2.175, 16384: 4.010},
        1: {1024: 1.104, 2048: 1.730, 4096: 2.829, 8192: 5.151, 16384: 9.800},
    }[ranks]
    kernels = Kernels(gpu=gpu_kind("H200 SXM"), weights="float8", experts="cutlass", program="trtllm")
    moe = MixtureOfExperts(experts=256, experts_per_token=8, ffn=2048)
    tokens = np.array([float(count) for count in measured])
    visited, rows = on_fullest_rank(moe, tokens, ranks, 256 // ranks)

    found = kernels.experts_s(rows, visited, 256 / ranks, 7168, 2048 * ranks / 8, 2)

    assert 1e3 * found == pytest.approx(np.array(list(measured.values())), rel=0.17)


def test_tensorrt_llm_1_2_takes_longer_on_hopper() -> None:
    """32 of DeepSeek-R1's experts evenly loaded, and latent attention of one answer with 64 keys, on H200 (1.2.0rc5 and
    1.3.0rc20, ai-dynamo/aiconfigurator @095f58a5, moe_perf.parquet and generation_mla_perf.parquet).
    """
    measured_ms = {"trtllm12": {1: 0.054, 512: 0.419, 16384: 2.725}, "trtllm": {1: 0.040, 512: 0.397, 16384: 2.499}}
    latent_us = {}
    for release, times in measured_ms.items():
        engine = engine_of(release)
        kernels = Kernels(
            gpu=gpu_kind("H200 SXM"),
            weights="float8",
            experts=engine.experts,
            program=engine.program,
            slower=engine.slower,
        )
        rows = np.array([float(count) for count in times])
        visited = 32 * (1 - (1 - 8 / 256) ** rows)
        found = kernels.experts_s(rows, visited, 32, 7168, 2048, 2)
        assert 1e3 * found == pytest.approx(np.array(list(times.values())), rel=0.12)
        latent_us[release] = [1e6 * kernels.attention_start_s(heads, latent=True) for heads in (16, 128)]
    assert np.subtract(latent_us["trtllm12"], latent_us["trtllm"]) == pytest.approx([24.5 - 11.4, 28.8 - 19.1], rel=0.2)


def test_products_are_as_quick_as_a_gpus_power_allows() -> None:
    """The largest products that searches found on cards with much power for their arithmetic, TFLOP/s in 16 bits
    (`achieved_flops` of the catalog).
    """
    found = {"RTX 4090": 165, "RTX 5090": 236, "H20": 142, "A10G": 70}
    for name, tflops in found.items():
        reached = Kernels(gpu=gpu_kind(name), weights="bfloat16").product_flops_per_s / 1e12
        assert reached == pytest.approx(tflops, rel=0.01), name


@pytest.mark.parametrize(("powered", "measured_s"), [(1.0, 1.651e-3), (math.inf, 1.380e-3)])
def test_a_large_product_at_the_power_limit_and_at_full_clocks(powered: float, measured_s: float) -> None:
    """8,192 x 8,192 x 8,192 in 16 bits on one H200, alone and a fifth of the time (examples/validation/kernels.md)."""
    kernels = Kernels(gpu=gpu_kind("H200 SXM"), weights="bfloat16", powered=powered)
    assert kernels.product(np.array([8192.0]), 8192, 8192)[0] == pytest.approx(measured_s, rel=0.05)


@pytest.mark.parametrize(
    ("gpu", "engine", "window", "microseconds"),
    [
        ("H200 SXM", "vllm", 0, {(64, 1024): 45, (64, 4096): 331, (64, 16384): 4347, (8, 1024): 21, (8, 8192): 170}),
        ("H200 SXM", "vllm", 128, {(64, 1024): 30, (64, 4096): 100, (64, 16384): 365, (8, 1024): 15, (8, 8192): 31}),
        ("H200 SXM", "trtllm", 0, {(64, 1024): 66, (64, 4096): 412, (64, 16384): 4946, (8, 1024): 27, (8, 8192): 224}),
        ("H200 SXM", "trtllm", 128, {(64, 1024): 59, (64, 4096): 186, (64, 16384): 657, (8, 1024): 24, (8, 8192): 62}),
        ("B200 SXM", "vllm", 128, {(64, 1024): 28, (64, 4096): 74, (64, 16384): 277, (8, 1024): 15, (8, 8192): 28}),
        ("B200 SXM", "trtllm", 128, {(64, 1024): 41, (64, 4096): 114, (64, 16384): 424, (8, 1024): 21, (8, 8192): 42}),
    ],
)
def test_attention_over_a_prompt_beside_kernels_by_themselves(
    gpu: str, engine: str, window: int, microseconds: dict[tuple[int, int], float]
) -> None:
    """gpt-oss' heads of 64, eight for a key head, whole and within its window: vLLM 0.24 and TensorRT-LLM 1.3.0rc20
    (ai-dynamo/aiconfigurator 0.12, context_attention_perf.parquet). Nothing was fitted to windows.
    """
    kernels = Kernels(gpu=gpu_kind(gpu), weights="bfloat16", program=engine)
    for (heads, tokens), measured in microseconds.items():
        prompt = kernels.prompt_attention(heads, heads / 8, 64, 64)
        seconds = prompt.seconds(tokens, tokens * (tokens + 1) / 2, window=window)
        whole = seconds + kernels.attention_start_s(heads, latent=False)
        assert 1e6 * whole == pytest.approx(measured, rel=0.26), (heads, tokens)


def test_a_query_meets_the_keys_of_its_window() -> None:
    """Counted one by one, with earlier tokens of the same prompt and without."""
    for tokens, longest, window in ((1, 1, 4), (7, 7, 4), (7, 20, 4), (5, 9, 7), (9, 9, 9), (3, 5, 100)):
        keys = range(longest - tokens + 1, longest + 1)
        assert windowed_pairs(tokens, longest, window) == sum(min(key, window) for key in keys)
