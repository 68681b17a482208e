"""The predicted step and the measured one on one time axis: a lane per category of one rank, predicted above."""

from __future__ import annotations

from collections.abc import Sequence

from planner.palette import SPANS
from planner.pictures.svg import MARGIN, Picture
from simulator import trace as tr
from simulator.trace import Interval, Trace

WIDTH = 960.0
LABEL = 230.0
LANE = 18.0
GAP = 6.0
TOP = 62.0
TICKS = 5
WORDS = {tr.COMMUNICATION: "communication", tr.COPY: "copies", tr.WAIT: "waiting for partners", tr.HOST: "host"}


def timelines(predicted: Trace | None, measured: Trace | None, *, title: str) -> str:
    """Return the SVG of one rank's timelines, that which computes longest on each side.

    Spans closer than a pixel flow together. A measured transfer lasts until its partners have come.
    """
    sides = [(word, trace) for word, trace in (("predicted", predicted), ("measured", measured)) if trace]
    end_s = max((trace.end_s for _, trace in sides), default=0.0) or 1.0
    lanes = [(word, trace, _lanes(trace)) for word, trace in sides]
    height = TOP + sum(30 + (LANE + GAP) * len(found) for _, _, found in lanes) + 2 * MARGIN
    about = "; ".join(f"{word} {trace.end_s:.4g} s" for word, trace in sides)
    picture = Picture(WIDTH, height, title, about)
    left = MARGIN + LABEL
    scale = (WIDTH - left - MARGIN) / end_s
    bottom = height - 2 * MARGIN
    for tick in range(TICKS + 1):
        x = left + tick / TICKS * end_s * scale
        picture.line([(x, TOP - 8), (x, bottom)], "", 1.0)
        picture.write(x, bottom + 16, f"{tick / TICKS * end_s * 1e3:.4g} ms", kind="quiet", anchor="middle")
    y = TOP
    for word, trace, found in lanes:
        picture.write(MARGIN, y + 12, f"{word}: {trace.end_s:.4g} s, rank {_busiest(trace)}")
        y += 22
        for category, busy in found:
            share = tr.length_s(busy) / trace.end_s
            picture.write(MARGIN + 12, y + 13, f"{WORDS.get(category, category)} {share:.0%}", kind="quiet")
            for start, end in _joined(busy, 1 / scale):
                picture.bar(left + start * scale, y, (end - start) * scale, LANE, SPANS[category])
            y += LANE + GAP
        y += 8
    return picture.text()


def _busiest(trace: Trace) -> int:
    return max(trace.ranks, key=lambda rank: (trace.busy_s(rank, tr.COMPUTE), -rank))


def _lanes(trace: Trace) -> list[tuple[str, list[Interval]]]:
    """Return when the busiest rank did what, by category, those that it did at all."""
    rank = _busiest(trace)
    found = [(c, tr.union((s.start_s, s.end_s) for s in trace.of(rank, category=c))) for c in SPANS]
    return [(category, busy) for category, busy in found if busy]


def _joined(busy: Sequence[Interval], gap_s: float) -> list[Interval]:
    """Join intervals that lie closer than `gap_s`: nobody sees the gap, and files stay small."""
    joined: list[Interval] = []
    for start, end in busy:
        if joined and start - joined[-1][1] < gap_s:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined
