"""Interleaved 1F1B: several stages per rank, in rounds (arXiv 2104.04473 section 2.2)."""

from simulator.config.plan import INTERLEAVED_SCHEDULE
from simulator.pipeline.schedules.kind import interleaving

# (p v + p - 2 i - 1) / v chunks of the model on rank i: arXiv 2104.04473 section 2.2; arXiv 2205.05198 section 4.2.3
# has 1 + (p - 1) / (p v) of the model on the first.
INTERLEAVED = interleaving(
    INTERLEAVED_SCHEDULE, 2, least_stages=2, most_stages=0, rounds=True, also_called=("interleaved",)
)
