"""The worker, whose rank 1 lives but never comes back from making its fourth batch: `REQUEST OUT`."""

import os
import sys
import time

from executor.parallel import train_step
from executor.run.worker import main

right = train_step.rank_batch


def rank_batch(*arguments, step: int, **settings):
    # Verification makes batches 0 and 1; warm-up and steps count on from 0.
    if step == 3 and os.environ["RANK"] == "1":
        time.sleep(600)
    return right(*arguments, step=step, **settings)


train_step.rank_batch = rank_batch
main([f"--request={sys.argv[1]}", f"--out={sys.argv[2]}"])
