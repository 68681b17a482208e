"""The predicted step and the measured one beside each other: a picture, and a file for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from html import escape
from typing import Any

from simulator import trace as tr
from simulator.chrome import to_chrome
from simulator.trace import Span, Trace

# Okabe and Ito's colours, which colour-blind people tell apart; the same for the same category on both sides.
COLOURS = {
    tr.COMPUTE: "#0072B2",
    tr.COMMUNICATION: "#E69F00",
    tr.COPY: "#009E73",
    tr.WAIT: "#CC79A7",
    tr.HOST: "#999999",
}
WIDTH, LEFT, LANE, GAP = 1000, 190, 18, 6  # pixels
WORDS = {tr.COMMUNICATION: "communication (with waiting)", tr.COPY: "copies", tr.WAIT: "waiting for partners"}


def side_by_side(predicted: Trace | None, measured: Sequence[Trace]) -> dict[str, Any]:
    """Return a Chrome trace with a process for each rank of either side: `predicted rank 0`, `measured rank 0`.

    Both begin at 0. Kernels of one stream whose measured times overlap (programmatic dependent launch starts a kernel
    while the one before it drains) are shown one after the other: viewers drop crossing spans.
    """
    sides = [("predicted", predicted)] if predicted else []
    sides += [("measured", settled(trace)) for trace in measured]
    events: list[dict[str, Any]] = []
    for number, (word, trace) in enumerate(sides):
        for event in to_chrome(trace)["traceEvents"]:
            rank = event["pid"]
            moved = {**event, "pid": 2 * rank + (word == "measured")}
            if event["name"] == "process_name":
                moved["args"] = {"name": f"{word} {event['args']['name']}"}
            if event["name"] == "process_sort_index":
                moved["args"] = {"sort_index": moved["pid"]}
            if "id" in event:
                moved["id"] = f"{number}.{event['id']}"
            events.append(moved)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": "predicted and measured"}}


def settled(trace: Trace) -> Trace:
    """Return the trace with crossing spans of a stream cut so that they follow each other."""
    lanes: dict[tuple[int, str], list[Span]] = {}
    for span in trace.spans:
        lanes.setdefault((span.rank, span.stream), []).append(span)
    spans = [span for lane in lanes.values() for span in _nested(lane)]
    spans.sort(key=lambda s: (s.start_s, s.rank, s.stream))
    return Trace(spans=tuple(spans), flows=trace.flows, counters=trace.counters, source=trace.source)


def _nested(lane: Sequence[Span]) -> Iterator[Span]:
    """Yield the spans of a stream, those that begin inside another and outlast it from its end on."""
    waiting = [(span.start_s, -span.end_s, number) for number, span in enumerate(lane)]
    heapify(waiting)
    open_ends: list[float] = []  # each within the one before it
    while waiting:
        start, negative, number = heappop(waiting)
        span, end = lane[number], -negative
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        crossed = [other for other in open_ends if other < end]
        if crossed:
            heappush(waiting, (crossed[0], negative, number))
            continue
        open_ends.append(end)
        yield Span(span.rank, span.stream, span.name, start, end, span.category)


def picture(predicted: Trace | None, measured: Trace | None, *, title: str) -> str:
    """Return an SVG: a lane per category of one rank, the predicted step above the measured one, on one time axis.

    The rank is the one that computes longest on each side. Spans closer than a pixel flow together.
    """
    sides = [(word, trace) for word, trace in (("predicted", predicted), ("measured", measured)) if trace]
    end = max((trace.end_s for _, trace in sides), default=0.0) or 1.0
    scale = (WIDTH - LEFT - 10) / end
    rows: list[str] = []
    y = 40
    for word, trace in sides:
        rank = max(trace.ranks, key=lambda r: (trace.busy_s(r, tr.COMPUTE), -r))
        rows.append(_text(8, y + 4, f"{word}: {trace.end_s:.4g} s, rank {rank}", bold=True))
        y += 12
        for category, colour in COLOURS.items():
            busy = tr.union((s.start_s, s.end_s) for s in trace.of(rank, category=category))
            if not busy:
                continue
            share = tr.length_s(busy) / end if end else 0.0
            rows.append(_text(16, y + LANE - 5, f"{WORDS.get(category, category)} {share:.0%}"))
            rows += [
                f'<rect x="{LEFT + a * scale:.2f}" y="{y}" width="{max((b - a) * scale, 0.3):.2f}" height="{LANE}"'
                f' fill="{colour}"/>'
                for a, b in _joined(busy, 1 / scale)
            ]
            y += LANE + GAP
        y += 16
    ticks = []
    for k in range(6):
        x = LEFT + k / 5 * end * scale
        ticks.append(f'<line x1="{x:.1f}" y1="30" x2="{x:.1f}" y2="{y}" stroke="#ddd"/>')
        ticks.append(_text(x, y + 12, f"{k / 5 * end * 1e3:.4g} ms", anchor="middle"))
    height = y + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 40} {height}" font-family="sans-serif"'
        f' font-size="11" role="img"><title>{escape(title)}</title>'
        f'<rect width="100%" height="100%" fill="white"/>{_text(8, 18, title, bold=True)}'
        + "".join([*ticks, *rows])
        + "</svg>\n"
    )


def _joined(busy: Sequence[tr.Interval], gap_s: float) -> list[tr.Interval]:
    """Join intervals that lie closer than `gap_s`: nobody sees the gap, and files stay small."""
    joined: list[tr.Interval] = []
    for start, end in busy:
        if joined and start - joined[-1][1] < gap_s:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined


def _text(x: float, y: float, words: str, *, bold: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
