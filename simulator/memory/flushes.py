"""What a nearly full GPU costs: a caching allocator that runs out of memory gives back all it does not use and asks
anew.

torch's allocator keeps what is freed. When the driver has no more to give, it waits for the device, returns every
block that is not in use (`cudaFree`), and tries again; only if that fails too is memory out. What was returned is asked
for again in the same step, so a plan whose pools together do not fit alongside what is not the allocator's runs, but
pays for it in every step (c10/cuda/CUDACachingAllocator.cpp: `release_cached_blocks`, `num_alloc_retries`).

Whether that happens is not certain where what is reserved comes near: the cost is weighed by how likely it is.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from simulator.columns.plan_table import Floats

# A flush and what it leads to, a step, for each byte that the allocator would hold if it could: what is given back is
# part of that, and does not grow with the GPU. Source: nine plans on 2 x H200 that flushed once a step took 0.06 to
# 0.15 s longer than their like that did not, 0.09 in the middle, and nearly filled 140 GiB (examples/validation).
FLUSH_S_PER_BYTE = 0.09 / 150e9
LIKELY = 0.5


def known_flush_s(likely: Floats, known_s: float, micro_batches: Floats | float) -> Floats:
    """Return the seconds of a step that flushes take which cost `known_s` a micro batch.

    That can be several times the step without them, so a plan either pays or does not: between the two lies nothing
    that is ever measured.
    """
    return np.where(likely > LIKELY, known_s * micro_batches, 0.0)


def retry_probability(reserved_bytes: Floats, left_bytes: Floats, factors: tuple[float, float]) -> Floats:
    """Return how likely more than `left_bytes` are needed where `reserved_bytes` are predicted, `factors` being the
    range over a prediction that holds four of five measurements.
    """
    low, high = (math.log(factor) for factor in factors)
    middle, spread = (low + high) / 2, (high - low) / 2 / NormalDist().inv_cdf(0.9)
    over = (np.log(np.maximum(reserved_bytes, 1.0) / np.maximum(left_bytes, 1.0)) + middle) / spread
    return np.asarray(1.0 / (1.0 + np.exp(-1.702 * np.clip(over, -30.0, 30.0))))  # the normal distribution, within 0.01
