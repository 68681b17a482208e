"""The worker, for which time is over once three steps are timed: `REQUEST OUT`."""

import sys

from executor.launch.records import Deadline
from executor.parallel.train_step import Trainer
from executor.run.worker import main

right, taken = Trainer.step, []


def step(self, index: int):
    taken.append(index)
    return right(self, index)


Trainer.step = step
# One step of warm-up, which counts from 0 as the timed ones do.
Deadline.allows = lambda _self, _seconds: len(taken) < 4
main([f"--request={sys.argv[1]}", f"--out={sys.argv[2]}"])
