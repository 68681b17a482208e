"""A plan with other sequence lengths and micro batches: its step times, and which of them fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.question.question import Question
from simulator.config.estimate import Estimate, Fit
from simulator.config.plan import Plan
from simulator.memory.estimate import with_replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A plan with one length of sequences (tokens) and one micro batch (sequences), with as many micro batches as the
    plan has.

    `tokens_per_s_per_gpu` and the following fields are None if no such plan is legal; `problem` then gives the reason.
    """

    seq_len: int
    micro_batch_size: int
    global_batch_size: int
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    reserved_bytes: float | None = None
    fit: Fit | None = None
    fit_probability: float = 0.0
    problem: str = ""


def size_grid(
    question: Question, plan: Plan, estimate: Estimate, seq_lens: Sequence[int], micro_batches: Sequence[int]
) -> tuple[Size, ...]:
    """Return the plan at every length and micro batch, by the analytical model scaled by the ratio of `estimate` to it;
    memory is replayed for each.
    """
    count = plan.micro_batches(question.workload.global_batch_size)
    scale = estimate.step_s.value / question.estimate([plan]).estimate(0).step_s.value
    grid = []
    for seq_len in seq_lens:
        for size in micro_batches:
            changed = replace(plan, micro_batch_size=size)
            batch = count * size * plan.data_parallel
            workload = replace(question.workload, seq_len=seq_len, global_batch_size=batch)
            grid.append(_size(replace(question, workload=workload), changed, scale))
    return tuple(grid)


def _size(asked: Question, plan: Plan, scale: float) -> Size:
    workload = asked.workload
    there = Size(
        seq_len=workload.seq_len,
        micro_batch_size=plan.micro_batch_size,
        global_batch_size=workload.global_batch_size,
    )
    if not asked.legal(plan):
        return replace(there, problem=asked.problems(plan)[0].message)
    found = with_replay(asked, plan, asked.estimate([plan]).estimate(0))
    step_s = found.step_s.value * scale
    return replace(
        there,
        step_s=step_s,
        tokens_per_s_per_gpu=workload.tokens_per_step / step_s / plan.gpus,
        reserved_bytes=found.memory.reserved_bytes,
        fit=found.memory.fit,
        fit_probability=found.memory.fit_probability,
    )
