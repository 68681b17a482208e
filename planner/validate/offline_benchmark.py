"""What `trtllm-bench throughput` of TensorRT-LLM 1.0 and later sets where it is left to its own: NVIDIA's tables of the
most tokens a second are made with it, all requests queued at once.
"""

from __future__ import annotations

import math
from dataclasses import replace

from planner.validate.makers_settings import TRTLLM
from planner.validate.serving_row import ServingRow
from simulator.config.model import Model
from simulator.serving.deployment import CACHE_BYTES, WEIGHT_BYTES, Deployment
from topology.cluster import Cluster

# Requests of a run by the most tokens of a request, prompt and answer together, of which some run has so many.
# Source: NVIDIA/TensorRT-LLM docs/source/performance/perf-overview.md @00f37686 (1.0) and
# docs/source/developer-guide/perf-overview.md @03e27c7d, "Preparing a Dataset".
_SENT = ((256, 30000), (2500, 3000), (9216, 1500))
_SENT_LONGER = 1000
# What follows: calc_engine_setting and finetune_setting of tensorrt_llm/bench/build/tuning.py @04cba882, for formats
# of TUNED_QUANTS in build.py @000a01de, and get_settings of bench/benchmark/utils/general.py @0171265e.
_TUNED = {"bfloat16", "float16", "float8", "float4"}
_CACHE_SHARE = 0.90  # --kv_cache_free_gpu_mem_fraction as by default
_MOST_SEQUENCES, _MOST_TOKENS = 4096, 32768


def is_benchmark(row: ServingRow, deployment: Deployment) -> bool:
    """Return whether a row is of such a run."""
    return row.metric_kind.startswith("max throughput") and deployment.engine in TRTLLM


def as_benchmark_sets(
    row: ServingRow, model: Model, cluster: Cluster, deployment: Deployment, assumed: list[str]
) -> Deployment:
    """Return a deployment with the limits that the benchmark chooses where a row states none, listed as assumed."""
    if row.max_num_seqs is not None or row.max_num_batched_tokens is not None or deployment.weights not in _TUNED:
        return deployment
    sequences, tokens = benchmark_limits(model, cluster, deployment, prompt=row.isl or 1.0, output=row.osl or 1.0)
    assumed.append(f"limits of a scheduler: {sequences} requests, {tokens} tokens, as trtllm-bench chooses")
    return replace(deployment, max_num_seqs=sequences, max_num_batched_tokens=tokens)


def requests_sent(prompt: int, output: int) -> int:
    """Return how many requests a run has whose prompts and answers have so many tokens."""
    return next((sent for tokens, sent in _SENT if prompt + output <= tokens), _SENT_LONGER)


def benchmark_limits(
    model: Model, cluster: Cluster, deployment: Deployment, *, prompt: float, output: float
) -> tuple[int, int]:
    """Return the requests and tokens that one scheduler is limited to, by the benchmark's own estimate of the cache, in
    which latent attention keeps keys and values of all heads. Prompts are not cut, so a step has room for a whole one.
    """
    pool = deployment.pool
    heads, width = (model.heads, model.hidden // model.heads) if model.latent else (model.kv_heads, model.head_dim)
    token = 2 * model.layers * max(pool.ranks, heads) * width * CACHE_BYTES[deployment.kv_cache]
    free = cluster.slowest_kind.memory_bytes * pool.gpus - _engine_bytes(model, deployment.weights)
    fitting = min(free * _CACHE_SHARE / (token * (prompt + output)), _MOST_SEQUENCES) / pool.pp
    sequences = _rounded(fitting, ((256, 32), (1024, 128)), 256, least=64)
    filled = min(fitting * (1 + prompt / output), _MOST_TOKENS)
    tokens = _rounded(filled, ((4096, 256), (8192, 512)), 1024, least=2048)
    return sequences, max(tokens, round(prompt) + sequences)


def _engine_bytes(model: Model, weights: str) -> float:
    """Return the bytes of all parameters as the benchmark counts them: numbers that a checkpoint stores, each of which
    takes what the format says, though one of nvfp4 holds two weights.
    """
    stored = model.parameters + model.multi_token_parameters
    each = {"float4": 0.5 * WEIGHT_BYTES["float4"], "float8": 1.0}.get(weights, 2.0)
    return stored * each


def _rounded(value: float, steps: tuple[tuple[int, int], ...], last: int, *, least: int) -> int:
    """Return `value` rounded up to a multiple of the step of the first bound that it is below."""
    step = next((step for bound, step in steps if value < bound), last)
    return max(least, step * math.ceil(value / step))
