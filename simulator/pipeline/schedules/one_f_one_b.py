"""1F1B: as many forward passes ahead as ranks follow, then a backward pass after every forward pass (arXiv 2104.04473
section 2.2).
"""

from simulator.config.plan import PLAIN_SCHEDULE
from simulator.pipeline.schedules.kind import interleaving

ONE_F_ONE_B = interleaving(PLAIN_SCHEDULE, 1, every_stage_in_torch=True)
