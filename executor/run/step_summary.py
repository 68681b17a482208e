"""Summary of a run from its ranks' step records: times, throughput, clocks and memory; and the ranks that kept others
waiting in its profiled step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median

from executor.launch.records import median_and_spread
from executor.launch.request import Request
from executor.run.rank_records import RankRecords, StepRecord
from simulator.config.plan import Plan, rank_grid
from simulator.program import trace as tr
from simulator.program.trace import Trace
from topology.codec import JsonObject

LEAST_SHARE = 0.1  # share of the step by which the others wait longer; below it is random variation
LONGER = 1.05  # ratio to the others' kernel time above which kernels, not the host, make a rank late
CLOCK_CHANGE = 0.1  # relative change of a run's clocks; more than the power limit changes them between steps


def summarise_steps(request: Request, by_rank: Sequence[RankRecords]) -> JsonObject:
    """Return step time, throughput and memory from the ranks' records; only steps that all ranks ran count.

    The time of a step is that of its slowest rank. The spread is (90th - 10th percentile) / median.
    """
    steps = [records.steps for records in by_rank]
    count = min((len(taken) for taken in steps), default=0)
    seconds = [max(taken[i].seconds for taken in steps) for i in range(count)]
    first = steps[0] if steps else []
    on_device = [max(taken[i].device_s or 0.0 for taken in steps) for i in range(count)]
    answer: JsonObject = {
        "steps": count,
        "steps_asked": request.steps,
        "step_s": None,
        "losses": [step.loss for step in first[:count]],
        "gradient_norms": [step.gradient_norm for step in first[:count]],
        "memory_by_rank": [records.peak_memory for records in by_rank],
        "source": "measured",
    }
    if not seconds:
        return answer
    mid, spread = median_and_spread(seconds)
    gpus, tokens = request.plan.gpus, request.workload.tokens_per_step
    flops = request.model.training_flops_per_token(request.workload.seq_len) * tokens
    peak, clocks = request.peak_flops, _slowest_clocks(steps, count)
    answer |= {
        "step_s": {"median": median(seconds), "spread": spread, "all": seconds},
        # By CUDA events around the step; None without a GPU.
        "device_step_s": median(on_device) if all(on_device) else None,
        # Mean over each step by the SMs' cycle counters, on the slowest rank; None without a GPU.
        "sm_clock_hz": median(clocks) if clocks else None,
        "sm_clock_change": _clock_change(clocks),
        "host": _busiest_host(by_rank),
        "tokens_per_s": tokens / mid,
        "tokens_per_s_per_gpu": tokens / mid / gpus,
        "tflops_per_gpu": flops / mid / gpus / 1e12,
        "mfu": flops / mid / gpus / peak if peak else None,
        "mfu_denominator": {"peak_flops": peak, "source": request.peak_flops_source or "none given for this device"},
    }
    return answer


def _busiest_host(by_rank: Sequence[RankRecords]) -> JsonObject | None:
    """Return the load record of the node with the largest share of its cores busy for others; None without records."""
    found = [entry for records in by_rank for entry in records.of("host")]
    return max(found, key=lambda one: (one["others"] + one["stolen"]) / one["cores"], default=None)


def _slowest_clocks(steps: Sequence[Sequence[StepRecord]], count: int) -> list[float]:
    """Return the lowest clock of all ranks in each step, in Hz, where all ranks know theirs."""
    clocks = [[taken[i].sm_clock_hz for taken in steps] for i in range(count)]
    return [min(hz for hz in step if hz) for step in clocks if all(step)]


def _clock_change(clocks: Sequence[float]) -> dict[str, float] | None:
    """Return the medians before and after the step at which clocks changed most; None for less than CLOCK_CHANGE.

    When a limit is set or lifted during a run, or a GPU heats up, the run has two parts, and its median describes
    neither.
    """
    count = len(clocks)
    if count < 4:
        return None
    # The cut with the least variance within the two parts, neither of which is a single step.
    at = max(range(2, count - 1), key=lambda i: i * (count - i) * (mean(clocks[:i]) - mean(clocks[i:])) ** 2)
    before, after = median(clocks[:at]), median(clocks[at:])
    return (
        {"step": float(at), "before_hz": before, "after_hz": after} if abs(after / before - 1) > CLOCK_CHANGE else None
    )


def slow_ranks(plan: Plan, traces: Mapping[int, Trace]) -> list[str]:
    """Return a line for each rank that is later than the other ranks of its stage, which do the same work.

    Judged by kernels of NCCL, which last from their launch until all ranks have joined; empty where there are none.
    """
    lines = []
    for stage in rank_grid(plan):
        ranks = [int(rank) for rank in stage.flat if int(rank) in traces]
        if len(ranks) < 2 or len(ranks) < stage.size:
            continue
        waits = {rank: traces[rank].exposed_s(rank) for rank in ranks}
        computes = {rank: traces[rank].busy_s(rank, tr.COMPUTE) for rank in ranks}
        late = min(ranks, key=lambda rank: waits[rank])
        others = [rank for rank in ranks if rank != late]
        step_s, waited_s = max(traces[rank].end_s for rank in ranks), median(waits[rank] for rank in others)
        if waited_s - waits[late] < LEAST_SHARE * step_s or not all(waits.values()):
            continue
        slower = computes[late] / max(median(computes[rank] for rank in others), 1e-12)
        cause = f"its kernels took {slower:.2f} times as long" if slower >= LONGER else "its host was late"
        lines.append(
            f"rank {late} kept others waiting: {waited_s:.3g} s of a step in collectives, itself {waits[late]:.3g} s;"
            f" {cause}"
        )
    return lines
