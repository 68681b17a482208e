"""Draw where a step's time goes: one bar per term, each starting where the one above it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from planner.explain.waterfall import waterfall as fall_of
from planner.pictures.memory import memory_picture
from planner.pictures.palette import GREY, colour
from planner.pictures.svg import LETTER_PX, MARGIN, Picture, shortened, stacked
from simulator.config.estimate import Estimate

WIDTH = 960.0
ROW = 30.0
TOP = 74.0
LABEL = 250.0
VALUE = 130.0
Term = tuple[str, float, str]  # name, seconds, colour


class WaterfallRow(TypedDict):
    """A bar of a chart: a part of a step, or the step itself, which has `total` and no colour."""

    name: str
    seconds: float
    share: float
    meaning: str
    colour: NotRequired[str]
    total: NotRequired[bool]


def waterfall_rows(estimate: Estimate) -> list[WaterfallRow]:
    """Return the waterfall of an estimate as chart rows, the step itself last."""
    fall = fall_of(estimate)
    terms = [("compute", "model FLOPs at peak", fall.peak_s, "what the datasheet would allow")]
    terms += [(term.part, term.name, term.seconds, term.meaning) for term in fall.terms]
    rows: list[WaterfallRow] = [
        {
            "name": name,
            "seconds": seconds,
            "share": seconds / fall.step_s,
            "meaning": meaning,
            "colour": colour("time", part),
        }
        for part, name, seconds, meaning in terms
    ]
    return [
        *rows,
        {"name": "step", "seconds": fall.step_s, "share": 1.0, "meaning": "predicted step time", "total": True},
    ]


def estimate_picture(estimate: Estimate, *, title: str) -> str:
    """Return the SVG of an estimate: the waterfall of its step, and below it its memory."""
    terms = [(row["name"], row["seconds"], row["colour"]) for row in waterfall_rows(estimate)[:-1]]
    step = estimate.step_s
    above = waterfall(terms, title, step.low, step.high, step.source)
    return stacked(above, memory_picture(estimate.memory, f"{title}: memory"))


def waterfall(terms: Sequence[Term], title: str, low_s: float, high_s: float, source: str) -> Picture:
    """Return the picture of a step made of `terms`, in their order.

    A negative term is drawn to the left. `low_s` to `high_s` is the 80% range of the step, drawn as a whisker; `source`
    is the source of the numbers.
    """
    total = sum(seconds for _, seconds, _ in terms)
    about = f"{total:.3g} s a step, 80% range {low_s:.3g} to {high_s:.3g} s; {source} numbers"
    picture = Picture(WIDTH, TOP + ROW * (len(terms) + 1) + MARGIN, title, about)
    picture.write(MARGIN, MARGIN + 30, about, kind="quiet")
    left, most = MARGIN + LABEL, max(total, high_s, 1e-12)
    scale = (WIDTH - left - VALUE - MARGIN) / most
    start = 0.0
    for row, (name, seconds, fill) in enumerate(terms):
        y = TOP + ROW * row
        end = start + seconds
        share = f"{seconds / total:.0%}" if abs(seconds) >= 0.005 * total else "<1%"
        picture.write(left - 12, y + 18, shortened(name, LABEL - 12), anchor="end")
        begin = min(start, end)
        picture.box(left + begin * scale, y + 4, abs(seconds) * scale, ROW - 8, fill, f"{name}: {seconds:.4g} s")
        picture.line([(left + end * scale, y + ROW - 4), (left + end * scale, y + ROW + 4)], "")
        picture.write(left + max(start, end) * scale + 8, y + 18, f"{seconds:.3g} s, {share}", kind="quiet")
        start = end
    y = TOP + ROW * len(terms)
    picture.write(left - 12, y + 18, "step", anchor="end")
    picture.line([(left, y + 14), (left + total * scale, y + 14)], GREY, 5.0)
    for x in (low_s, high_s):
        picture.line([(left + x * scale, y + 7), (left + x * scale, y + 21)], "", 2.0)
    picture.line([(left + low_s * scale, y + 14), (left + high_s * scale, y + 14)], "", 2.0)
    shown = f"{total:.3g} s"
    picture.write(min(left + high_s * scale + 8, WIDTH - MARGIN - LETTER_PX * len(shown)), y + 18, shown)
    return picture
