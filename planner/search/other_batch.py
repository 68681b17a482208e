"""Another global batch, near the one that was asked for, that more data-parallel degrees divide.

Of 64 sequences on 12 GPUs no plan is data parallel over all of them; of 60 the best one is.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from planner.question.prediction import predict
from planner.question.question import Question
from planner.search.finalists import Finalist
from planner.search.infeasible import ConstrainedQuestion
from planner.search.plan_space.candidates import Bounds
from planner.search.result import OtherBatch
from simulator.config.estimate import Fit
from simulator.memory.plan_memory import Replays
from topology.errors import Unproved

LEAST_GAIN = 0.05  # of throughput, for which another batch is worth its trouble
MOST_CHANGE = 0.25  # of the batch: with a larger change, training is another


def other_batch(question: Question, bounds: Bounds, best: Finalist, deadline: float | None) -> OtherBatch | None:
    """Return the nearest batch that all GPUs divide, if its best plan surely fits and the `best` plan of the question
    is slower by LEAST_GAIN, or may not fit.
    """
    asked, gpus = question.workload.global_batch_size, question.count
    size = max(round(asked / gpus), 1) * gpus
    if size == asked or abs(size - asked) > MOST_CHANGE * asked:
        return None
    other = replace(question, workload=replace(question.workload, global_batch_size=size))
    with suppress(Unproved):
        plan = ConstrainedQuestion(question=other, bounds=bounds).best_plan(deadline, Replays(other))
        if plan is None:
            return None
        found = predict(other, plan).estimate
        gain = found.tokens_per_s_per_gpu / best.estimate.tokens_per_s_per_gpu - 1
        if found.memory.fit is Fit.YES and (gain >= LEAST_GAIN or best.estimate.memory.fit is not Fit.YES):
            return OtherBatch(
                global_batch_size=size, plan=plan, tokens_per_s_per_gpu=found.tokens_per_s_per_gpu, gain=gain
            )
    return None
