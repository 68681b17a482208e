"""The worker, whose rank 1 is late: SLOW_BY `host` sleeps before each step, `kernels` computes more: `REQUEST OUT`."""

import os
import sys
import time

import torch

from executor.parallel.train_step import Trainer
from executor.run.worker import main

right = Trainer.backward


def backward(self, index: int):
    if os.environ["RANK"] == "1" and os.environ["SLOW_BY"] == "host":
        time.sleep(0.3)
    elif os.environ["RANK"] == "1":
        square = torch.ones(8192, 8192, dtype=torch.bfloat16, device=self.device)
        for _ in range(150):  # about 2 ms each
            square @ square
    return right(self, index)


Trainer.backward = backward
main([f"--request={sys.argv[1]}", f"--out={sys.argv[2]}"])
