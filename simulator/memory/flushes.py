"""The cost of a nearly full GPU: flushes of the caching allocator.

torch's allocator caches freed memory. When the driver has none left, it waits for the device, returns every unused
block (`cudaFree`), and tries again; only if that fails too is the rank out of memory. The returned memory is requested
again in the same step, so a plan whose pools do not fit next to other memory of the GPU runs, but pays for flushes in
every step (c10/cuda/CUDACachingAllocator.cpp: `release_cached_blocks`, `num_alloc_retries`).

When reserved memory comes near the limit this is uncertain, so the cost is weighted by its probability.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from simulator.columns.plan_table import Floats

# Seconds of a flush and its consequences in a step, per byte that the allocator would reserve without a limit; the
# bytes returned are a part of these. Source: nine plans on 2 x H200 that flushed once a step took 0.06 to 0.15 s longer
# than similar plans that did not (median 0.09) and nearly filled 140 GiB (examples/validation).
FLUSH_S_PER_BYTE = 0.09 / 150e9
LIKELY = 0.5


def known_flush_s(likely: Floats, known_s: float, micro_batches: Floats | float) -> Floats:
    """Return the seconds of flushes in a step, at `known_s` per micro batch.

    This can be several times the step itself, so it is added in full if flushes are likely and not at all otherwise;
    values in between are never measured.
    """
    return np.where(likely > LIKELY, known_s * micro_batches, 0.0)


def retry_probability(reserved_bytes: Floats, left_bytes: Floats, factors: tuple[float, float]) -> Floats:
    """Return the probability that more than `left_bytes` are needed when `reserved_bytes` are predicted; `factors` are
    the ends of the 80 % range over the prediction.
    """
    low, high = (math.log(factor) for factor in factors)
    middle, spread = (low + high) / 2, (high - low) / 2 / NormalDist().inv_cdf(0.9)
    over = (np.log(np.maximum(reserved_bytes, 1.0) / np.maximum(left_bytes, 1.0)) + middle) / spread
    return np.asarray(1.0 / (1.0 + np.exp(-1.702 * np.clip(over, -30.0, 30.0))))  # normal, within 0.01
