"""Reduce a trace of any length to a bounded number of bars, which a browser draws smoothly. Pure functions.

64 pipeline stages with 256 micro batches have 200,000 spans; a screen has 2,000 pixels. The visible window is divided
into cells. Spans wider than a cell are drawn as they are; shorter ones are merged, by lane and cell, into one bar a
kind, side by side in the order they begin, each as wide as its share of the busy time. The busy time of every kind in a
lane stays the same, and the full trace can be downloaded for Perfetto.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.pictures.palette import BROWN, GREY, SPANS, TIME
from simulator.program import trace as tr

LANES = ("compute", "communication", "host")
MAX_BARS = 4000
# Kinds of spans, named as the terms of a step in the palette, so that pages use the same colours.
KINDS = ("forward", "backward", "recompute", "copies", "other kernels", "optimizer", "communication", "wait", "host")


def lighter(colour: str) -> str:
    """Return a colour two thirds of the way to white, which tells the forward pass from the backward and from
    recomputation.
    """
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 2 * 255) // 3:02X}" for i in (1, 3, 5))


COLOURS = {
    "forward": lighter(SPANS["compute"]),
    "backward": SPANS["compute"],
    "recompute": TIME["recompute"],
    "copies": SPANS["copy"],
    "other kernels": BROWN,
    "optimizer": TIME["optimizer"],
    "communication": SPANS["communication"],
    "wait": GREY,
    "host": SPANS["host"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Spans as columns.

    `lane[i]` indexes `lanes`, pairs of (rank, lane); `kind[i]` indexes KINDS, `name[i]` `names`.
    """

    lanes: tuple[tuple[int, str], ...]
    lane: NDArray[np.int32]
    kind: NDArray[np.int16]
    name: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    names: tuple[str, ...]
    length_s: float

    def __len__(self) -> int:
        return len(self.lane)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for rank, _ in self.lanes}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar, into which `spans` spans are merged; busy for `busy_s` of its length."""

    rank: int
    lane: str
    kind: str
    name: str
    start_s: float
    end_s: float
    busy_s: float
    spans: int


def timeline(trace: tr.Trace) -> Timeline:
    """Return the trace as columns; all communication streams of a rank are one lane, and so are its host threads."""
    lanes: dict[tuple[int, str], int] = {}
    names: dict[str, int] = {}
    kinds = {kind: i for i, kind in enumerate(KINDS)}
    kind_of: dict[tuple[str, str], int] = {}
    n = len(trace.spans)
    lane, kind, name = np.empty(n, np.int32), np.empty(n, np.int16), np.empty(n, np.int32)
    start, end = np.empty(n), np.empty(n)
    for i, span in enumerate(trace.spans):
        lane[i] = lanes.setdefault((span.rank, _lane(span.category)), len(lanes))
        named = (span.category, span.name)
        if named not in kind_of:
            kind_of[named] = kinds[_kind(*named)]
        kind[i] = kind_of[named]
        name[i] = names.setdefault(span.name, len(names))
        start[i], end[i] = span.start_s, span.end_s
    return Timeline(
        lanes=tuple(lanes),
        lane=lane,
        kind=kind,
        name=name,
        start_s=start,
        end_s=end,
        names=tuple(names),
        length_s=trace.end_s,
    )


def _lane(category: str) -> str:
    if category == tr.HOST:
        return "host"
    return "compute" if category in {tr.COMPUTE, tr.COPY} else "communication"


def _kind(category: str, name: str) -> str:
    if category == tr.COMMUNICATION:
        return "communication"
    if category in {tr.WAIT, tr.HOST}:
        return category
    if category == tr.COPY or name.startswith(("copy_", "accumulate")):
        return "copies"
    if name == "optimizer":
        return "optimizer"
    if "recompute" in name:
        return "recompute"
    if "backward" in name:
        return "backward"
    return "forward" if "forward" in name else "other kernels"


def bars(
    line: Timeline, *, window: tuple[float, float], lanes: set[str], ranks: set[int], most: int = MAX_BARS
) -> list[Bar]:
    """Return about `most` bars at most for the chosen lanes and ranks within `window`, in seconds.

    Raises ValueError for an empty window.
    """
    begin, finish = window
    if not finish > begin:
        raise ValueError(f"the window {window} has no length")
    rows = [i for i, (rank, lane) in enumerate(line.lanes) if lane in lanes and rank in ranks]
    if not rows or not len(line):
        return []
    cells = max(8, most // (4 * len(rows)))  # a cell of computation may hold several kinds
    width = (finish - begin) / cells
    shown = np.isin(line.lane, rows) & (line.end_s > begin) & (line.start_s < finish) & (line.end_s > line.start_s)
    index = np.flatnonzero(shown)
    start = np.maximum(line.start_s[index], begin)
    end = np.minimum(line.end_s[index], finish)
    wide = (end - start) >= width
    found = [
        Bar(
            rank=line.lanes[line.lane[i]][0],
            lane=line.lanes[line.lane[i]][1],
            kind=KINDS[line.kind[i]],
            name=line.names[line.name[i]],
            start_s=float(a),
            end_s=float(b),
            busy_s=float(b - a),
            spans=1,
        )
        for i, a, b in zip(index[wide], start[wide], end[wide], strict=True)
    ]
    found += _gathered(line, index[~wide], start[~wide], end[~wide], begin, width)
    return sorted(found, key=lambda bar: (bar.rank, bar.lane, bar.start_s))


def _gathered(
    line: Timeline,
    index: NDArray[np.int64],
    start: NDArray[np.float64],
    end: NDArray[np.float64],
    begin: float,
    width: float,
) -> Iterator[Bar]:
    """Return one bar per lane, cell and kind that has short spans; a span belongs to the cell of its middle."""
    if not len(index):
        return
    cell = np.floor(((start + end) / 2 - begin) / width).astype(np.int64)
    group = line.lane[index].astype(np.int64) * (int(cell.max()) + 1) + cell
    order = np.argsort(group, kind="stable")
    index, start, end, group = index[order], start[order], end[order], group[order]
    first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    left, right = np.minimum.reduceat(start, first), np.maximum.reduceat(end, first)
    of = np.repeat(np.arange(len(first)), np.diff(np.r_[first, len(group)]))
    kind = line.kind[index]
    shape = (len(first), len(KINDS))
    busy, counts, began = np.zeros(shape), np.zeros(shape, np.int64), np.full(shape, np.inf)
    np.add.at(busy, (of, kind), end - start)
    np.add.at(counts, (of, kind), 1)
    np.minimum.at(began, (of, kind), start)
    for g, at in enumerate(first):
        rank, lane = line.lanes[line.lane[index[at]]]
        per_busy_s = (right[g] - left[g]) / busy[g].sum()
        edge = float(left[g])
        for k in sorted(np.flatnonzero(counts[g]), key=lambda k: began[g, k]):
            count, start_s = int(counts[g, k]), edge
            edge = min(start_s + float(busy[g, k] * per_busy_s), float(right[g]))
            alone = count == 1 and int(counts[g].sum()) == 1
            yield Bar(
                rank=rank,
                lane=lane,
                kind=KINDS[k],
                name=line.names[line.name[index[at]]] if alone else f"{count} short spans",
                start_s=start_s,
                end_s=edge,
                busy_s=float(busy[g, k]),
                spans=count,
            )


def samples(counter: tr.Counter, *, end_s: float, most: int = 600) -> list[tuple[float, float]]:
    """Return a counter as at most `most` (time, value) steps, with the highest value of each cell, which keeps the
    peak.
    """
    points = counter.samples
    if len(points) <= most:
        return [*points, *([(end_s, points[-1][1])] if points else [])]
    width = end_s / most
    highest: dict[int, tuple[float, float]] = {}
    for time, value in points:
        cell = min(most - 1, int(time / width))
        if cell not in highest or value > highest[cell][1]:
            highest[cell] = (time, value)
    return [*highest.values(), (end_s, points[-1][1])]
