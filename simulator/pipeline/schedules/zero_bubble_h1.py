"""Zero bubble H1: 1F1B whose weight gradients fill the bubble (arXiv 2401.10241 section 3.1)."""

from simulator.pipeline.schedules.kind import interleaving

ZERO_BUBBLE_H1 = interleaving("ZBH1", 1, lags=True, in_torch=False)
