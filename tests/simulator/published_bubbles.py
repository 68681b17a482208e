"""Bubbles of pipeline schedules as their papers give them: the truth that timings are compared with."""

from __future__ import annotations


def bubble_fraction(
    name: str,
    *,
    ranks: int,
    micro_batches: int,
    stages_per_rank: int = 1,
    forward_s: float = 1.0,
    input_grad_s: float = 1.0,
    weight_grad_s: float = 1.0,
) -> float:
    """Return the published formula: idle over total time of the rank that takes longest, messages being free.

    Times are of one stage, all stages alike; the time of a rank counts from its first action to its last. Formulas:
    (p-1)/(m+p-1) for GPipe and 1F1B, (p-1)/(vm+p-1) interleaved (arXiv 2104.04473 section 2.2) and breadth-first;
    (p-1)(F+I-W) idle for ZB-H1, the same per stage interleaved, and none for ZB-V with F=I=W (arXiv 2401.10241 table 2
    and section 6); for DualPipeV (p-1)(F+2B-3W) idle where a pair takes F+B (github.com/deepseek-ai/DualPipe, README),
    exact with F=I=W and slightly too much otherwise. Raises ValueError where no exact form is known;
    `pipeline_makespan` has no such limits.
    """
    p, m, v = ranks, micro_batches, stages_per_rank
    f, i, w = forward_s, input_grad_s, weight_grad_s
    work = m * v * (f + i + w)
    if name in {"GPipe", "1F1B"} or (name == "Interleaved1F1B" and m % p == 0) or (name == "LoopedBFS" and m >= p):
        idle = (p - 1) * (f + i + w)
    elif (name == "ZBH1" and m >= p and f + i >= w) or (name == "InterleavedZeroBubble" and m % p == 0 and f + i >= w):
        idle = (p - 1) * (f + i - w)
    elif name == "ZBVZeroBubble" and f == i == w and m >= 2 * p - 1:
        idle = 0.0
    elif name == "DualPipeV" and f == i == w and m >= 2 * p:
        idle = (p - 1) * (f + 2 * (i + w) - 3 * w)
    else:
        raise ValueError(f"no formula for {name} with p={p}, m={m}, v={v}, F={f}, I={i}, W={w}")
    return idle / (work + idle)
