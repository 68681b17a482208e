"""Settings of schedulers and caches that engines' makers publish for a kind of deployment. They are used if a row with
such a deployment does not state its settings, and listed as assumed. The engines' own defaults differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.validate.serving_row import ServingRow
from simulator.config.model import Model
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of
from topology.cluster import Cluster

# scheduler_recv_interval by the least number of clients, networks of experts on Blackwell: SGLang's cookbook
# (sgl-project/sgl-cookbook @7b5bd9c0, data/optimal-configs/src/v0.5.6/deepseek-r1.yaml), which has kv_cache_dtype, too.
RECEIVE_EVERY = ((16, 30), (1, 10))
# attention_dp_config.timeout_iters next to enable_balance, attention data-parallel: NVIDIA's configurations
# (TensorRT-LLM examples/configs/database, DeepSeek-R1 on B200 and H200). Those, and those of Qwen3 235B and
# Llama 3.3 70B, keep the cache in 8 bits next to 8-bit weights.
BALANCE_EVERY = 60
# Tokens of a step beyond a prompt and a token for each client, releases 1.0 and 1.1: NVIDIA's generator of
# configurations sets max_num_tokens so since 2025-08 (ai-dynamo/aiconfigurator @efcae124, today's
# rule_plugin/benchmark/trtllm.rule); InferenceX set it to a prompt, the clients and 64 then (@ec90f3fe), and to 8,192
# and more from 1.2 on. Neither cuts prompts.
BEYOND_PROMPT = 1500
HALVES_FROM = 48  # answers on a rank, from which one and a half times a power of two is a setting as well
MOST_ANSWERS = 1024  # the most answers on a rank in any of those recipes
TRTLLM = ("trtllm11", "trtllm12", "trtllm")  # releases to which these configurations apply


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """Settings in a maker's configuration: steps between looks for requests and between balanced prompts, the cache's
    format, and tokens of a step beyond a prompt and the answers of a rank. 1, 0 and "" leave the default.
    """

    receive_every: int = 1
    balance_every: int = 0
    kv_cache: str = ""
    beyond_prompt: int = 0


def usual_settings(engine: str, model: Model, architecture: str, pool: Pool, *, clients: int, weights: str) -> Usual:
    """Return the settings of an engine's makers for a model on GPUs of an architecture with this number of clients."""
    narrow = "float8" if weights == "float8" else ""
    if engine in TRTLLM:
        balance = BALANCE_EVERY if pool.dp_attention > 1 else 0
        beyond = BEYOND_PROMPT if engine == "trtllm11" else 0
        return Usual(balance_every=balance, kv_cache=narrow, beyond_prompt=beyond)
    if engine.startswith("sglang") and model.moe and architecture.startswith("Blackwell") and pool.dp_attention == 1:
        every = next((steps for least, steps in RECEIVE_EVERY if clients >= least), 1)
        return Usual(receive_every=every, kv_cache=narrow if model.latent else "")
    return Usual()


def answers_of_rank(clients: int, pool: Pool, architecture: str) -> int:
    """Return the most answers at a time on each rank that writes them, of separated engines of TensorRT-LLM: the most
    with which no place stays empty, of powers of two and, from 48 on, of one and a half times those; one for two
    clients. 0: room for many more than the clients, so where recipes for Hopper would fill all places exactly.

    So it is in 148 of the 158 recipes with one number of clients for networks without drafted tokens
    (NVIDIA/srt-slurm @c88ef731 recipes/trtllm, max_batch_size and concurrencies; 16 of 16 that are filled exactly on
    H200 have 2 to 64 times the room, and 33 of 39 on Blackwell none).
    """
    ranks = pool.engines * pool.dp_attention
    places = min(MOST_ANSWERS, max(1, clients // ranks))
    power = 1 << (places.bit_length() - 1)
    if power * ranks == clients and power > 2 and architecture.startswith("Hopper"):
        return 0
    if places == 2:
        return 1
    half_more = power * 3 // 2
    return half_more if HALVES_FROM <= half_more <= places else power


def as_makers_set(
    row: ServingRow, model: Model, cluster: Cluster, deployment: Deployment, assumed: list[str]
) -> Deployment:
    """Return a deployment with what a row leaves open set as the engine's makers set it, and list that as assumed. Of
    separated engines this is the cache's format alone: the schedulers' settings are of engines that read and write.
    """
    kind, weights = cluster.slowest_kind.architecture, deployment.weights
    clients = row.concurrency or row.batch_size or 1
    usual = usual_settings(deployment.engine, model, kind, deployment.pool, clients=clients, weights=weights)
    if deployment.prefill is not None:
        usual = Usual(kv_cache=usual.kv_cache)
        if deployment.engine in TRTLLM and row.max_num_seqs is None and row.concurrency:
            most = answers_of_rank(row.concurrency, deployment.pool, kind)
            said = f"{most} answers at a time" if most else "room for many more answers than clients"
            assumed.append(f"{said} on each rank of attention, as most of NVIDIA's recipes set it")
            deployment = replace(deployment, max_num_seqs=most)
    title = engine_of(deployment.engine).title
    if usual.beyond_prompt and row.concurrency and row.max_num_batched_tokens is None:
        most = usual.beyond_prompt + round(row.isl or 0) - (-row.concurrency // deployment.pool.dp_attention)
        assumed.append(f"{most:,} tokens a step, as {title}'s makers set it for such prompts and so many clients")
        deployment = replace(deployment, max_num_batched_tokens=most)
    if row.scheduler_recv_interval is None and usual.receive_every > 1:
        assumed.append(f"new requests seen each {usual.receive_every}th step, as {title}'s makers set it on {kind}")
        deployment = replace(deployment, receive_every=usual.receive_every)
    if usual.balance_every:
        assumed.append(
            f"prompts of all ranks together, or after {usual.balance_every} steps, as {title}'s makers set it"
        )
        deployment = replace(deployment, balance_every=usual.balance_every)
    if row.kv_cache is None and usual.kv_cache and deployment.kv_cache != usual.kv_cache:
        assumed.append(f"KV cache: 8 bits next to 8-bit weights, as {title}'s makers set it")
        deployment = replace(deployment, kv_cache=usual.kv_cache)
    return deployment
