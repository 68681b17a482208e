"""Draw speed per user against throughput per GPU of serving: one line per engine through its Pareto-optimal
deployments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, floor, log, log10

from planner.pictures.palette import BLUE, GREEN, GREY, VERMILION
from planner.pictures.svg import MARGIN, Picture, legend, stacked
from planner.serving.pareto import Pareto
from planner.serving.reports.pareto import ENERGY, GPU, PRICE, USER, about, title, values_of
from simulator.serving.engine import engine_of

WIDTH, HEIGHT = 960.0, 420.0
LEFT, TOP, BOTTOM = 96.0, 96.0, 56.0
TICKS = 5
STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)  # distances between ticks, times a power of ten
COLOURS = (BLUE, VERMILION, GREEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point of the picture; `first` marks Pareto-optimal points of its group. `about` is its tooltip."""

    group: str
    x: float
    y: float
    about: str
    first: bool


def pareto_picture(found: Pareto) -> str:
    """Return the SVG: tokens per GPU, their price and their energy, each against tokens per user."""
    groups = [(name, engine_of(name).title) for name in dict.fromkeys(point.engine for point in found.points)]
    known = [name for name in (GPU, PRICE, ENERGY) if all(name in values_of(point) for point in found.points)]
    parts = [scatter(list(_dots(found, name)), title=title(found), x=USER, y=name, groups=groups) for name in known]
    return parts[0].text() if len(parts) == 1 else stacked(*parts)


def _dots(found: Pareto, name: str) -> Iterator[Dot]:
    for point in found.points:
        known = values_of(point)
        yield Dot(group=point.engine, x=known[USER], y=known[name], about=about(point), first=point.best_of_engine)


def colours(groups: Sequence[str]) -> dict[str, str]:
    """Return the colour of each group."""
    return {name: COLOURS[place] if place < len(COLOURS) else GREY for place, name in enumerate(groups)}


def scatter(dots: Sequence[Dot], *, title: str, x: str, y: str, groups: Sequence[tuple[str, str]]) -> Picture:
    """Return a picture of dots, with x from 0, and a logarithmic y axis for values over decades; `groups` are (name,
    label).
    """
    picture = Picture(WIDTH, HEIGHT, title, f"{y} against {x}")
    shades = colours([name for name, _ in groups])
    legend(picture, MARGIN, MARGIN + 32, [(label, shades[name]) for name, label in groups])
    wide = _reach([dot.x for dot in dots])
    at = _axes(picture, wide, [dot.y for dot in dots], x, y)
    for dot in dots:
        if not dot.first:
            picture.box(*_around(at(dot.x, dot.y), 2.0), shades[dot.group], about=dot.about)
    for name, _ in groups:
        line = sorted((dot for dot in dots if dot.group == name and dot.first), key=lambda dot: dot.x)
        picture.line([at(dot.x, dot.y) for dot in line], shades[name], 2.0)
        for dot in line:
            picture.box(*_around(at(dot.x, dot.y), 4.5), shades[name], about=dot.about)
    return picture


def _around(point: tuple[float, float], half: float) -> tuple[float, float, float, float]:
    return point[0] - half, point[1] - half, 2 * half, 2 * half


def _reach(values: Sequence[float]) -> float:
    """Return the end of an axis from 0: beyond all `values`, after a round number of equal steps."""
    least = max(1.01 * max(values, default=1.0), 1e-9) / TICKS
    power = 10.0 ** floor(log10(least))
    return TICKS * power * next(step for step in STEPS if step * power >= least * (1 - 1e-9))


def _axes(
    picture: Picture, wide: float, ys: Sequence[float], x: str, y: str
) -> Callable[[float, float], tuple[float, float]]:
    """Draw both axes with their ticks; return the function that places a point."""
    right, bottom = WIDTH - MARGIN, HEIGHT - BOTTOM
    least, most = min(ys, default=1.0), _reach(ys)
    decades = log(most / least) if y in {PRICE, ENERGY} and least > 0 else 0.0

    def at(value_x: float, value_y: float) -> tuple[float, float]:
        share = log(max(value_y, least) / least) / decades if decades else value_y / most
        return LEFT + value_x / wide * (right - LEFT), bottom - share * (bottom - TOP)

    for tick in range(TICKS + 1):
        share = tick / TICKS
        value_y = float(f"{least * exp(decades * share):.1e}") if decades else most * share
        picture.line([at(0, value_y), at(wide, value_y)], "", 1.0)
        picture.write(LEFT - 8, at(0, value_y)[1] + 4, f"{value_y:,.6g}", kind="quiet", anchor="end")
        picture.write(at(wide * share, value_y)[0], bottom + 20, f"{wide * share:,.6g}", kind="quiet", anchor="middle")
    picture.write(right, bottom + 40, x, kind="quiet", anchor="end")
    picture.write(MARGIN, TOP - 14, y, kind="quiet")
    return at
