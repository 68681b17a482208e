"""A whole training run as text: time and cost, and a table over the numbers of GPUs."""

from __future__ import annotations

from planner.explain.tables import print_lines
from planner.io.grids import console, grid
from planner.io.plan_words import degrees_text
from planner.io.printable import printable
from planner.question.goal import Goal
from planner.search.whole_run import DAY_S, RunAnswer, WholeRun
from simulator.config.estimate import Interval
from topology.units import two_digits

MWH_J = 3.6e9


def print_run(found: RunAnswer) -> None:
    """Print the run on the chosen number of GPUs, and the curve over all numbers tried."""
    screen = console()
    print_lines(screen, ["", f"run       {run_text(found.run, found.goal)}"])
    print_lines(screen, [f"          {line}" for line in found.run.assumed])
    if not found.curve:
        return
    rows = [(f"{'* ' if run.gpus == found.run.gpus else ''}{run.gpus}", *_cells(run)) for run in found.curve]
    headings = ("GPUs", "days (80% range)", "GPU-hours", "cost (80% range)", "MWh", "plan")
    screen.print(grid(headings, rows, text=("plan",), gap=2))
    if meaning := _meaning(found):
        print_lines(screen, [meaning])


def run_text(run: WholeRun, goal: Goal) -> str:
    """Return a sentence on what a whole run takes."""
    parts = [
        f"{tokens_name(goal.tokens)} tokens are {run.steps:,.0f} steps",
        f"{_range(run.days, ' days')} on {run.gpus} GPU{'s' * (run.gpus != 1)}, {_value(run.gpu_hours)} GPU-hours",
    ]
    if run.cost is not None:
        parts.append(f"a cost of {_range(run.cost)} at {goal.gpu_price_per_hour:g} for a GPU-hour")
    if run.energy_j is not None:
        parts.append(
            f"{two_digits(run.energy_j / MWH_J)} MWh at {run.power_w:g} W a GPU (its power limit: {run.power_source}; "
            "hosts, network and cooling are not counted)"
        )
    if run.goodput is not None and run.checkpoint_interval_s is not None:
        parts.append(
            f"{run.goodput.value:.1%} of the time are steps that count ({run.goodput.low:.1%} to "
            f"{run.goodput.high:.1%}): {_failures(run.failures)}, and a checkpoint every "
            f"{_time(run.checkpoint_interval_s.value)}"
        )
    if goal.repair_hours:
        spares = f"{goal.spare_nodes} spare node{'s' * (goal.spare_nodes != 1)}"
        parts.append(f"with {spares} it waits {run.waiting:.2%} of the time for nodes that are out")
    parts.append("no time is counted for evaluation")
    return "; ".join(parts)


def _cells(run: WholeRun) -> tuple[str, ...]:
    if run.plan is None:
        return "-", "-", "-", "-", printable(run.problem)
    return (
        _range(run.days),
        _value(run.gpu_hours),
        _range(run.cost),
        "-" if run.energy_j is None else two_digits(run.energy_j / MWH_J),
        degrees_text(run.plan),
    )


def _meaning(found: RunAnswer) -> str:
    """Return what the starred number of GPUs is, if the goal determined one."""
    goal, run = found.goal, found.run
    limits = [] if goal.deadline_s is None else [f"{two_digits(goal.deadline_s / DAY_S)} days"]
    limits += [] if goal.budget is None else [f"a budget of {goal.budget:,.0f}"]
    if not limits:
        return ""
    which = "soonest" if goal.deadline_s is None else "cheapest"
    doubts = []
    if run.days is not None and goal.deadline_s is not None and run.days.high * DAY_S > goal.deadline_s:
        doubts.append(f"takes {two_digits(run.days.high)} days, which is too long")
    if run.cost is not None and goal.budget is not None and run.cost.high > goal.budget:
        doubts.append(f"costs {two_digits(run.cost.high)}, which is too much")
    doubt = f"; at the slow end of its range it {' and '.join(doubts)}" if doubts else ""
    return f"* {run.gpus} GPUs are the {which} of those tried within {' and '.join(limits)}{doubt}"


def _failures(count: float) -> str:
    if round(count) <= 1:
        return f"{'less than ' * (count < 1)}one failure is expected"
    return f"{count:,.0f} failures are expected"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _range(interval: Interval | None, unit: str = "") -> str:
    """Return a value with its unit and 80 % range; a dash for None."""
    if interval is None:
        return "-"
    return f"{two_digits(interval.value)}{unit} ({two_digits(interval.low)} to {two_digits(interval.high)})"


def _value(interval: Interval | None) -> str:
    return "-" if interval is None else two_digits(interval.value)


def tokens_name(tokens: float) -> str:
    """Return a number of tokens in short form: `2T`, `300B`."""
    for name, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if tokens >= size:
            return f"{tokens / size:g}{name}"
    return f"{tokens:,.0f}"
