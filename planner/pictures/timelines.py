"""Draw the predicted and the measured step on one time axis, with one lane per category of a rank."""

from __future__ import annotations

from collections.abc import Sequence

from planner.pictures.palette import SPANS
from planner.pictures.svg import MARGIN, Picture
from simulator.program import trace as tr
from simulator.program.trace import Interval, Trace

WIDTH = 960.0
LABEL = 230.0
LANE = 18.0
GAP = 6.0
TOP = 62.0
TICKS = 5
WORDS = {tr.COMMUNICATION: "communication", tr.COPY: "copies", tr.WAIT: "waiting for partners", tr.HOST: "host"}


def timelines(predicted: Trace | None, measured: Trace | None, *, title: str) -> str:
    """Return the SVG of the timelines of one rank of each trace, the one with the longest compute time.

    Spans closer than a pixel are merged. A measured collective includes the time it waits for other ranks.
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
        for category, intervals in found:
            share = tr.length_s(intervals) / trace.end_s
            picture.write(MARGIN + 12, y + 13, f"{WORDS.get(category, category)} {share:.0%}", kind="quiet")
            for start, end in _merge_close(intervals, 1 / scale):
                picture.bar(left + start * scale, y, (end - start) * scale, LANE, SPANS[category])
            y += LANE + GAP
        y += 8
    return picture.text()


def _busiest(trace: Trace) -> int:
    return max(trace.ranks, key=lambda rank: (trace.busy_s(rank, tr.COMPUTE), -rank))


def _lanes(trace: Trace) -> list[tuple[str, list[Interval]]]:
    """Return the busy intervals of the busiest rank by category, for categories that occur."""
    rank = _busiest(trace)
    found = [(c, tr.union((s.start_s, s.end_s) for s in trace.of(rank, category=c))) for c in SPANS]
    return [(category, intervals) for category, intervals in found if intervals]


def _merge_close(intervals: Sequence[Interval], gap_s: float) -> list[Interval]:
    """Merge intervals closer than `gap_s`, which would not be visible; this keeps files small."""
    merged: list[Interval] = []
    for start, end in intervals:
        if merged and start - merged[-1][1] < gap_s:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return merged
