"""Summary of a run from its ranks' step records: times, throughput, clocks and memory."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from executor.launch.records import median_and_spread
from executor.launch.request import Request
from executor.run.rank_records import RankRecords, StepRecord
from topology.codec import JsonObject

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
