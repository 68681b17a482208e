"""Linear attention over prompts, in chunks: the gated delta rule (Yang et al., arXiv 2412.06464, section 3.3)."""

from __future__ import annotations

from simulator.config.model import LinearAttention
from simulator.serving.kernels import Kernels

DELTA_CHUNK = 64  # tokens that the kernels of linear attention take at once (fla-org/flash-linear-attention)
# More kernels than attention's that linear attention launches over prompts: norms of queries and keys, sums, products
# and inverses of chunks (two), their weights, states, outputs (fla/ops/gated_delta_rule/chunk.py), a convolution,
# gates, a gated norm, splitting what is projected, fetching and keeping the state.
DELTA_KERNELS = 15.0
# Of the rate of attention over prompts, what these kernels reach, and seconds of a chunk, which waits for the one
# before: 0.27, 0.32, 0.43, 0.60 and 0.93 ms of a prompt of 8,192 tokens with 4 to 64 heads of 128 on B200, 0.24 to 1.31
# on H200 (SGLang 0.5.14 by themselves, ai-dynamo/aiconfigurator systems/data, gdn_perf.parquet).
DELTA_SHARE, CHUNK_S = 0.10, 1.9e-6


def delta_rule_s(kernels: Kernels, linear: LinearAttention, tp: int) -> float:
    """Return seconds of one layer for a token of a prompt, which meets those of its chunk, and the state."""
    heads, width = linear.value_heads / tp, linear.key_dim + linear.value_dim
    inside = 2.0 * DELTA_CHUNK * 1.5 * width
    state = 2.0 * 3 * linear.key_dim * linear.value_dim
    return heads * (inside + state) / (DELTA_SHARE * kernels.attention_flops_per_s)
