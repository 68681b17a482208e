"""How many more tokens than its share the busiest rank of expert parallelism has."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def busiest_load(ranks: Floats, spread: float) -> Floats:
    """Return the tokens of the busiest of `ranks` ranks that share experts, over the mean; from 1 to `ranks`.

    `spread` is the standard deviation of the load of one of two ranks, over the mean. That of one of more is larger by
    sqrt(ranks - 1), as if few experts had all the tokens, wherever they are; loads add up to all tokens, and are else
    taken to be normal. Source of the largest of normal values: Blom (1958).
    """
    counts, back = np.unique(ranks, return_inverse=True)
    loads = np.array([_load(count, spread) if count > 1 else 1.0 for count in counts.tolist()])
    return loads[back]


def _load(ranks: float, spread: float) -> float:
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return min(1.0 + spread * math.sqrt(ranks) * largest, ranks)
