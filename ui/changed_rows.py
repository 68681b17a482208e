"""Rows of a plan that was changed: other lengths and micro batches, other numbers of GPUs, and what frees memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.io.figures import change_text, gib_text, gpus_text
from simulator.config.estimate import Fit, chance
from topology.units import GIB, two_digits
from ui.charts.row_types import RunRow, SavingRow, SizeRow

if TYPE_CHECKING:
    from planner.search.fixes import Fix
    from planner.search.result import RankedPlan
    from planner.search.size_grid import Size
    from planner.search.whole_run import WholeRun
    from simulator.config.estimate import Estimate, Interval

LEAST_CHANGE = 0.005  # relative difference from which a step is called longer or shorter


def size_rows(sizes: Sequence[Size], ranked: RankedPlan, seq_len: int) -> list[SizeRow]:
    """Return the cells of a plan over lengths and micro batches: the step, and a rate for what surely fits."""
    return [_size_row(size, ranked, seq_len) for size in sizes]


def _size_row(size: Size, ranked: RankedPlan, seq_len: int) -> SizeRow:
    row: SizeRow = {
        "length": f"{size.seq_len:,}",
        "micro_batch": str(size.micro_batch_size),
        "tokens_per_s": None,
        "rate": "",
        "upper": "not legal",
        "lower": "",
        "state": size.problem,
        "here": (size.seq_len, size.micro_batch_size) == (seq_len, ranked.plan.micro_batch_size),
    }
    if size.step_s is None or size.tokens_per_s_per_gpu is None or size.reserved_bytes is None or size.fit is None:
        return row
    row["lower"] = f"{gib_text(size.reserved_bytes)} GiB"
    row["rate"] = f"{float(f'{size.tokens_per_s_per_gpu:.2g}'):,.0f} tokens/s"
    row["upper"] = f"{two_digits(size.step_s)} s"
    if size.fit is Fit.YES:
        row["tokens_per_s"], row["state"] = size.tokens_per_s_per_gpu, "fits"
    elif size.fit is Fit.NO:
        row["upper"], row["state"] = "does not fit", "does not fit"
    else:
        row["state"] = f"{chance(size.fit_probability)} likely to fit"
    return row


def run_rows(runs: Sequence[WholeRun], here: int) -> list[RunRow]:
    """Return whole runs as they are drawn, those that have a plan; `here` is the number of GPUs that is asked about."""
    rows: list[RunRow] = []
    for run in runs:
        cost = run.cost or run.gpu_hours
        if run.days is not None and cost is not None:
            rows.append(
                {
                    "label": gpus_text(run.gpus),
                    "days": run.days.value,
                    "days_low": run.days.low,
                    "days_high": run.days.high,
                    "days_text": with_ends(run.days),
                    "cost": cost.value,
                    "cost_low": cost.low,
                    "cost_high": cost.high,
                    "cost_text": with_ends(cost),
                    "here": run.gpus == here,
                }
            )
    return rows


def with_ends(interval: Interval) -> str:
    """Return a figure of a whole run with its range: `84 (65 to 110)`."""
    return f"{two_digits(interval.value)} ({two_digits(interval.low)} to {two_digits(interval.high)})"


def saving_rows(fixes: Sequence[Fix], estimate: Estimate) -> list[SavingRow]:
    """Return changes that free memory, as they are drawn."""
    held = estimate.memory.reserved_bytes
    return [
        {
            "change": fix.change,
            "from_gib": held / GIB,
            "to_gib": fix.reserved_bytes / GIB,
            "quicker": fix.longer < LEAST_CHANGE,
            "text": f"-{gib_text(held - fix.reserved_bytes)} GiB, {_time_text(fix)}",
        }
        for fix in fixes
    ]


def _time_text(fix: Fix) -> str:
    return f"{change_text(fix.longer)} time" if abs(fix.longer) >= LEAST_CHANGE else "as fast"
