"""The predicted and the measured timeline side by side, in one trace file for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from simulator.program.chrome_trace import to_chrome
from simulator.program.trace import Span, Trace
from topology.codec import JsonObject


def side_by_side(predicted: Trace | None, measured: Sequence[Trace]) -> JsonObject:
    """Return a Chrome trace with a process per rank and side: `predicted rank 0`, `measured rank 0`, ...

    Both begin at 0. Kernels of one stream whose measured times overlap (programmatic dependent launch starts a kernel
    while the one before it drains) are shown one after the other, as viewers drop crossing spans.
    """
    sides = [("predicted", predicted)] if predicted else []
    sides += [("measured", without_crossing_spans(trace)) for trace in measured]
    events: list[JsonObject] = []
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


def without_crossing_spans(trace: Trace) -> Trace:
    """Return the trace with crossing spans of a stream shortened so that they follow each other."""
    lanes: dict[tuple[int, str], list[Span]] = {}
    for span in trace.spans:
        lanes.setdefault((span.rank, span.stream), []).append(span)
    spans = [span for lane in lanes.values() for span in _nested(lane)]
    spans.sort(key=lambda s: (s.start_s, s.rank, s.stream))
    return Trace(spans=tuple(spans), flows=trace.flows, counters=trace.counters, source=trace.source)


def _nested(lane: Sequence[Span]) -> Iterator[Span]:
    """Yield the spans of a stream; a span that begins inside another and outlasts it starts at its end instead."""
    waiting = [(span.start_s, -span.end_s, number) for number, span in enumerate(lane)]
    heapify(waiting)
    open_ends: list[float] = []  # each inside the one before it
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
