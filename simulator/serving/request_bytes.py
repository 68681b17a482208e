"""Memory that an engine keeps for a request: keys and values of each token, and the state of linear attention."""

from __future__ import annotations

from simulator.config.model import Model
from simulator.serving.deployment import CACHE_BYTES, Pool
from simulator.serving.sparse_attention import INDEX_BYTES


def cache_elements(model: Model) -> float:
    """Return the cache elements for one token and layer on a rank with all heads: keys and values, or the compressed
    vector of latent attention.
    """
    if model.latent:
        return float(model.latent.kv_lora_rank + model.latent.qk_rope_head_dim)
    return 2.0 * model.kv_heads * model.head_dim


def cache_bytes_per_token(model: Model, pool: Pool, kv_cache: str) -> float:
    """Return the cache bytes of one token on one GPU. Latent vectors and single heads are replicated on each rank."""
    share = 1.0 if model.latent else max(1.0, model.kv_heads / pool.tp) / model.kv_heads
    layers = model.layers - model.linear_layers
    indexer = model.latent.indexer if model.latent else None
    index = indexer.width * INDEX_BYTES if indexer else 0.0
    return (cache_elements(model) * share * CACHE_BYTES[kv_cache] + index) * layers / pool.pp


def state_bytes(model: Model, pool: Pool) -> float:
    """Return the bytes that linear attention keeps for a request on one GPU: a matrix of 32-bit numbers for each head
    (mamba_ssm_dtype of Qwen3.5's config.json), and the tokens that the next convolution needs.
    """
    linear = model.linear
    if linear is None:
        return 0.0
    matrices = 4.0 * linear.value_heads * linear.key_dim * linear.value_dim
    return linear.layers * (matrices + 2.0 * (linear.kernel - 1) * linear.mixed) / pool.tp / pool.pp
