"""The number of tokens in an engine's KV cache: a GPU's memory less weights and activations."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.config.model import Model
from simulator.serving.deployment import WEIGHT_BYTES, Deployment, Pool, attention_format, dense_format
from simulator.serving.engine import engine_of
from simulator.serving.request_bytes import cache_bytes_per_token, state_bytes
from topology.cluster import Cluster
from topology.units import GIB

# CUDA's context, NCCL's buffers and the engine's own. Source: assumed; vLLM's start-up log names 0.4 to 1.5 GiB as
# non-torch.
OUTSIDE_BYTES = 1.0 * GIB
# CUDA graphs of all batch sizes. Source: assumed; vLLM's start-up log says "Graph capturing finished ..., took 0.5 to 2
# GiB".
GRAPHS_BYTES = 1.0 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCapacity:
    """Memory of one GPU of an engine, in bytes by category, and the number of tokens that the cache of the whole engine
    holds.
    """

    capacity_bytes: float
    by_category: dict[str, float]
    bytes_per_token: float
    block_tokens: int
    tokens: int

    @property
    def blocks(self) -> int:
        return self.tokens // self.block_tokens

    @property
    def fits(self) -> bool:
        return self.tokens > 0


def weight_bytes(model: Model, pool: Pool, weights: str) -> float:
    """Return the bytes of weights on one GPU of an engine. Embedding, head, norms and routers stay 16 bits wide."""
    wide, stored, routed = WEIGHT_BYTES["bfloat16"], WEIGHT_BYTES[dense_format(weights)], WEIGHT_BYTES[weights]
    ends = (model.embedding_parameters + model.head_parameters) * wide / pool.tp
    kept = WEIGHT_BYTES[attention_format(weights, latent=model.latent is not None)]
    attention = model.attention_matmul_parameters_of_all * kept
    if model.latent:  # compressing projections, and those of an indexer, are repeated on each rank
        m = model.latent
        attention -= model.layers * model.heads * m.v_head_dim * model.hidden * (kept - stored)
        weights_of_layer = model.hidden * (m.q_lora_rank + m.kv_lora_rank + m.qk_rope_head_dim)
        weights_of_layer += m.indexer.matmul_parameters(model.hidden, m.q_lora_rank) if m.indexer else 0
        repeated = model.layers * weights_of_layer * kept
        attention = (attention - repeated) / pool.tp + repeated
    else:
        attention = attention / pool.tp
    dense = model.dense_layers * model.mlp_matmul_parameters(model.ffn) * stored / pool.tp
    sparse = 0.0
    if model.moe:
        held = pool.experts_here(model.moe.experts) * pool.ep / model.moe.experts
        experts = model.expert_parameters * routed * held / pool.ranks
        shared = model.mlp_matmul_parameters(model.moe.shared_ffn) * stored / pool.tp if model.moe.shared_ffn else 0.0
        sparse = model.moe_layers * (experts + shared + model.hidden * model.moe.experts * wide)
    norms = model.layers * model.block_norm_parameters * wide
    ends = ends if pool.pp == 1 else ends / 2  # the first stage has the embedding, the last the head
    return ends + (attention + dense + sparse + norms) / pool.pp


def activation_bytes(model: Model, cluster: Cluster, deployment: Deployment, pool: Pool) -> float:
    """Return the peak bytes of activations in a full step, which engines measure in a trial run at start-up."""
    engine = engine_of(deployment.engine)
    usual = engine.batched_tokens(cluster.slowest_kind.memory_bytes)
    tokens = float(deployment.max_num_batched_tokens or usual)
    width = (2 if model.gated_mlp else 1) * model.ffn / pool.tp
    if model.moe:
        width = max(width, (model.moe.ffn * 2 + model.hidden) * model.moe.experts_per_token / pool.expert_tp)
    inside = tokens * 2.0 * (width * 1.5 + 3 * model.hidden)
    sequences = min(float(deployment.max_num_seqs or engine.max_num_seqs), tokens)
    return max(inside, sequences * model.vocab * 4.0 * 2)


def cache_capacity(
    model: Model, cluster: Cluster, deployment: Deployment, pool: Pool, *, length: int = 0
) -> CacheCapacity:
    """Return the memory of one GPU of `pool`, and the number of tokens in its engine's cache.

    Layers with a window keep only the window of a request, so long requests need fewer bytes per token; `length` is
    their tokens (0: at most the window).
    """
    engine = engine_of(deployment.engine)
    fraction = deployment.memory_fraction or engine.memory_fraction
    total = float(cluster.slowest_kind.memory_bytes)
    parts = {
        "weights": weight_bytes(model, pool, deployment.weights) + _drafting_bytes(model, deployment, pool),
        "activations": activation_bytes(model, cluster, deployment, pool),
        "context": OUTSIDE_BYTES,
    }
    graphs = 0.0 if deployment.eager else GRAPHS_BYTES
    if engine.fraction_of_free:
        room = (total - sum(parts.values()) - graphs) * fraction
    else:
        room = total * fraction - sum(parts.values())
    parts["graphs"] = graphs
    per_token = cache_bytes_per_token(model, pool, deployment.kv_cache) * _kept(model, length)
    per_token += state_bytes(model, pool) / max(length, 1)  # the state of a request has the same size for any length
    blocks = max(0, int(room / (per_token * engine.block_tokens)))
    tokens = blocks * engine.block_tokens * pool.dp_attention
    parts["kv_cache"] = blocks * engine.block_tokens * per_token
    return CacheCapacity(
        capacity_bytes=total,
        by_category=parts,
        bytes_per_token=per_token,
        block_tokens=engine.block_tokens,
        tokens=tokens,
    )


def _drafting_bytes(model: Model, deployment: Deployment, pool: Pool) -> float:
    """Return the bytes of prediction layers on one GPU, if they draft tokens."""
    if deployment.speculation is None:
        return 0.0
    return model.multi_token_parameters * WEIGHT_BYTES[deployment.weights] / pool.gpus


def _kept(model: Model, length: int) -> float:
    """Return the share of the keys and values of a request of `length` tokens that the layers keep.

    Engines give layers with a window a pool of their own, whose blocks are freed when the window has passed (vLLM's
    hybrid KV cache manager, SGLang's SWAKVPool, TensorRT-LLM's pool for each size of the window).
    """
    if length <= model.sliding_window or not model.windowed_layers:
        return 1.0
    return 1.0 - model.windowed_layers / model.layers * (1.0 - model.sliding_window / length)
