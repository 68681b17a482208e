"""The command that starts one engine of a serving plan: vLLM 0.33, SGLang 0.5.23, TensorRT-LLM 1.x.

Flags: vLLM vllm/engine/arg_utils.py; SGLang sglang/srt/arg_groups/fields/; TensorRT-LLM tensorrt_llm/commands/serve.py.
"""

from __future__ import annotations

import json

from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import OVERLAPS_BATCHES, RECEIVES, engine_of
from topology.errors import Infeasible

PORT = 8000


def command(deployment: Deployment, pool: Pool, model: str, *, longest: int, port: int = PORT) -> list[str]:
    """Return the words of the command for one engine of `pool`; `model` is its name on the hub, `longest` in tokens.

    Raises Infeasible for settings without a flag.
    """
    writers = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}
    program = engine_of(deployment.engine).program
    if program not in writers:
        raise Infeasible(
            f"{engine_of(deployment.engine).title} has no server to start",
            why="only the steps of that engine are modelled",
            remedy=f"use --engine {', '.join(writers)}",
        )
    if deployment.speculation is not None and program == "trtllm":
        raise Infeasible(
            "trtllm-serve takes speculative decoding from a YAML file only",
            why="the command line has no flag for it",
            remedy="write speculative_config into its --extra_llm_api_options, or use --engine vllm or sglang",
        )
    return writers[program](deployment, pool, model, longest, port)


def _vllm(deployment: Deployment, pool: Pool, model: str, longest: int, port: int) -> list[str]:
    engine = engine_of("vllm")
    words = ["vllm", "serve", model, "--port", str(port)]
    words += ["--tensor-parallel-size", str(pool.tp), "--pipeline-parallel-size", str(pool.pp)]
    if pool.dp_attention > 1:
        words += ["--data-parallel-size", str(pool.dp_attention)]
    if pool.ep > 1:
        words += ["--enable-expert-parallel"]
    if pool.redundant_experts:
        words += ["--enable-eplb", "--eplb-config", json.dumps({"num_redundant_experts": pool.redundant_experts})]
    words += ["--max-model-len", str(longest)]
    words += ["--max-num-seqs", str(deployment.max_num_seqs or engine.max_num_seqs)]
    words += ["--max-num-batched-tokens", str(deployment.max_num_batched_tokens or engine.max_num_batched_tokens)]
    words += ["--gpu-memory-utilization", f"{deployment.memory_fraction or engine.memory_fraction:g}"]
    words += ["--enforce-eager"] if deployment.eager else []
    words += [] if deployment.custom_all_reduce else ["--disable-custom-all-reduce"]
    words += [OVERLAPS_BATCHES["vllm"]] if deployment.two_batches else []
    if deployment.speculation is not None:
        said = {"method": "mtp", "num_speculative_tokens": deployment.speculation.draft}
        words += ["--speculative-config", json.dumps(said)]
    if deployment.weights == "float8":
        words += ["--quantization", "fp8"]
    words += ["--dtype", "float16"] if deployment.weights == "float16" else []
    return words + (["--kv-cache-dtype", "fp8"] if deployment.kv_cache == "float8" else [])


def sglang_limits(deployment: Deployment, pool: Pool) -> dict[str, int]:
    """Return SGLang's limits by flag. They are of all ranks of attention with its own requests together, which divide
    them (sglang/srt: server_args.py `chunked_prefill_size // dp_size`, model_executor/pool_configurator.py
    `max_running_requests // dp_size`).
    """
    engine, ranks = engine_of("sglang"), pool.dp_attention
    return {
        "--max-running-requests": ranks * (deployment.max_num_seqs or engine.max_num_seqs),
        "--chunked-prefill-size": ranks * (deployment.max_num_batched_tokens or engine.max_num_batched_tokens),
    }


def _sglang(deployment: Deployment, pool: Pool, model: str, longest: int, port: int) -> list[str]:
    engine = engine_of("sglang")
    words = ["python", "-m", "sglang.launch_server", "--model-path", model, "--host", "0.0.0.0", "--port", str(port)]  # noqa: S104
    words += ["--tp-size", str(pool.ranks), "--pp-size", str(pool.pp)]
    if pool.dp_attention > 1:  # there, attention with its own requests is part of tensor parallelism
        words += ["--attn-dp-size", str(pool.dp_attention)]
    if pool.ep > 1:
        words += ["--ep-size", str(pool.ep)]
    if pool.redundant_experts:
        words += ["--ep-num-redundant-experts", str(pool.redundant_experts)]
    words += ["--context-length", str(longest)]
    for flag, limit in sglang_limits(deployment, pool).items():
        words += [flag, str(limit)]
    words += ["--mem-fraction-static", f"{deployment.memory_fraction or engine.memory_fraction:g}"]
    words += ["--disable-cuda-graph"] if deployment.eager else []
    words += [] if deployment.custom_all_reduce else ["--disable-custom-all-reduce"]
    words += [OVERLAPS_BATCHES["sglang"]] if deployment.two_batches else []
    words += [RECEIVES["sglang"], str(deployment.receive_every)] if deployment.receive_every > 1 else []
    if deployment.speculation is not None:
        drafted = deployment.speculation.draft
        words += ["--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-steps", str(drafted), "--speculative-num-draft-tokens", str(drafted + 1)]
    if deployment.weights == "float8":
        words += ["--quantization", "fp8"]
    words += ["--dtype", "float16"] if deployment.weights == "float16" else []
    return words + (["--kv-cache-dtype", "fp8_e4m3"] if deployment.kv_cache == "float8" else [])


def _trtllm(deployment: Deployment, pool: Pool, model: str, longest: int, port: int) -> list[str]:
    engine = engine_of("trtllm")
    if deployment.eager or not deployment.custom_all_reduce:
        raise Infeasible(
            "trtllm-serve takes graphs and its all-reduce from a YAML file only",
            why="the command line has no flags for them",
            remedy="leave out --eager and --no-custom-all-reduce, or write them into its --extra_llm_api_options",
        )
    if pool.dp_attention > 1:
        raise Infeasible(
            "trtllm-serve takes attention with its own requests from a YAML file only",
            why="the command line has no flag for it",
            remedy="use --engine vllm or sglang, or write enable_attention_dp: true into its --extra_llm_api_options",
        )
    if deployment.kv_cache == "float8":
        raise Infeasible(
            "trtllm-serve takes an 8-bit KV cache from a YAML file only",
            why="the command line has no flag for it in all releases",
            remedy="use --engine vllm or sglang, or write kv_cache_config: {dtype: fp8} into its"
            " --extra_llm_api_options",
        )
    words = ["trtllm-serve", "serve", model, "--port", str(port)]
    words += ["--tp_size", str(pool.tp), "--pp_size", str(pool.pp)]
    words += ["--ep_size", str(pool.ep)] if pool.ep > 1 else []
    words += ["--max_batch_size", str(deployment.max_num_seqs or engine.max_num_seqs)]
    words += ["--max_num_tokens", str(deployment.max_num_batched_tokens or engine.max_num_batched_tokens)]
    words += ["--max_seq_len", str(longest)]
    return [*words, "--kv_cache_free_gpu_memory_fraction", f"{deployment.memory_fraction or engine.memory_fraction:g}"]
