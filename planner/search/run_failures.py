"""The effect of failures and checkpoints on a whole run: its days, hours and money, each with a range."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.io.figures import gib_text
from planner.question.goal import Goal
from planner.question.question import Question
from simulator.config.estimate import Interval
from simulator.failures.goodput import (
    GPU_HOURS,
    GPU_HOURS_RANGE,
    RESTART_S,
    STORAGE_BYTES_PER_S,
    Failures,
    checkpoint_bytes,
    copy_s,
    spread,
)
from topology.cluster import Source
from topology.errors import Infeasible
from topology.units import GIB

HOUR_S = 3600.0
LEAST_GOODPUT = 0.01  # of a run's time, below which it is said not to end


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """`total_s` of a run, of which `lost_s` are not useful steps; `assumed` lists assumptions for values that were not
    stated.
    """

    total_s: Interval
    goodput: Interval
    checkpoint_interval_s: Interval
    lost_s: Interval
    checkpoint_bytes: float
    mtbf_s: float
    failures: float
    waiting: float
    assumed: tuple[str, ...]


def failures_of(question: Question, goal: Goal, gpus: int, *, gpu_hours: float) -> Failures:
    """Return the failures of a run on so many GPUs, of which one comes in so many hours of a GPU."""
    nbytes = checkpoint_bytes(question)
    rate = goal.checkpoint_bytes_per_s or STORAGE_BYTES_PER_S * gpus
    write_s = nbytes / rate
    blocked = copy_s(question, nbytes, gpus) if goal.async_checkpoint else write_s
    restart = RESTART_S if goal.restart_s is None else goal.restart_s
    between = goal.interrupted_gpu_hours(gpu_hours, question.cluster.gpus_per_node)
    return Failures(
        mtbf_s=between * HOUR_S / gpus,
        repair_s=(goal.repair_hours or 0.0) * HOUR_S,
        spares=goal.spare_nodes,
        restart_s=restart + write_s,  # it is read as fast as it was written
        save_s=min(blocked, write_s),
        least_interval_s=write_s if goal.async_checkpoint else 0.0,
    )


def run_time(question: Question, goal: Goal, gpus: int, steps_s: Interval) -> RunTime:
    """Return what a run takes whose steps alone take `steps_s`. Raises Infeasible where it hardly progresses."""
    stated = goal.gpu_hours(question.cluster.gpus_per_node)
    failing = failures_of(question, goal, gpus, gpu_hours=stated or GPU_HOURS)
    interval = failing.best_interval_s
    goodput = failing.goodput(interval)
    if goodput < LEAST_GOODPUT:
        raise Infeasible(
            f"a run on {gpus:,} GPUs would not end: {goodput:.1%} of its time would be steps that count",
            why=f"a failure comes every {failing.mtbf_s / HOUR_S:.3g} h, and a checkpoint of"
            f" {gib_text(checkpoint_bytes(question))} GiB takes {failing.save_s / HOUR_S:.3g} h",
            remedy="--checkpoint-bandwidth 100GB/s, --async-checkpoint, or fewer GPUs",
        )
    total = steps_s.value / goodput
    chance_low, chance_high = spread(failing, steps_s.value, interval)
    rates = (stated, stated) if stated else GPU_HOURS_RANGE
    others = [failures_of(question, goal, gpus, gpu_hours=hours) for hours in rates]
    worst, best = ((one.goodput(one.best_interval_s), one.best_interval_s) for one in others)
    low = _together(steps_s.low / steps_s.value, chance_low, _ratio(goodput, best[0]))
    high = _together(steps_s.high / steps_s.value, chance_high, _ratio(goodput, worst[0]))
    good = _between(
        value=goodput,
        low=min(1.0, goodput / _together(chance_high, _ratio(goodput, worst[0]))),
        high=min(1.0, goodput / _together(chance_low, _ratio(goodput, best[0]))),
    )
    whole = _between(value=total, low=total * low, high=total * high)
    lost = _between(value=total * (1 - goodput), low=whole.low * (1 - good.high), high=whole.high * (1 - good.low))
    return RunTime(
        total_s=whole,
        goodput=good,
        checkpoint_interval_s=_between(value=interval, low=min(interval, worst[1]), high=max(interval, best[1])),
        lost_s=lost,
        checkpoint_bytes=checkpoint_bytes(question),
        mtbf_s=failing.mtbf_s,
        failures=total * (1 - failing.waiting) / failing.mtbf_s,
        waiting=failing.waiting,
        assumed=_assumed(question, goal, gpus, stated),
    )


def _between(*, value: float, low: float, high: float) -> Interval:
    return Interval(value=value, low=low, high=high, source=Source.ASSUMED)


def _ratio(of: float, other: float) -> float:
    return of / other if other > 0 else math.inf


def _together(*factors: float) -> float:
    """Return what independent factors are together at most, or at least: logarithms add up as errors do."""
    logs = [math.log(factor) if math.isfinite(factor) and factor > 0 else math.inf for factor in factors]
    sign = 1.0 if sum(logs) >= 0 else -1.0
    return math.exp(sign * math.sqrt(sum(log * log for log in logs))) if all(map(math.isfinite, logs)) else math.inf


def _assumed(question: Question, goal: Goal, gpus: int, stated: float | None) -> tuple[str, ...]:
    found = []
    if not stated:
        low, high = GPU_HOURS_RANGE
        found.append(
            f"a failure every {GPU_HOURS:,.0f} hours of a GPU (Llama 3 on 16,384 GPUs; other clusters {low:,.0f} to "
            f"{high:,.0f}); say another with --mtbf"
        )
    if not goal.checkpoint_bytes_per_s:
        rate = STORAGE_BYTES_PER_S * gpus
        found.append(
            f"checkpoints at {rate / 1e9:.3g} GB/s (Llama 3's storage, by GPU); say another with --checkpoint-bandwidth"
        )
    if goal.restart_s is None:
        found.append(
            f"{RESTART_S / 60:.0f} minutes from a failure to the next step (MegaScale); say another with --restart"
        )
    if goal.spot_hours is not None and goal.repair_hours is None:
        found.append("a node that is taken back is replaced at once; --repair says after how many hours")
    size = checkpoint_bytes(question)
    return (*found, f"checkpoints of {size / GIB:,.3g} GiB: what is trained, and the optimizer's state")
