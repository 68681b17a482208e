"""Transformer Engine's userbuffers: tensor-parallel traffic alongside products, as Megatron-Core runs it
(--tp-comm-overlap).

Forward, and for the gradients that come into a row-parallel layer, shards go round a ring and products are cut into one
piece for each of them: the pipeline of `copy_engine` (`simulator.overlap.modes`). Into a column-parallel layer backward
goes in bulk: tokens are gathered again, for the weight gradient, while the gradient of the input is computed, and that
gradient is scattered while the weight's is computed. Nothing is cut there.

Source: transformer_engine/pytorch/module/base.py (initialize_ub: methods `ring_exchange` and `bulk` by name of
product), and NVIDIA's own settings (megatron.bridge.training.comm_overlap: RingExchangeOverlapCfg for qkv_fprop,
fc1_fprop, proj_dgrad, fc2_dgrad; BulkOverlapCfg for qkv_dgrad, qkv_wgrad, fc1_dgrad, fc1_wgrad). On Hopper proj_fprop
and fc2_fprop are set to four slices on a few SMs instead of a ring; both hide all but the last piece, and are one
formula here.
"""

from __future__ import annotations

import numpy as np

from simulator.overlap.modes import OverlapRates, Parts, Value

# Pieces are multiplied on so many streams in turn, so that a few small ones fill the GPU together
# (transformer_engine/common/include/transformer_engine/comm_gemm_overlap.h: NVTE_COMM_OVERLAP_MAX_STREAMS).
STREAMS = 3


def bulk_s(parts: Parts, weight_s: Value, rates: OverlapRates) -> Value:
    """Return the seconds of a backward pair, its weight gradients (`weight_s`) left out: gathering alongside the
    gradient of the input, and scattering that alongside the weight's.

    The few SMs that move bytes, and the memory traffic, slow a product down as copies do.
    """
    moving = parts.collective_s + rates.signal_s
    exposed = np.maximum(moving - parts.product_s, 0.0) + np.maximum(moving - weight_s, 0.0)
    hidden = np.minimum(moving, parts.product_s) + np.minimum(moving, weight_s)
    return parts.product_s + exposed + rates.product_slowdown * hidden
