"""Attention over keys that an indexer chooses: kernels and modules by themselves, what is cached, and no training."""

from __future__ import annotations

import pytest

from planner.question.flags import Flags
from planner.search.answer import search_question
from simulator.config.hf_config import load_model
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.request_bytes import cache_bytes_per_token
from topology.catalog.clusters import cluster
from topology.errors import BadModel

GLM = load_model("zai-org/GLM-5")  # 64 heads, an indexer of 32 heads of 128 that chooses 2,048 keys
EIGHT = Pool(tp=8)


def pass_of(machine: str, engine: str = "sglang", cache: str = "bfloat16") -> ForwardPass:
    deployment = Deployment(engine=engine, pool=EIGHT, weights="float8", kv_cache=cache)
    return ForwardPass(GLM, cluster(machine, 8), deployment, EIGHT)


@pytest.mark.parametrize(
    ("machine", "engine", "cache", "tokens", "measured_ms"),
    [
        ("dgx-h200", "sglang", "bfloat16", 4096, 2.63), ("dgx-h200", "sglang", "bfloat16", 8192, 5.16),
        ("dgx-h200", "sglang", "float8", 8192, 7.43), ("dgx-b200", "sglang", "bfloat16", 8192, 4.69),
        ("dgx-b200", "sglang", "float8", 8192, 2.35), ("dgx-b200", "sglang", "float8", 16_384, 5.13),
        ("dgx-h200", "vllm", "bfloat16", 8192, 5.92), ("dgx-b200", "vllm", "bfloat16", 8192, 4.66),
        ("dgx-h200", "trtllm", "bfloat16", 8192, 13.22), ("dgx-b200", "trtllm", "bfloat16", 8192, 3.73),
    ],
)  # fmt: skip
def test_a_prompt_beside_modules_by_themselves(
    machine: str, engine: str, cache: str, tokens: int, measured_ms: float
) -> None:
    """Attention of one layer of GLM-5 with 8 heads a GPU, projections in blocks of float8
    (ai-dynamo/aiconfigurator 0.12, systems/data/*/sparse_attention, dsa_context_module_perf.parquet).
    """
    costs = pass_of(machine, engine, cache)
    parts = costs.parts(prompt_tokens=tokens, pairs=tokens * (tokens + 1) / 2, sequences=0, keys=0.0)
    assert 1e3 * (parts["attention"] + parts["attention_products"]) / GLM.layers == pytest.approx(measured_ms, rel=0.2)


def test_short_prompts_meet_all_keys_and_long_answers_no_more_than_are_chosen() -> None:
    costs = pass_of("dgx-h200")

    def attention_s(**step: float) -> float:
        return costs.parts(prompt_tokens=0, pairs=0.0, sequences=32, **step)["attention"]  # type: ignore[arg-type]

    short = costs.parts(prompt_tokens=2048, pairs=2048 * 2049 / 2, sequences=0, keys=0.0)["attention"]
    assert short == pytest.approx(GLM.layers * costs.attention.prompts.seconds(2048, 2048 * 2049 / 2))
    grown = attention_s(keys=32 * 100_000.0) - attention_s(keys=32 * 50_000.0)
    index_bytes = 32 * 50_000 * 132 * GLM.layers  # a key of 128 bytes and its scale
    all_keys = 32 * 50_000 * 576 * 2 * GLM.layers
    rate = cluster("dgx-h200", 8).slowest_kind.memory_bytes_per_s
    assert index_bytes / rate < grown < 0.5 * all_keys / rate


def test_the_key_of_the_indexer_is_cached_on_each_rank() -> None:
    assert cache_bytes_per_token(GLM, EIGHT, "bfloat16") == 78 * (576 * 2 + 128 + 4)


def test_training_is_refused_with_the_reason() -> None:
    with pytest.raises(BadModel, match="serving only") as refused:
        search_question(Flags(model="deepseek-ai/DeepSeek-V3.2", cluster="dgx-h100"), "torchtitan")

    assert "an indexer chooses" in refused.value.why
