"""The worker, one weight of which is no number on rank 1 from its fourth step on: `REQUEST OUT`."""

import os
import sys

import torch

from executor.model.shards import local_tensor
from executor.parallel.train_step import Trainer
from executor.run.worker import main

right = Trainer.step


def step(self, index: int):
    if index == 3 and os.environ["RANK"] == "1":
        with torch.no_grad():
            local_tensor(self.parameters()[0]).fill_(float("nan"))
    return right(self, index)


Trainer.step = step
main([f"--request={sys.argv[1]}", f"--out={sys.argv[2]}"])
