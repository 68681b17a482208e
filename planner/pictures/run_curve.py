"""Draw what a whole run costs against the days that it takes, one point for each number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from planner.pictures.palette import BLUE, VERMILION
from planner.pictures.svg import MARGIN, Picture
from planner.search.whole_run import WholeRun
from simulator.config.estimate import Interval

WIDTH, HEIGHT = 760.0, 480.0
LEFT, TOP, BOTTOM = 96.0, 64.0, 56.0
TICKS = 4


def run_curve(runs: Sequence[WholeRun], chosen: int, *, title: str, unit: str) -> str:
    """Return the SVG of `runs` that have a plan: days to the right, money (or GPU-hours) upwards, with 80 % ranges; the
    number of GPUs that was `chosen` stands out. `unit` is what money is in.
    """
    points = [(run, run.days, run.cost or run.gpu_hours) for run in runs if run.days and (run.cost or run.gpu_hours)]
    known = [(run, days, cost) for run, days, cost in points if days is not None and cost is not None]
    what = unit if all(run.cost for run, _, _ in known) else "GPU-hours"
    about = "; ".join(f"{run.gpus} GPUs: {days.value:.3g} days, {cost.value:.3g} {what}" for run, days, cost in known)
    picture = Picture(WIDTH, HEIGHT, title, about or "no number of GPUs has a plan")
    most = [max((end.high for end in ends), default=1.0) for ends in zip(*((d, c) for _, d, c in known), strict=True)]
    far, high = (value * 1.05 or 1.0 for value in (most or [1.0, 1.0]))
    right, low = WIDTH - MARGIN, HEIGHT - BOTTOM

    def x_of(days: float) -> float:
        return LEFT + days / far * (right - LEFT)

    def y_of(cost: float) -> float:
        return low - cost / high * (low - TOP)

    for tick in range(TICKS + 1):
        x, y = LEFT + tick / TICKS * (right - LEFT), low - tick / TICKS * (low - TOP)
        picture.line([(x, low), (x, low + 5)], "", 1.0)
        picture.line([(LEFT, y), (right, y)], "", 1.0)
        picture.write(x, low + 20, f"{tick / TICKS * far:.3g}", kind="quiet", anchor="middle")
        picture.write(LEFT - 8, y + 4, f"{tick / TICKS * high:.3g}", kind="quiet", anchor="end")
    picture.write((LEFT + right) / 2, HEIGHT - 10, "days", kind="quiet", anchor="middle")
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
    picture.write(x + 9, y - 8, f"{run.gpus} GPUs")
