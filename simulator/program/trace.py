"""Timelines, simulated or measured: one type for both, so that they can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Interval = tuple[float, float]

# Categories of spans. A reader counts any other as `other`.
COMPUTE = "compute"
COMMUNICATION = "communication"
WAIT = "wait"  # a transfer that has been launched and waits for its partners
COPY = "copy"
HOST = "host"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran on a stream of a rank. On one stream, spans are nested or disjoint."""

    rank: int
    stream: str
    name: str
    start_s: float
    end_s: float
    category: str = COMPUTE

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Flow:
    """An arrow from one span to another: a message from its send to its receive."""

    name: str
    rank: int
    stream: str
    start_s: float
    to_rank: int
    to_stream: str
    end_s: float


@dataclass(frozen=True, slots=True)
class Counter:
    """A quantity over time: each sample holds until the next. `unit` is shown with the values."""

    rank: int
    name: str
    unit: str
    samples: tuple[tuple[float, float], ...]  # (time in seconds, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Spans in order of their start. `source` is `simulated` or `measured`."""

    spans: tuple[Span, ...]
    flows: tuple[Flow, ...] = ()
    counters: tuple[Counter, ...] = ()
    source: str = "simulated"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({span.rank for span in self.spans}))

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    def of(self, rank: int | None = None, stream: str | None = None, category: str | None = None) -> Iterator[Span]:
        """Yield the spans of a rank, a stream and a category; None matches any."""
        for span in self.spans:
            if (
                (rank is None or span.rank == rank)
                and (stream is None or span.stream == stream)
                and (category is None or span.category == category)
            ):
                yield span

    def busy_s(self, rank: int, category: str | None = None, stream: str | None = None) -> float:
        """Return the seconds in which at least one such span of `rank` was running."""
        return length_s(union(_interval(span) for span in self.of(rank, stream, category)))

    def exposed_s(self, rank: int, category: str = COMMUNICATION, behind: str = COMPUTE) -> float:
        """Return the seconds in which `category` ran on `rank` while nothing of `behind` did.

        Overlapping spans count once.
        """
        shown = union(_interval(span) for span in self.of(rank, category=category))
        cover = union(_interval(span) for span in self.of(rank, category=behind))
        return length_s(difference(shown, cover))

    def breakdown_s(self, rank: int) -> dict[str, float]:
        """Return the seconds of `rank` by part; the parts add up to the end of the trace.

        Each moment counts for the first part that applies: compute, (exposed) communication, copy, waiting for
        partners, the host alone, and `idle`.
        """
        seen: list[Interval] = []
        parts: dict[str, float] = {}
        for category in (COMPUTE, COMMUNICATION, COPY, WAIT, HOST):
            own = union(_interval(span) for span in self.of(rank, category=category))
            parts[category] = length_s(difference(own, seen))
            seen = union([*seen, *own])
        return {**parts, "idle": self.end_s - length_s(seen)}


# --- intervals --------------------------------------------------------------------------------------------------------


def _interval(span: Span) -> Interval:
    return span.start_s, span.end_s


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same set of times as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def difference(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Return the times in `left` and not in `right`; both are disjoint and in order, as returned by `union`."""
    rest: list[Interval] = []
    at = 0
    for begin, end in left:
        start = begin
        while at < len(right) and right[at][1] <= start:
            at += 1
        k = at
        while k < len(right) and right[k][0] < end:
            if right[k][0] > start:
                rest.append((start, right[k][0]))
            start = max(start, right[k][1])
            k += 1
        if start < end:
            rest.append((start, end))
    return rest


def length_s(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def crossing(spans: Iterable[Span]) -> tuple[Span, Span] | None:
    """Return two spans of one stream that are neither nested nor disjoint, or None."""
    streams: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        streams.setdefault((span.rank, span.stream), []).append(span)
    for lane in streams.values():
        open_spans: list[Span] = []
        for span in sorted(lane, key=lambda s: (s.start_s, -s.end_s)):
            while open_spans and open_spans[-1].end_s <= span.start_s:
                open_spans.pop()
            if open_spans and span.end_s > open_spans[-1].end_s:
                return open_spans[-1], span
            open_spans.append(span)
    return None
