"""Draw the cost of a whole run against its days, one point for each number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.pictures.palette import BLUE, VERMILION
from planner.pictures.svg import MARGIN, Picture
from planner.search.whole_run import WholeRun
from simulator.config.estimate import Interval
from topology.units import two_digits

WIDTH, HEIGHT = 760.0, 480.0
LEFT, TOP, BOTTOM = 96.0, 64.0, 56.0
PAD = 24.0  # pixels between the points and the edges
TICKS = 4


def round_ticks(most: float) -> list[float]:
    """Return round numbers from 0, about TICKS apart, to the first that is not below `most`."""
    tenth = 10.0 ** math.floor(math.log10(most / TICKS))
    step = next(tenth * of for of in (1, 2, 2.5, 5, 10) if tenth * of >= most / TICKS * 0.999)
    return [step * i for i in range(math.ceil(most / step * 0.999) + 1)]


def run_curve(runs: Sequence[WholeRun], chosen: int, *, title: str, unit: str) -> str:
    """Return the SVG of `runs` that have a plan: days to the right, money (or GPU-hours) upwards, with 80 % ranges; the
    `chosen` number of GPUs is highlighted. `unit` is the currency.
    """
    points = [(run, run.days, run.cost or run.gpu_hours) for run in runs if run.days and (run.cost or run.gpu_hours)]
    known = [(run, days, cost) for run, days, cost in points if days is not None and cost is not None]
    what = unit if all(run.cost for run, _, _ in known) else "GPU-hours"
    about = "; ".join(f"{run.gpus} GPUs: {days.value:.3g} days, {cost.value:.3g} {what}" for run, days, cost in known)
    picture = Picture(WIDTH, HEIGHT, title, about or "no number of GPUs has a plan")
    near, far = min((days.low for _, days, _ in known), default=1.0), max((d.high for _, d, _ in known), default=2.0)
    ticks = round_ticks(max((cost.high for _, _, cost in known), default=1.0))
    right, low = WIDTH - MARGIN, HEIGHT - BOTTOM

    def x_of(days: float) -> float:
        return LEFT + PAD + math.log(days / near) / (math.log(far / near) or 1.0) * (right - LEFT - 2 * PAD)

    def y_of(cost: float) -> float:
        return low - cost / ticks[-1] * (low - TOP)

    for tick in ticks:
        picture.line([(LEFT, y_of(tick)), (right, y_of(tick))], "", 1.0)
        picture.write(LEFT - 8, y_of(tick) + 4, f"{tick:,.10g}", kind="quiet", anchor="end")
    for _, days, _ in known:
        picture.line([(x_of(days.value), low), (x_of(days.value), low + 5)], "", 1.0)
        picture.write(x_of(days.value), low + 20, two_digits(days.value), kind="quiet", anchor="middle")
    picture.write((LEFT + right) / 2, HEIGHT - 10, "days (logarithmic)", kind="quiet", anchor="middle")
    picture.write(MARGIN, TOP - 14, what, kind="quiet")
    picture.line([(x_of(days.value), y_of(cost.value)) for _, days, cost in known], BLUE, 1.5)
    for run, days, cost in known:
        _point(picture, run, (x_of, y_of), (days, cost), VERMILION if run.gpus == chosen else BLUE)
    return picture.text()


def _point(picture: Picture, run: WholeRun, at: tuple, ends: tuple[Interval, Interval], colour: str) -> None:  # type: ignore[type-arg]
    (x_of, y_of), (days, cost) = at, ends
    x, y = x_of(days.value), y_of(cost.value)
    picture.line([(x_of(days.low), y), (x_of(days.high), y)], colour, 1.0)
    picture.line([(x, y_of(cost.low)), (x, y_of(cost.high))], colour, 1.0)
    picture.box(x - 5, y - 5, 10, 10, colour, about=f"{run.gpus} GPUs: {days.value:.3g} days, {cost.value:.3g}")
    picture.write(x + 7, y - 8, f"{run.gpus} GPUs")
