"""Steps and caches against counts by hand and published figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simulator.config.hf_config import load_model
from simulator.config.model import Model
from simulator.serving.deployment import Deployment, Pool, made_even
from simulator.serving.engine import engine_of
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.kernel_tables import reduce_kernels
from simulator.serving.kernels import Kernels
from simulator.serving.kv_cache import cache_capacity, weight_bytes
from simulator.serving.request_bytes import cache_bytes_per_token
from simulator.serving.server import serve
from simulator.serving.step_collectives import StepCollectives
from simulator.serving.traffic import Lengths, Traffic
from topology.catalog.clusters import cluster, cluster_from_case
from topology.catalog.gpus import gpu_kind
from topology.cluster import Cluster

LLAMA8, LLAMA70, DEEPSEEK = (load_model(name) for name in ("llama3-8b", "llama2-70b", "deepseek-v3"))


def costs(model: str, machine: Cluster, **deployment: object) -> ForwardPass:
    chosen = Deployment(**deployment)  # type: ignore[arg-type]
    return ForwardPass(load_model(model), machine, chosen, chosen.pool)


def token_s(passes: ForwardPass, sequences: int = 1, context: int = 100) -> float:
    return passes.seconds(prompt_tokens=0, pairs=0.0, sequences=sequences, keys=float(sequences * context))


def test_the_cache_of_a_token_by_hand() -> None:
    """Llama 3 8B: 32 layers, 8 heads of 128, keys and values of 2 bytes. DeepSeek-V3: 576 numbers in each of 61
    layers.
    """
    assert cache_bytes_per_token(LLAMA8, Pool(), "bfloat16") == 32 * 8 * 128 * 2 * 2
    assert cache_bytes_per_token(LLAMA8, Pool(tp=4), "float8") == 32 * 2 * 128 * 2
    assert cache_bytes_per_token(LLAMA8, Pool(tp=16), "bfloat16") == 32 * 1 * 128 * 2 * 2, "a head is not cut"
    assert cache_bytes_per_token(DEEPSEEK, Pool(tp=8), "bfloat16") == 61 * 576 * 2, "latent vectors are repeated"


def test_weights_add_up_to_the_model() -> None:
    for model in (LLAMA8, LLAMA70, DEEPSEEK):
        assert weight_bytes(model, Pool(), "bfloat16") == pytest.approx(2 * model.parameters, rel=0.001)
        ep = 8 if model.moe else 1
        assert 8 * weight_bytes(model, Pool(tp=8, ep=ep), "bfloat16") == pytest.approx(2 * model.parameters, rel=0.03)


def test_latent_attention_keeps_16_bits_in_nvfp4_but_for_its_output() -> None:
    """DeepSeek-V3 in nvfp4: 4.2 B weights of attention and 1.9 B of the ends in 2 bytes, others in 9/16. The files of
    nvidia/DeepSeek-R1-0528-FP4-v2 list 393.6 B numbers, two packed weights or a scale counted as one, with the
    prediction layer in 16 bits and its own copies of the ends.
    """
    wide = 4.22e9 + 1.85e9
    stored = weight_bytes(DEEPSEEK, Pool(), "float4")
    assert stored == pytest.approx(2 * wide + (671e9 - wide) * 9 / 16, rel=0.002)
    wide = (stored - 9 / 16 * DEEPSEEK.parameters) / (2 - 9 / 16)
    copies = DEEPSEEK.embedding_parameters + DEEPSEEK.head_parameters
    listed = wide + 9 / 16 * (DEEPSEEK.parameters - wide) + DEEPSEEK.multi_token_parameters + copies
    assert listed == pytest.approx(393.6e9, rel=0.001)


def test_compressing_projections_and_routers_are_on_every_rank() -> None:
    """DeepSeek-V3's config.json: 61 layers of 7,168, compressed to 1,536 and 512 + 64, and 58 routers of 256 experts.
    All else is divided, so that twice a half less the whole is what every rank has.
    """
    whole, half = (weight_bytes(DEEPSEEK, Pool(tp=tp), "bfloat16") for tp in (1, 2))

    assert 2 * half - whole == pytest.approx(2 * 7168 * (61 * (1536 + 512 + 64) + 58 * 256), rel=2e-3)


@pytest.mark.parametrize(
    ("machine", "stored", "measured_us"),
    [
        ("dgx-b200", "float8", {(1536, 7168): 11.0, (7168, 2048): 9.1, (7168, 16_384): 28.2}),
        ("dgx-b200", "float4", {(4096, 7168): 9.6, (7168, 2048): 5.6, (7168, 16_384): 19.4}),
        ("dgx-b200", "bfloat16", {(1536, 7168): 8.3, (2560, 7168): 10.4, (7168, 16_384): 41.8}),
        ("dgx-h200", "float8", {(1536, 7168): 12.7, (7168, 2048): 8.9, (7168, 16_384): 37.5}),
        ("dgx-h200", "bfloat16", {(1536, 7168): 10.3, (2560, 7168): 13.8, (7168, 16_384): 65.4}),
    ],
)
def test_products_of_few_rows_beside_kernels_by_themselves(
    machine: str, stored: str, measured_us: dict[tuple[int, int], float]
) -> None:
    """Sixteen rows, with their cast in 8 and 4 bits: means of the engines' tables that the constants were fitted to
    (ai-dynamo/aiconfigurator 0.12 systems/data, gemm_perf.parquet), within 20 %, where weights alone at the memory's
    rate would take 40 to 60 % less.
    """
    kernels = Kernels(gpu=cluster(machine, 1).slowest_kind, weights=stored)
    found = [float(kernels.product(np.array([16.0]), *shape)[0]) for shape in measured_us]
    assert 1e6 * np.array(found) == pytest.approx(np.array(list(measured_us.values())), rel=0.2)


@pytest.mark.parametrize(
    ("engine", "machine", "ranks", "measured_us"),
    [
        ("vllm", "dgx-h200", 8, {16: 5.7, 512: 14.1, 4096: 48.4}),
        ("sglang059", "dgx-b200", 8, {16: 8.3, 512: 27.2, 2048: 46.5}),
        ("trtllm", "dgx-b200", 4, {16: 5.4, 512: 9.7, 4096: 47.0}),
        ("sglang059", "dgx-a100", 8, {4: 6.4, 64: 11.4, 1024: 28.7}),
    ],
)
def test_all_reduces_beside_kernels_by_themselves(
    engine: str, machine: str, ranks: int, measured_us: dict[int, float]
) -> None:
    """So many thousand elements of 16 bits in a graph (the same tables, custom_allreduce_perf.parquet), within 16 %."""
    gpu = cluster(machine).slowest_kind
    kernels = reduce_kernels()[engine, gpu.architecture.lower()]
    link = gpu.nvlink_links * gpu.nvlink_bytes_per_s
    found = kernels.seconds(2048.0 * np.array(list(measured_us)), ranks, link)
    assert 1e6 * found == pytest.approx(np.array(list(measured_us.values())), rel=0.16)


@pytest.mark.parametrize(
    ("kernel", "measured_us"),
    [("flashinfer", [12.3, 14.1, 16.5, 22.4]), ("mnnvl", [11.0, 12.7, 13.4, 14.7])],
)
def test_a_sum_takes_its_norm_along(kernel: str, measured_us: list[float]) -> None:
    """So many rows of 7,168 numbers over eight B200 with the residual and the norm after it (flashinfer-ai/flashinfer
    issue 3671). No kernel without the norm, though sooner done, stands for it.
    """
    sums = StepCollectives(cluster=cluster("dgx-b200", 8), kernels=(kernel, "sglang", "nccl"), generation="blackwell")
    found = sums.all_reduce(np.array([4.0, 16.0, 32.0, 64.0]) * 2 * 7168, 8)
    assert 1e6 * found == pytest.approx(np.array(measured_us), rel=0.05)


def test_what_early_vllm_takes_on_two_gpus() -> None:
    """Eight answers of 256 tokens of Llama 3.1 8B on two A100 took 2.30 s with vLLM of 2024-10 (vllm-project/vllm pull
    request 9856); on one GPU nothing is sent to other processes.
    """
    machine, asked = cluster("dgx-a100", 2), Traffic(prompt=Lengths(mean=128), output=Lengths(mean=256), concurrency=8)
    two = Deployment(engine="vllm07", pool=Pool(tp=2))
    served = serve(load_model("llama3-8b"), machine, two, replace(asked, requests=8))
    assert served.seconds == pytest.approx(2.30, rel=0.05)
    of = [ForwardPass(load_model("llama3-8b"), machine, two, pool).engine.host_step_s for pool in (Pool(), two.pool)]
    assert of[0] == engine_of("vllm07").host_step_s < of[1]


@pytest.mark.parametrize("tokens", [1, 64])
def test_shared_experts_next_to_routed_ones_cost_what_they_read(tokens: int) -> None:
    """SGLang computes DeepSeek-V3's on a second stream: the layer takes no less than without any shared expert, and
    less than one after the other, which an engine without that stream does.
    """
    assert DEEPSEEK.moe is not None
    alone = replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, shared_ffn=0))

    def experts_s(network: Model, engine: str) -> float:
        deployment = Deployment(engine=engine, pool=Pool(tp=8), weights="float8")
        costs = ForwardPass(network, cluster("dgx-b200", 8), deployment, Pool(tp=8))
        return costs.parts(prompt_tokens=0, pairs=0.0, sequences=tokens, keys=1.0)["experts"]

    parallel, without = experts_s(DEEPSEEK, "sglang"), experts_s(alone, "sglang")
    after = experts_s(DEEPSEEK, "torch") - experts_s(alone, "torch")
    assert 0 < parallel - without < 0.5 * after


def test_where_no_kernels_are_listed_sums_are_as_anywhere() -> None:
    """Ada has no table: an engine's sums are those of any memory that ranks share, or NCCL's."""
    sizes = np.array([2.0**14, 2.0**20, 2.0**26])
    found = [
        StepCollectives(cluster=cluster("dgx-a100", 8), kernels=kernels, generation="ada").all_reduce(sizes, 8)
        for kernels in (("vllm", "nccl"), ("one_shot", "two_shot", "nccl"))
    ]
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize(("rows", "tflops"), [(4096, 1500), (16_384, 1510)])
def test_products_on_blackwell_reach_what_engines_measure(rows: int, tflops: float) -> None:
    """16-bit products 7,168 wide and deep on B200, as vLLM 0.24, SGLang 0.5.14 and TensorRT-LLM 1.3 have them by
    themselves (ai-dynamo/aiconfigurator 0.12 systems/data/b200_sxm/gemm: medians of widths and depths from 4,096 on).
    """
    kernels = Kernels(gpu=cluster("dgx-b200").slowest_kind, weights="bfloat16")
    seconds = float(kernels.product(np.array([float(rows)]), 7168, 7168)[0])
    assert 2 * rows * 7168**2 / seconds / 1e12 == pytest.approx(tflops, rel=0.2)


def test_llama2_70b_on_four_a6000() -> None:
    """A quarter of 68.98 B weights and 80 KiB of cache a token on each GPU: what 0.92 of its memory leaves, activations
    off.
    """
    a6000 = cluster_from_case({"gpu": "rtx-a6000", "gpus_per_node": 4, "nodes": 1})[0]
    room = cache_capacity(LLAMA70, a6000, Deployment(), Pool(tp=4))
    assert room.by_category["weights"] == pytest.approx(2 * 68.98e9 / 4, rel=0.001)
    assert room.bytes_per_token == 80 * 2**10
    assert room.by_category["kv_cache"] == room.tokens * room.bytes_per_token
    left = 0.92 * room.capacity_bytes - 2 * 68.98e9 / 4
    assert 0.8 * left / (80 * 2**10) < room.tokens < left / (80 * 2**10)


@pytest.mark.parametrize(("tp", "tokens_per_s"), [(1, 104.9), (2, 168.8), (4, 254.0), (8, 328.4)])
def test_gpt_fast_on_a100(tp: int, tokens_per_s: float) -> None:
    """Llama-2-7B in bfloat16, batch 1, A100 80 GB at 330 W (meta-pytorch/gpt-fast, README): within 14 %."""
    passes = costs("llama2-7b", cluster("dgx-a100", 8), engine="torch", pool=Pool(tp=tp))
    assert 1 / token_s(passes) == pytest.approx(tokens_per_s, rel=0.14)


def test_a_step_costs_more_with_more_of_anything() -> None:
    passes = costs("llama3-8b", cluster("dgx-h100", 1))
    assert token_s(passes, 8) < token_s(passes, 64) < token_s(passes, 512)
    assert token_s(passes, 8, 100) < token_s(passes, 8, 10_000)
    reading = [passes.seconds(prompt_tokens=n, pairs=n * n / 2, sequences=0, keys=0.0) for n in (128, 1024, 8192)]
    assert reading == sorted(reading)


def test_narrow_weights_are_read_faster() -> None:
    machine = cluster("dgx-h100", 1)
    wide, narrow, narrowest = (
        token_s(costs("llama3-8b", machine, engine="torch", weights=w)) for w in ("bfloat16", "float8", "int4")
    )
    assert narrowest < narrow < wide
    assert wide / narrow < 2


def test_experts_that_no_token_chose_are_not_read() -> None:
    """One token visits 8 of 256 experts of a layer, 64 tokens about 222 of them."""
    passes = costs("deepseek-v3", cluster("dgx-h200", 8), weights="float8", pool=Pool(tp=8, ep=8), engine="torch")
    one, many = token_s(passes, 1), token_s(passes, 64)
    gib = load_model("deepseek-v3").one_expert_parameters * 58 / 8
    least = (222 - 8) * gib / passes.kernels.bytes_per_s
    assert many - one > 0.9 * least


def test_a_cache_across_windows_is_read_only_inside_them() -> None:
    passes = costs("gemma2-9b", cluster("dgx-h100", 1), engine="torch")
    window = passes.model.sliding_window
    short, longer, longest = (token_s(passes, 4, context) for context in (window, 2 * window, 4 * window))
    full = passes.model.layers - passes.model.windowed_layers
    assert (longest - longer) / (longer - short) == pytest.approx(2.0, rel=0.05)
    assert longer - short < 4 * window * passes.model.layers * passes.attention.key_s * (
        full / passes.model.layers + 0.1
    )


def test_parts_add_up_to_the_step() -> None:
    steps = [{"prompt_tokens": 0, "pairs": 0.0, "sequences": 700, "keys": 7e5}]
    steps += [{"prompt_tokens": 3000, "pairs": 4.5e6, "sequences": 40, "keys": 4e4, "readers": 3}]
    for model, pool in (
        ("llama3-8b", Pool(tp=2)),
        ("deepseek-v3", Pool(dp_attention=8, ep=8)),
        ("llama3-70b", Pool(tp=4, pp=2)),
    ):
        passes = costs(model, cluster("dgx-h200", 8), pool=pool, weights="float8")
        for step in steps:
            assert sum(passes.parts(**step).values()) == pytest.approx(passes.seconds(**step))


@pytest.mark.parametrize(
    ("machine", "gpus", "formats", "answers", "both", "published"),
    [
        ("gb200-nvl72", 48, ("float4", "float8"), 1408, False, 13_386),
        ("gb200-nvl72", 48, ("float8", "bfloat16"), 768, False, 9087),
        ("dgx-h100", 72, ("float8", "bfloat16"), 256, True, 22_282 / 8),
    ],
)
def test_wide_expert_parallel_as_published(
    machine: str, gpus: int, formats: tuple[str, str], answers: int, both: Any, published: float
) -> None:
    """DeepSeek-R1 writing answers with SGLang after prompts of 2,000 tokens, 32 experts held twice: output tokens a
    second and GPU by LMSYS, 2025-09-25 (GB200, 12 nodes) and 2025-05-05 (H100, nine), answers a GPU by their commands.
    The checkpoint in nvfp4 that guides named until then (NVIDIA/TensorRT-LLM PR 6610: DeepSeek-R1-0528-FP4) has the
    output of attention in 16 bits.
    """
    pool = made_even(Pool(dp_attention=gpus, ep=gpus), 256)
    assert pool.redundant_experts == 32
    weights, cache = formats
    passes = costs(
        "deepseek-v3",
        cluster(machine, gpus),
        engine="sglang",
        pool=pool,
        weights=weights,
        kv_cache=cache,
        two_batches=both,
        max_num_seqs=answers,
    )
    out = [
        DEEPSEEK.layers * passes.kernels.product(answers, DEEPSEEK.hidden, DEEPSEEK.heads * 128, stored=stored)
        for stored in ("bfloat16", weights)
    ]
    seconds = token_s(passes, answers * gpus, 2050) + (out[0] - out[1] if weights == "float4" else 0.0)
    assert answers / seconds == pytest.approx(published, rel=0.3)


@pytest.mark.parametrize(
    ("machine", "gpus", "weights", "tokens", "both", "published"),
    [
        ("gb200-nvl72", 4, "float4", 32_768, False, 26_156),
        ("gb200-nvl72", 4, "float8", 32_768, False, 18_471),
        ("dgx-h100", 32, "float8", 16_384, True, 6540),
    ],
)
def test_prompts_of_wide_expert_parallel_as_published(
    machine: str, gpus: int, weights: str, tokens: int, both: Any, published: float
) -> None:
    """DeepSeek-R1 reading prompts of 2,000 and 4,000 tokens with SGLang, so many a step of a rank: tokens a second and
    GPU by LMSYS, of the days above; on 32 GPUs in four nodes, each of which is sent a token once.
    """
    pool = made_even(Pool(dp_attention=gpus, ep=gpus), 256)
    passes = costs(
        "deepseek-v3", cluster(machine, gpus), engine="sglang", pool=pool, weights=weights, two_batches=both,
        max_num_batched_tokens=tokens,
    )  # fmt: skip
    length = 2048 if gpus == 4 else 4096
    readers = tokens * gpus // length
    step = passes.seconds(
        prompt_tokens=tokens * gpus, pairs=readers * length**2 / 2, sequences=0, keys=0.0, readers=readers
    )
    assert tokens / step == pytest.approx(published, rel=0.3)


def test_two_batches_hide_the_way_to_experts_behind_what_they_compute() -> None:
    """No more is hidden than there is to compute; halves compute no less than the whole."""
    pool, machine = Pool(dp_attention=16, ep=16), cluster("dgx-h100", 16)
    plain, halved = (
        costs("deepseek-v3", machine, pool=pool, weights="float8", two_batches=both) for both in (False, True)
    )
    for tokens in (16, 4096, 16_384):
        step = {"prompt_tokens": tokens, "pairs": 0.0, "sequences": 0, "keys": 0.0, "readers": min(16, tokens)}
        one, two = plain.parts(**step), halved.parts(**step)
        sent, left = one.pop("expert_exchange"), two.pop("expert_exchange")
        for outside in ("host", "launches"):
            one.pop(outside, None), two.pop(outside, None)
        assert sum(two.values()) >= sum(one.values()) * (1 - 1e-9)
        assert left + sum(two.values()) >= sent
        if tokens > 4096:
            assert left < 0.5 * sent


def test_a_prompt_is_on_one_rank_of_attention_with_requests_of_its_own() -> None:
    """One prompt on eight ranks is multiplied as long as one on each, nine as long as two on each, but experts."""
    passes = costs("deepseek-v3", cluster("dgx-h200", 8), pool=Pool(dp_attention=8, ep=8), weights="float8")
    one, eight, nine, sixteen = (
        passes.parts(prompt_tokens=1000 * n, pairs=5e5 * n, sequences=0, keys=0.0, readers=n) for n in (1, 8, 9, 16)
    )
    for part in ("attention_products", "expert_exchange", "small_kernels"):
        assert (one[part], nine[part]) == (pytest.approx(eight[part]), pytest.approx(sixteen[part]))
    assert one["experts"] < 0.5 * eight["experts"] < 0.5 * nine["experts"]


def test_a_prompt_is_scored_for_its_last_token_only() -> None:
    passes = costs("llama3-8b", cluster("dgx-h100", 1))
    short, long = (passes.parts(prompt_tokens=n, pairs=1.0, sequences=0, keys=0.0)["head"] for n in (16, 4096))
    assert short == long


def test_each_rank_of_attention_has_a_scheduler() -> None:
    """Eight ranks with requests of their own, behind one server, share what the host does for each sequence."""
    h200 = cluster("dgx-h200")
    own = costs("deepseek-v3", h200, engine="vllm013", pool=Pool(ep=8, dp_attention=8), weights="float8")
    step = own.parts(prompt_tokens=0, pairs=0.0, sequences=512, keys=512.0)
    assert step["host"] == pytest.approx(own.engine.host_step_s + 64 * own.engine.host_sequence_s)
    assert "launches" not in own.parts(prompt_tokens=0, pairs=0.0, sequences=4096, keys=4096.0), "512 a rank: one graph"


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    """gpt-oss: every other layer meets 128 tokens, so a request of 9,216 takes a little over half of its cache."""
    model, h100 = load_model("gpt-oss-120b"), cluster("dgx-h100")
    deployment = Deployment(weights="mxfp4", pool=Pool(tp=2))
    short, long = (cache_capacity(model, h100, deployment, deployment.pool, length=n).tokens for n in (128, 9216))
    assert long / short == pytest.approx(1 / (0.5 + 0.5 * 128 / 9216), rel=0.001)
    dense = [cache_capacity(LLAMA8, h100, Deployment(), Pool(), length=n).tokens for n in (0, 9216)]
    assert dense[0] == dense[1]


def test_a_captured_step_that_reads_takes_as_long_as_its_padding_and_launches_nothing() -> None:
    """1,000 tokens next to 20 answers are replayed from the graph of 1,024; nine prompts, 5,000 tokens and a prompt
    that an earlier step began have none.
    """
    passes = costs("llama3.2-1b", cluster("dgx-h200", 1), engine="meshwright")

    def step(prompt_tokens: int, readers: int = 1, pairs: float = 5e5) -> dict[str, float]:
        work = {"pairs": pairs, "sequences": 20, "keys": 2e4, "readers": readers}
        found = passes.parts(prompt_tokens=prompt_tokens, **work)
        assert sum(found.values()) == pytest.approx(passes.seconds(prompt_tokens=prompt_tokens, **work))
        return found

    assert step(1000) == step(1004)
    assert sum(step(1005).values()) > sum(step(1004).values())
    assert "launches" not in step(50)
    assert step(50, readers=9, pairs=150.0)["launches"] > 0
    rest = {"prompt_tokens": 50, "pairs": 1e4, "sequences": 20, "keys": 2e4}
    assert passes.seconds(**rest, resumes=True) > passes.launches.seconds > passes.seconds(**rest)
    assert step(5000)["feed_forward"] < step(5001)["feed_forward"]


@pytest.mark.parametrize(
    ("heads", "width", "microseconds"),
    [
        (32, 64, {(1024, 0): 34, (2048, 0): 101, (4096, 0): 304, (8192, 0): 1014, (16384, 0): 3685}),
        (4, 64, {(1024, 0): 24, (2048, 0): 39, (4096, 0): 73, (8192, 0): 226, (16384, 0): 680}),
        (32, 128, {(1024, 0): 57, (2048, 0): 171, (4096, 0): 510, (8192, 0): 1719, (16384, 0): 6382}),
        (8, 128, {(1024, 0): 36, (2048, 0): 65, (4096, 0): 197, (8192, 0): 601, (16384, 0): 1881}),
        (32, 128, {(128, 8192): 239, (512, 1024): 50, (512, 16384): 482, (2048, 2048): 364, (2048, 30720): 2976}),
        (8, 128, {(128, 8192): 232, (512, 1024): 50, (512, 16384): 466, (2048, 2048): 119, (2048, 30720): 905}),
    ],
)
def test_attention_of_a_prompt_against_the_kernel_by_itself(
    heads: int, width: int, microseconds: dict[tuple[int, int], float]
) -> None:
    """FlashAttention-2 of torch 2.11 on one H200 over prompts after as many cached tokens, causal, a key head for four
    heads. Fitted to those without cached tokens, with which waves of tiles decide.
    """
    kernels = Kernels(gpu=gpu_kind("h200-sxm"), weights="bfloat16", attention="flash2")
    prompt = kernels.prompt_attention(heads, heads / 4, width, width)
    for (tokens, cached), measured in microseconds.items():
        seconds = prompt.seconds(tokens, tokens * cached + tokens * (tokens + 1) / 2)
        assert 1e6 * seconds == pytest.approx(measured, rel=0.09 if cached else 0.16), (tokens, cached)


@pytest.mark.parametrize(
    ("gpu", "engine", "window", "microseconds"),
    [
        ("h200-sxm", "vllm", 0, {(16, 128): 11, (16, 8192): 75, (64, 4096): 144, (256, 128): 65, (256, 1024): 172}),
        ("h200-sxm", "vllm", 128, {(16, 8192): 15, (64, 4096): 33, (256, 128): 65}),
        ("b200-sxm", "trtllm", 0, {(16, 128): 11, (16, 8192): 50, (64, 4096): 88, (256, 128): 31, (1024, 128): 90}),
        ("b200-sxm", "trtllm", 128, {(16, 8192): 11, (64, 4096): 15, (256, 512): 31, (1024, 128): 91}),
    ],
)
def test_attention_of_answers_beside_kernels_by_themselves(
    gpu: str, engine: str, window: int, microseconds: dict[tuple[int, int], float]
) -> None:
    """gpt-oss' 64 heads of 64, eight for a key head, whole and within its window: vLLM 0.24 and TensorRT-LLM 1.3.0rc20
    (ai-dynamo/aiconfigurator 0.12, generation_attention_perf.parquet). Nothing was fitted to windows.
    """
    kernels = Kernels(gpu=gpu_kind(gpu), weights="bfloat16", program=engine)
    listed = kernels.listed_answers(16)
    for (answers, keys), measured in microseconds.items():
        met = answers * min(keys, window or keys)
        read_s = met * kernels.cached_key_s(2.0 * 64 * 2 * 64, 2.0 * 8 * 64 * 2, width=64, listed=listed)
        seconds = listed.fixed_s + listed.seconds(max(0, answers * 8 - kernels.gpu.sm_count), read_s)
        assert 1e6 * seconds == pytest.approx(measured, rel=0.3), (answers, keys)


@pytest.mark.parametrize(
    ("machine", "tp", "microseconds"),
    [
        ("dgx-h200", 8, {1: 49.3, 64: 58.6, 256: 85.9}),
        ("dgx-h200", 1, {1: 97.2, 64: 120.2, 256: 242.2}),
        ("dgx-b200", 8, {1: 43.6, 64: 49.4, 256: 64.2}),
        ("dgx-b200", 1, {1: 78.0, 64: 94.4, 256: 145.0}),
    ],
)
def test_blocks_of_latent_attention_beside_modules_by_themselves(
    machine: str, tp: int, microseconds: dict[int, float]
) -> None:
    """DeepSeek's attention of so many answers with 128 keys each, in blocks of 8 bits with such a cache, 128 heads over
    `tp` GPUs: TensorRT-LLM 1.3.0rc20 (ai-dynamo/aiconfigurator 0.12, mla_generation_module_perf.parquet).
    """
    deployment = Deployment(engine="trtllm", pool=Pool(tp=tp), weights="float8", kv_cache="float8")
    costs = ForwardPass(DEEPSEEK, cluster(machine, 8), deployment, Pool(tp=tp))
    small_s = 6 * costs.kernels.start_s
    for answers, measured in microseconds.items():
        seconds = float(costs._attention_products(np.array([float(answers)]))[0]) + small_s + costs.attention.start_s
        seconds += costs.attention.answers_s(answers, 128.0 * answers) / DEEPSEEK.layers
        assert 1e6 * seconds == pytest.approx(measured, rel=0.2), answers
