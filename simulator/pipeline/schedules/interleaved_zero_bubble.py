"""Interleaved 1F1B whose weight gradients fill the bubble (arXiv 2401.10241), as torch.distributed.pipelining has
it.
"""

from simulator.pipeline.schedules.kind import interleaving

INTERLEAVED_ZERO_BUBBLE = interleaving(
    "InterleavedZeroBubble", 1, lags=True, least_stages=2, most_stages=0, rounds=True
)
