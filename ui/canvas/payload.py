"""The data of a step sent to the browser: lanes of spans as columns of numbers, and quantities over the same
time axis.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from planner.pictures.palette import BAD
from topology.codec import JsonObject
from ui.charts.look import FONT, ink_on, paper
from ui.charts.timeline import COLOURS, KINDS, LANES, Timeline, bars

MOST_SPANS = 120_000  # more spans are merged for the visible window, and sent again for another window
MERGED = 12_000  # bars of such a window
PATH = "critical path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """A quantity over time: `samples` are (seconds, value in `unit`), each until the next.

    Where a browser has less room than samples, it shows the `highest` or else the mean.
    """

    label: str
    about: str
    unit: str
    samples: Sequence[tuple[float, float]]
    colour: str
    limit: float | None = None
    highest: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What of a timeline is shown: `lanes` of `ranks`, with the spans at `path` in a lane of their own."""

    lanes: tuple[str, ...]
    ranks: tuple[int, ...]
    path: tuple[int, ...] = ()
    titles: dict[int, str] | None = None  # of ranks, where they are not called by their number


_STRENGTH = {"wait": 0.5}


def payload(
    line: Timeline,
    shown: Shown,
    strips: Sequence[Strip],
    *,
    window: tuple[float, float],
    about: str,
    key: str,
    dark: bool,
) -> JsonObject:
    """Return what `timeline.js` draws. `key` names the step: with another, the window starts again at the whole
    step.
    """
    lanes = sorted(
        {lane for lane in line.lanes if lane[1] in shown.lanes and lane[0] in shown.ranks},
        # Sides that are compared stand below each other.
        key=lambda lane: (LANES.index(lane[1]), lane[0]) if shown.titles else (lane[0], LANES.index(lane[1])),
    )
    rows = {lane: i + bool(shown.path) for i, lane in enumerate(lanes)}
    labels = [{"label": _label(lane, shown), "strong": False} for lane in lanes]
    labels = [{"label": PATH, "strong": True}, *labels] if shown.path else labels
    row_of = np.array([rows.get(lane, -1) for lane in line.lanes], np.int32)
    here = np.flatnonzero(row_of[line.lane] >= 0) if len(line) else np.empty(0, np.int64)
    partial = len(here) > MOST_SPANS
    spans = _merged(line, shown, rows, window) if partial else _columns(line, row_of[line.lane], here)
    spans, names = _with_path(line, shown, spans)
    p = paper(dark)
    return {
        "id": key,
        "key": f"{key} {shown.lanes} {shown.ranks} {bool(shown.path)} {dark} {window if partial else ''}",
        "length_s": line.length_s,
        "window": list(window),
        "partial": partial,
        "lanes": labels,
        "kinds": [
            {"name": kind, "colour": COLOURS[kind], "ink": ink_on(COLOURS[kind]), "strength": _STRENGTH.get(kind, 1.0)}
            for kind in KINDS
        ],
        "names": names,
        "spans": {name: _text(column) for name, column in spans.items()},
        "strips": [_strip(strip) for strip in strips],
        "about": about,
        "theme": {"ink": p.ink, "quiet": p.quiet, "rule": p.rule, "bad": BAD, "font": FONT},
    }


def _label(lane: tuple[int, str], shown: Shown) -> str:
    rank, name = lane
    title = (shown.titles or {}).get(rank, f"rank {rank}")
    return title if len(shown.lanes) == 1 else f"{title} {name}"


Columns = dict[str, np.ndarray[Any, Any]]


def _columns(line: Timeline, rows: ArrayLike, here: Any) -> Columns:
    return {
        "lane": np.asarray(rows, np.int32)[here],
        "kind": line.kind[here].astype(np.int32),
        "name": line.name[here],
        "start": line.start_s[here],
        "seconds": (line.end_s - line.start_s)[here],
    }


def _merged(line: Timeline, shown: Shown, rows: dict[tuple[int, str], int], window: tuple[float, float]) -> Columns:
    """Return about MERGED bars within a window and a quarter of it to both sides."""
    more = (window[1] - window[0]) / 4
    wide = max(0.0, window[0] - more), min(line.length_s, window[1] + more)
    found = bars(line, window=wide, lanes=set(shown.lanes), ranks=set(shown.ranks), most=MERGED)
    names = {name: i for i, name in enumerate(line.names)}
    return {
        "lane": np.array([rows[bar.rank, bar.lane] for bar in found], np.int32),
        "kind": np.array([KINDS.index(bar.kind) for bar in found], np.int32),
        "name": np.array([names.get(bar.name, 0) for bar in found], np.int32),
        "start": np.array([bar.start_s for bar in found]),
        "seconds": np.array([bar.end_s - bar.start_s for bar in found]),
        "busy": np.array([bar.busy_s for bar in found]),
        "count": np.array([bar.spans for bar in found], np.int32),
    }


def _with_path(line: Timeline, shown: Shown, spans: Columns) -> tuple[Columns, list[str]]:
    """Add the spans of the critical path as the first lane; with several ranks they are named with theirs."""
    if not shown.path:
        return spans, list(line.names)
    at = np.array(shown.path)
    own = _columns(line, np.zeros(len(line), np.int32), at)
    names = dict.fromkeys(line.names)
    if len(line.ranks) > 1:
        called = [f"{line.names[line.name[i]]}, rank {line.lanes[line.lane[i]][0]}" for i in shown.path]
        names |= dict.fromkeys(called)
        numbers = {name: i for i, name in enumerate(names)}
        own["name"] = np.array([numbers[name] for name in called], np.int32)
    if "busy" in spans:
        own |= {"busy": own["seconds"], "count": np.ones(len(at), np.int32)}
    return {name: np.concatenate([own[name], spans[name]]) for name in spans}, list(names)


def _strip(strip: Strip) -> JsonObject:
    return {
        "label": strip.label,
        "about": strip.about,
        "unit": strip.unit,
        "time": _text(np.array([time for time, _ in strip.samples])),
        "value": _text(np.array([value for _, value in strip.samples])),
        "most": max((value for _, value in strip.samples), default=0.0),
        "limit": strip.limit,
        "colour": strip.colour,
        "highest": strip.highest,
    }


def _text(column: np.ndarray[Any, Any]) -> str:
    """Return a column as base64: 8 bytes a float, 4 an integer, little end first."""
    kind = "<f8" if column.dtype.kind == "f" else "<i4"
    return base64.b64encode(np.ascontiguousarray(column, kind).tobytes()).decode("ascii")
