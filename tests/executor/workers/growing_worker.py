"""The worker, the last rank of which keeps more and more of its GPU's memory from a step on: `REQUEST OUT`, GROW_AT
set.
"""

import os
import sys

import torch

from executor.parallel.train_step import Trainer
from executor.run.worker import main

AT, EACH_BYTES = int(os.environ["GROW_AT"]), 24 * 2**30
right, kept = Trainer.step, []


def step(self, index: int):
    if index >= AT and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        kept.append(torch.empty(EACH_BYTES, dtype=torch.uint8, device=self.device))
    return right(self, index)


Trainer.step = step
main([f"--request={sys.argv[1]}", f"--out={sys.argv[2]}"])
