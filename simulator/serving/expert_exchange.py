"""Tokens on their way to the ranks of their experts and back, where these are more than a token has experts, since all
would get what few need (TensorRT-LLM, fused_moe: AllToAll by moe_ep_size and top_k; DeepEP in SGLang and vLLM).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simulator.columns.plan_table import Floats

# Tokens of a rank up to which DeepEP takes kernels that send each straight to its experts' ranks (sgl-project/sglang
# layers/moe/token_dispatcher/deepep.py: num_max_dispatch_tokens_per_rank <= 1024); those for more send one copy a node
# (deepseek-ai/DeepEP README.md, "Normal kernels with NVLink and RDMA forwarding").
AT_ONCE = 1024
BACK_BYTES = 2.0  # bytes of an element on its way back, for any format on the way there


def exchange_s(
    all_to_all: Callable[[Floats, int], Floats],
    local: Floats,
    *,
    hidden: int,
    chosen: int,
    held: int,
    ranks: int,
    node: int,
    there_bytes: float,
) -> Floats:
    """Return seconds of sending `local` tokens of a rank to `chosen` experts each and back, where `held` of the `ranks`
    hold different ones.

    `all_to_all` gives seconds of so many bytes of a rank among so many ranks, of which a node has `node`. Few tokens
    go to each rank at once; more go to each node once, whose ranks pass them on meanwhile.
    """
    width = min(ranks, node)
    to_ranks = local * _different(held, chosen) * hidden
    to_nodes = local * _different(ranks // width, chosen) * hidden

    def sent(each: float) -> Floats:
        at_once = all_to_all(each * to_ranks, ranks)
        if width == ranks:
            return at_once
        passed_on = np.maximum(all_to_all(each * to_nodes, ranks), all_to_all(each * to_ranks, width))
        return np.asarray(np.where(local > AT_ONCE, passed_on, at_once))

    return sent(there_bytes) + sent(BACK_BYTES)


def _different(places: int, chosen: int) -> float:
    """Return how many of `places` hold at least one of `chosen` experts, which are spread over all evenly."""
    return places * (1 - (1 - 1 / places) ** chosen)
