"""Rows of published serving points: what they state in words of their source, and which field cannot be read."""

from __future__ import annotations

from typing import Any

import pytest

from planner.validate.makers_settings import answers_of_rank
from planner.validate.offline_benchmark import benchmark_limits
from planner.validate.serving_points import read_point, validate_point
from planner.validate.serving_row import cluster_of, model_of, read_row
from simulator.serving.deployment import Deployment, Pool

ROW: dict[str, Any] = {
    "id": "p1", "source_group": "s", "hardware": "H100 SXM 80GB", "model": "Qwen/Qwen3-32B", "backend": "vllm 0.14.0",
    "tp": 2, "n_gpus": 2, "isl": 100, "osl": 10, "ttft_ms": 100.0, "tpot_ms": 10.0,
}  # fmt: skip
APART = {
    "decode_num_workers": 3, "decode_tp_size": 4, "decode_attention_dp_size": 2, "decode_batch_size": 7,
    "decode_moe_ep_size": 0, "prefill_num_workers": 1, "prefill_tp_size": 4,
}  # fmt: skip


def test_clients_in_batches_of_one_rank_say_how_many_engines_share_them() -> None:
    point = read_point(read_row({**ROW, "concurrency": 64, "batch_size": 16}))
    assert (point.deployment.pool.engines, point.traffic.concurrency) == (4, 64)
    assert "4 engines: 64 clients in batches of 16" in point.assumed
    own = {**ROW, "tp": 2, "dp_attention": 4, "n_gpus": 8, "concurrency": 64, "batch_size": 16}
    assert read_point(read_row(own)).deployment.pool.engines == 1


def test_batches_of_a_row_that_multiplies_its_degrees_are_of_the_ranks_that_it_states() -> None:
    """Attention and experts over the same four GPUs, stated as sixteen ranks of four requests: one engine of 64."""
    row = {**ROW, "model": "Qwen/Qwen3-30B-A3B", "tp": 1, "dp_attention": 16, "ep": 4, "moe_tp": 4, "n_gpus": 16}
    point = read_point(read_row({**row, "concurrency": 64, "batch_size": 4}))
    pool = point.deployment.pool
    assert (pool.engines, pool.dp_attention, pool.ep, point.traffic.concurrency) == (1, 4, 4, 64)


def test_settings_of_the_scheduler_are_taken_where_a_row_states_them() -> None:
    point = read_point(read_row({**ROW, "concurrency": 4}))
    assert "limits of the scheduler: the engine's own" in point.assumed
    said = {"max_num_seqs": 9, "max_num_batched_tokens": 4096, "kv_cache": "float8"}
    found = read_point(read_row({**ROW, "concurrency": 4, "scheduler_recv_interval": 30, **said})).deployment
    assert {name: getattr(found, name) for name in said} == said
    assert found.receive_every == 30
    refused = validate_point({**ROW, "concurrency": 4, "backend": "trtllm 1.2.0", "two_batch_overlap": True})
    assert "two-batch overlap" in refused["skipped"]


@pytest.mark.parametrize(
    ("said", "receive", "balance", "cache"),
    [
        ({"hardware": "B200 SXM", "concurrency": 16}, 30, 0, "bfloat16"),
        ({"hardware": "B200 SXM", "concurrency": 4}, 10, 0, "bfloat16"),
        ({"hardware": "B200 SXM", "concurrency": 16, "scheduler_recv_interval": 1}, 1, 0, "bfloat16"),
        ({"concurrency": 16}, 1, 0, "bfloat16"),
        ({"backend": "trtllm 1.2.0", "tp": 1, "dp_attention": 2, "precision": "fp8"}, 1, 60, "float8"),
        ({"backend": "trtllm 1.2.0", "precision": "fp8", "kv_cache": "bfloat16"}, 1, 0, "bfloat16"),
        ({"backend": "TensorRT-LLM 0.17", "precision": "fp8"}, 1, 0, "bfloat16"),
    ],
)
def test_what_engines_makers_set_is_assumed_where_a_row_leaves_it_open(
    said: dict[str, Any], receive: int, balance: int, cache: str
) -> None:
    row = {**ROW, "model": "Qwen/Qwen3-30B-A3B", "backend": "sglang 0.5.9", "concurrency": 4, **said}
    point = read_point(read_row(row))
    found = point.deployment
    assert (found.receive_every, found.balance_every, found.kv_cache) == (receive, balance, cache)
    named = any("makers set it" in one for one in point.assumed)
    assert named == ((receive, balance, cache) != (1, 0, "bfloat16"))


@pytest.mark.parametrize(
    ("said", "most"),
    [
        ({"backend": "trtllm 1.0.0rc3", "isl": 512, "concurrency": 64}, 2076),  # a prompt, the clients and 1,500
        ({"backend": "trtllm 1.0.0rc3", "isl": 512, "concurrency": 64, "max_num_batched_tokens": 8192}, 8192),
        ({"backend": "trtllm 1.2.0", "isl": 512, "concurrency": 64}, 0),
        ({"backend": "vllm 0.12.0", "isl": 512, "concurrency": 64}, 0),
    ],
)
def test_early_releases_of_tensorrt_llm_read_a_prompt_or_two_a_step(said: dict[str, Any], most: int) -> None:
    """ai-dynamo/aiconfigurator, rule_plugin/benchmark/trtllm.rule: max_num_tokens."""
    assert read_point(read_row({**ROW, "concurrency": 4, **said})).deployment.max_num_batched_tokens == most


def test_gpus_without_a_degree_are_not_taken_for_one_engine_of_one() -> None:
    """Four GPUs are as well four engines as one of four, or two stages of two."""
    row = {**ROW, "n_gpus": 4, "concurrency": 4}
    assert "how 4 GPUs share the model" in validate_point({**row, "tp": None})["skipped"]
    assert validate_point({**row, "tp": 4})["skipped"] is None


def test_batches_of_engines_that_write_say_how_many_clients_there_are() -> None:
    """Two ranks of attention with seven requests each, in three engines; 0 is what the source does not state."""
    point = read_point(read_row({**ROW, "disagg": APART}))
    assert point.traffic.concurrency == 3 * 2 * 7
    assert point.deployment.pool.ep == 1


def test_ranks_of_data_parallel_share_experts_or_are_engines_of_their_own() -> None:
    """`dp` in vLLM's terms, of a server that is always full: as many clients as all ranks answer at a time."""
    full = {
        **ROW,
        "tp": 1,
        "dp": 4,
        "n_gpus": 4,
        "max_num_seqs": 8,
        "metric_kind": "steady state of a saturated server",
    }
    apart = read_point(read_row(full))
    assert (apart.deployment.pool.engines, apart.deployment.pool.dp_attention) == (4, 1)
    shared = read_point(read_row({**full, "model": "Qwen/Qwen3-30B-A3B", "ep": 4}))
    assert (shared.deployment.pool.engines, shared.deployment.pool.dp_attention) == (1, 4)
    assert [point.traffic.concurrency for point in (apart, shared)] == [32, 32]


def test_a_note_says_that_all_requests_come_at_once() -> None:
    said = read_point(read_row({**ROW, "note": "QPS=INF: all 500 requests at once"})).traffic
    assert (said.concurrency, said.requests) == (500, 500)
    assert "neither concurrency nor a rate" in validate_point({**ROW, "note": "a table"})["skipped"]


def test_a_static_batch_is_in_one_stage_at_a_time() -> None:
    """Two stages of one GPU each take as long for a whole batch as one GPU that holds all layers, and a hop."""
    static = {**ROW, "metric_kind": "latency of one static batch", "batch_size": 8, "tp": 1, "model": "llama3-8b"}
    one, two = (validate_point({**static, "pp": stages, "n_gpus": stages})["predicted"] for stages in (1, 2))
    assert one["tpot_s"] <= two["tpot_s"] < 1.05 * one["tpot_s"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"isl": "many"}, "field isl is many"),
        ({"tp": -3}, "field tp is -3"),
        ({"disagg": {**APART, "decode_tp_size": "x"}}, "field decode_tp_size is x"),
        ({"disagg": {**APART, "prefill_num_workers": 10**6}}, "field prefill_num_workers is 1000000"),
    ],
)
def test_a_field_that_cannot_be_read_is_named_as_the_row_does(change: dict[str, Any], field: str) -> None:
    assert f"point p1: {field}: expected" in str(validate_point({**ROW, "concurrency": 4, **change})["skipped"])


def test_a_field_that_nothing_reads_is_named() -> None:
    found = validate_point({**ROW, "concurrency": 4, "chunked_prefill": True, "note": "a table", "colour": None})
    assert [line for line in found["assumed"] if "not read" in line] == ["the field chunked_prefill is not read"]


def test_a_median_is_compared_with_the_median() -> None:
    """Of a closed loop that all clients begin at once: the first prompts wait for each other, later ones do not."""
    asked = {**ROW, "concurrency": 16, "isl": 1024, "osl": 256, "tpot_ms": 10.0}
    asked |= {"ttft_ms": None, "ttft_median_ms": 50.0}
    mean = validate_point({**asked, "ttft_ms": 50.0})
    median = validate_point(asked)

    assert (mean["medians"], median["medians"]) == ([], ["ttft"])
    assert median["measured"]["ttft_s"] == 0.05
    assert median["predicted"]["ttft_s"] < mean["predicted"]["ttft_s"]
    assert median["predicted"]["tpot_s"] == mean["predicted"]["tpot_s"]


def test_percentiles_are_compared_by_the_names_that_a_row_has_for_them() -> None:
    """The first of sixteen clients' prompts are the slow ones: above the median, below the last percentile."""
    asked = {**ROW, "concurrency": 16, "isl": 1024, "osl": 32}
    said = validate_point({**asked, "ttft_p95_ms": 100.0, "ttft_p99_ms": 100.0, "tpot_p99_ms": 10.0})
    assert validate_point(asked)["tails"] == {}
    assert list(said["tails"]) == ["ttft_p95_ms", "ttft_p99_ms", "tpot_p99_ms"]
    assert said["error"]["ttft"] < said["tails"]["ttft_p95_ms"] <= said["tails"]["ttft_p99_ms"]


@pytest.mark.parametrize(
    ("hardware", "weights", "lengths", "limits"),
    [
        ("H200 SXM 141GB", "bfloat16", (128, 128), (3840, 7680)),
        ("H200 SXM 141GB", "float8", (128, 128), (4096, 8192)),
    ],
)
def test_limits_of_trtllm_bench_are_those_that_it_prints(
    hardware: str, weights: str, lengths: tuple[int, int], limits: tuple[int, int]
) -> None:
    """Llama 3.1 8B, as logs of the tool itself have it: developer.nvidia.com/blog, "LLM Inference Benchmarking:
    Performance Tuning with TensorRT-LLM" (0.21.0rc0, "Max Runtime Batch Size: 3840, Max Runtime Tokens: 7680"), and a
    build of 0.16 with an 8-bit cache ("Estimated max batch size (after fine-tune): 4096").
    """
    deployment = Deployment(engine="trtllm11", weights=weights, kv_cache=weights)
    found = benchmark_limits(
        model_of("meta-llama/Llama-3.1-8B-Instruct"), cluster_of(hardware, 1), deployment, prompt=lengths[0],
        output=lengths[1],
    )  # fmt: skip
    assert found == limits


def test_rows_of_the_most_throughput_with_tensorrt_llm_are_runs_of_its_benchmark() -> None:
    row = {**ROW, "backend": "TensorRT-LLM 1.x (PyTorch backend)", "precision": "FP8", "isl": 32768, "osl": 1024}
    point = read_point(read_row({**row, "metric_kind": "max throughput (output tokens/s/GPU)"}))
    assert (point.traffic.concurrency, point.traffic.count) == (1000, 1000)
    assert point.deployment.max_num_batched_tokens >= 32768  # a prompt is not cut
    assert any("as trtllm-bench chooses" in words for words in point.assumed)
    stated = read_row({**row, "metric_kind": "max throughput", "max_num_seqs": 9})
    assert read_point(stated).deployment.max_num_seqs == 9
    older = read_row({**row, "backend": "TensorRT-LLM 0.17", "metric_kind": "max throughput"})
    assert read_point(older).deployment.max_num_batched_tokens == 0


@pytest.mark.parametrize(
    ("clients", "pool", "kind", "most"),
    [  # NVIDIA's recipes for DeepSeek-R1
        (30, Pool(engines=3, tp=16, ep=16), "Hopper", 8),  # h100-fp8, ctx1_gen3_tep16_batch8
        (4916, Pool(dp_attention=16, ep=16), "Hopper", 256),  # ctx2_gen1_dep16_batch256
        (6, Pool(engines=3, tp=16, ep=16), "Hopper", 1),  # ctx1_gen3_tep16_batch1
        (11, Pool(engines=9, tp=8, ep=8), "Hopper", 1),  # h200, c1_ctx1_gen9_tep8_batch1
        (36, Pool(engines=9, tp=8, ep=8), "Hopper", 0),  # c4_ctx1_gen9_tep8_batch256
        (3584, Pool(engines=7, dp_attention=8), "Hopper", 0),  # c512_ctx2_gen7_dep8_batch512
        (4096, Pool(dp_attention=32, ep=32), "Blackwell", 128),  # gb200-fp4, filled exactly
        (1280, Pool(engines=3, dp_attention=8), "Blackwell", 48),  # b300-fp8, ctx1_gen3_dp8_batch48
        (4, Pool(engines=5, tp=4), "Blackwell", 1),
        (16384, Pool(engines=1, tp=1, dp_attention=8), "Blackwell", 1024),  # as many as no recipe exceeds
    ],
)
def test_separated_engines_have_the_places_of_their_makers_recipes(
    clients: int, pool: Pool, kind: str, most: int
) -> None:
    assert answers_of_rank(clients, pool, kind) == most
