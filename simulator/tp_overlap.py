"""How long a product and the tensor-parallel collective beside it take together, by overlap mode.

A row-parallel product feeds a reduce-scatter, a column-parallel one feeds on an all-gather. Both can be cut into as
many pieces as there are ranks, one for each shard, and a piece moves while another computes.

    none         one after the other
    chunked      NCCL collectives on pieces; the first (or last) piece moves alone, and pieces pay NCCL's latency each
    ring         tp - 1 hops to the neighbour, each beside a piece; the first piece is the rank's own and waits for none
    copy_engine  the ring, moved by copy engines: no SM is taken
    async        torch's asynchronous tensor parallelism: decomposed products over symmetric memory, copy engines. A pass
                 over the compiled graph finds them: a gather with the products that read it, weight gradients aside,
                 and a reduce-scatter that reads one product. Where several products add up first (backward of queries,
                 keys and values) nothing is hidden. Partial results of a reduce-scatter are summed in a pass of its own
    fused        one persistent kernel that waits for tiles: no piece loses efficiency, the first shard is exposed

Whoever moves the shards, they go through the memory and the power budget of the product beside them: each second of
moving costs the product BESIDE of a second. SMs, where a mode takes them, come on top (`simulator.contention`).

Sources: Wang et al., ASPLOS 2023 (decomposition); discuss.pytorch.org/t/209487 and torch 2.11's
_inductor/fx_passes/micro_pipeline_tp.py (async); FLUX, arXiv 2406.06858 (fused).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Bytes = TypeVar("Bytes", float, NDArray[np.float64])

# Modes that move shards from peer to peer, tp - 1 of them, and those whose shards copy engines move.
PEER_MODES = frozenset({"ring", "copy_engine", "async"})
COPY_ENGINE_MODES = frozenset({"copy_engine", "async"})
# Modes that a graph pass sets up by pattern, and that sum partial results afterwards.
MATCHED_MODES = frozenset({"async"})

# Source: yifuwang/symm-mem-recipes README, nine all-gather products on 8 H100, shards moved by copy engines: what the
# fused kernel takes longer than the same product alone, over the seconds copied, is 0.35 at the median (0.24 to 0.55).
# torch 2.11's fused operators on 4 H200 agree: over 18 products with 4k to 16k rows the predicted gain over NCCL and
# then cuBLAS is 6 % too large without this and right at the median with it.
BESIDE = 0.35


def partials_bytes(mode: str, op: str, nbytes: Bytes, ranks: Bytes) -> Bytes:
    """Return bytes of memory read and written to add up what the peers delivered for one shard of `nbytes` / ranks."""
    if mode not in MATCHED_MODES or op != "reduce_scatter":
        return 0.0 * nbytes
    return nbytes * (1 + 1 / ranks)


def extra_calls(mode: str, ranks: float) -> float:
    """Return how many more collectives and messages the host issues than the one collective that is cut up.

    A copy between peers takes two calls a piece, the copy and its signals: torch 2.11's fused operators on 4 H200 take
    212 to 247 us with 2048 rows and less however small the product, which is 8 calls and 4 launches.
    """
    if mode in COPY_ENGINE_MODES:
        return 2 * ranks - 1
    return {"chunked": ranks - 1, "ring": 2 * (ranks - 1) - 1, "fused": 1.0}.get(mode, 0.0)


def launches(mode: str, ranks: float) -> float:
    """Return into how many launches a mode cuts a product."""
    return 1.0 if mode in {"none", "fused"} else ranks


Seconds = TypeVar("Seconds", float, NDArray[np.float64])


def launch_s(
    mode: str,
    *,
    whole_s: Seconds,
    chunk_s: Seconds,
    hop_s: Seconds,
    product_s: Seconds,
    pieces_s: Seconds,
    ranks: Seconds,
) -> Seconds:
    """Return seconds of one launch of the product beside what moves: all of it where it is fused, else one piece."""
    if mode == "fused":
        return product_s + BESIDE * _shorter(product_s, whole_s - chunk_s)
    piece = pieces_s / ranks
    moving = hop_s if mode in PEER_MODES else chunk_s
    return piece + BESIDE * _shorter(piece, moving) * (ranks - 1) / ranks


def together_s(
    mode: str,
    *,
    whole_s: Seconds,
    chunk_s: Seconds,
    hop_s: Seconds,
    product_s: Seconds,
    pieces_s: Seconds,
    ranks: Seconds,
) -> Seconds:
    """Return seconds of the product and its collective, contention for SMs aside.

    `whole_s` is the collective at once, `chunk_s` a `ranks`-th of its bytes, `hop_s` one shard to a peer; `product_s`
    is the product at once and `pieces_s` all of its pieces together.
    """
    if mode == "none":
        return whole_s + product_s
    launch = launch_s(
        mode,
        whole_s=whole_s,
        chunk_s=chunk_s,
        hop_s=hop_s,
        product_s=product_s,
        pieces_s=pieces_s,
        ranks=ranks,
    )
    if mode == "chunked":
        return chunk_s + (ranks - 1) * _longer(chunk_s, launch) + launch
    if mode in PEER_MODES:
        return launch + (ranks - 1) * _longer(hop_s, launch)
    if mode == "fused":
        return chunk_s + _longer(launch, whole_s - chunk_s)
    raise ValueError(mode)


def _longer(a: Seconds, b: Seconds) -> Seconds:
    """Return the larger, element by element where they are columns."""
    if isinstance(a, float) and isinstance(b, float):
        return max(a, b)
    return np.maximum(a, b)


def _shorter(a: Seconds, b: Seconds) -> Seconds:
    if isinstance(a, float) and isinstance(b, float):
        return min(a, b)
    return np.minimum(a, b)
