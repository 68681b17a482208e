"""Linear attention over prompts, in chunks: the gated delta rule (Yang et al., arXiv 2412.06464, section 3.3)."""

from __future__ import annotations

from simulator.config.model import LinearAttention
from simulator.serving.kernels import Kernels

DELTA_CHUNK = 64  # tokens in a chunk of the kernels of linear attention (fla-org/flash-linear-attention)
# Kernels that linear attention launches over prompts in addition to attention's: norms of queries and keys, sums,
# products and inverses of chunks (two), their weights, states, outputs (fla/ops/gated_delta_rule/chunk.py), a
# convolution, gates, a gated norm, splitting of projections, reading and writing the state.
DELTA_KERNELS = 15.0
# Rate of these kernels over that of attention over prompts, and seconds of a chunk, which waits for the previous one:
# 0.27, 0.32, 0.43, 0.60 and 0.93 ms of a prompt of 8,192 tokens with 4 to 64 heads of 128 on B200, 0.24 to 1.31 on H200
# (SGLang 0.5.14 by themselves, ai-dynamo/aiconfigurator systems/data, gdn_perf.parquet).
DELTA_SHARE, CHUNK_S = 0.10, 1.9e-6
# Seconds of a layer for the next token of few answers: its convolution and the step of the state take 4.5 and 6.6 us
# (SGLang 0.5.9 and 0.5.10 on B200 and B300, 1 to 4 answers, there; 2.1 and 4.6 with 0.5.14).
ANSWER_S = 1.1e-5


def delta_rule_s(kernels: Kernels, linear: LinearAttention, tp: int) -> float:
    """Return the seconds of one layer for a token of a prompt, which is combined with those of its chunk and with the
    state.
    """
    heads, width = linear.value_heads / tp, linear.key_dim + linear.value_dim
    inside = 2.0 * DELTA_CHUNK * 1.5 * width
    state = 2.0 * 3 * linear.key_dim * linear.value_dim
    return heads * (inside + state) / (DELTA_SHARE * kernels.attention_flops_per_s)
