"""A whole training run as text: what it takes, and a table over the numbers of GPUs that were tried."""

from __future__ import annotations

from planner.explain.tables import print_lines
from planner.io.grids import console, grid
from planner.io.plan_words import degrees_text
from planner.io.printable import printable
from planner.question.goal import Goal
from planner.search.whole_run import DAY_S, RunAnswer, WholeRun

MWH_J = 3.6e9


def print_run(found: RunAnswer) -> None:
    """Print what the run takes on the chosen number of GPUs, and the curve over all numbers tried."""
    screen = console()
    print_lines(screen, ["", f"run       {run_text(found.run, found.goal)}"])
    print_lines(screen, [f"          {line}" for line in found.run.assumed])
    if not found.curve:
        return
    rows = [(f"{'* ' if run.gpus == found.run.gpus else ''}{run.gpus}", *_cells(run)) for run in found.curve]
    screen.print(grid(("GPUs", "days (80% range)", "GPU-hours", "cost", "MWh", "plan"), rows, text=("plan",), gap=2))
    if meaning := _meaning(found):
        print_lines(screen, [meaning])


def run_text(run: WholeRun, goal: Goal) -> str:
    """Return a sentence on what a whole run takes."""
    days = f"{_range(run)} days"
    parts = [
        f"{_count(goal.tokens)} tokens are {run.steps:,.0f} steps",
        f"{days} on {run.gpus} GPUs, {_hours(run.gpu_hours.value)} GPU-hours",
    ]
    if run.cost is not None:
        parts.append(f"{run.cost.value:,.0f} at {goal.gpu_price_per_hour:g} for a GPU-hour")
    if run.energy_j is not None:
        parts.append(
            f"{run.energy_j / MWH_J:,.3g} MWh at {run.power_w:g} W a GPU (its power limit: {run.power_source}; hosts, "
            "network and cooling are not counted)"
        )
    parts.append(
        f"{run.goodput.value:.1%} of the time are steps that count ({run.goodput.low:.1%} to {run.goodput.high:.1%}): "
        f"{_count_of(run.failures)}, and a checkpoint every {_minutes(run.checkpoint_interval_s.value)}; no time is "
        "counted for evaluation"
    )
    return "; ".join(parts)


def _cells(run: WholeRun) -> tuple[str, ...]:
    if run.plan is None:
        return "-", "-", "-", "-", printable(run.problem)
    return (
        _range(run),
        _hours(run.gpu_hours.value),
        "-" if run.cost is None else f"{run.cost.value:,.0f}",
        "-" if run.energy_j is None else f"{run.energy_j / MWH_J:,.3g}",
        degrees_text(run.plan),
    )


def _meaning(found: RunAnswer) -> str:
    """Return what the starred number of GPUs is, where the goal sought one."""
    goal, run = found.goal, found.run
    limits = [] if goal.deadline_s is None else [f"{_days(goal.deadline_s)} days"]
    limits += [] if goal.budget is None else [f"a budget of {goal.budget:,.0f}"]
    if not limits:
        return ""
    which = "soonest" if goal.deadline_s is None else "cheapest"
    late = goal.deadline_s is not None and run.days.high * DAY_S > goal.deadline_s
    doubt = (
        f"; at the slow end of its range it takes {_days(run.days.high * DAY_S)} days, which is too long"
        if late
        else ""
    )
    return f"* {run.gpus} GPUs are the {which} of those tried within {' and '.join(limits)}{doubt}"


def _range(run: WholeRun) -> str:
    """Return the days of a run with their range."""
    value, low, high = (_days(days * DAY_S) for days in (run.days.value, run.days.low, run.days.high))
    return f"{value} ({low}-{high})"


def _count_of(failures: float) -> str:
    return "less than one failure is expected" if failures < 1 else f"{failures:,.0f} failures are expected"


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _days(seconds: float) -> str:
    return f"{seconds / DAY_S:.3g}" if seconds < 1000 * DAY_S else f"{seconds / DAY_S:,.0f}"


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def _count(tokens: float) -> str:
    for name, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if tokens >= size:
            return f"{tokens / size:g}{name}"
    return f"{tokens:,.0f}"
