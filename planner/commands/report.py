"""`planner report`: one run, measured compared with predicted, and the terms that explain the difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from pathlib import Path

from click.exceptions import Exit

from planner.io import output
from planner.io.grids import console, grid
from planner.io.inputs import measurements
from planner.io.plan_words import plan_in_words
from planner.io.printable import printable
from planner.pictures.timelines import timelines
from planner.question.plan_file import refuse_overwrite
from planner.requests.runs import Report
from planner.runs import profile_update, report_text
from planner.runs.report_text import to_html
from planner.runs.run_report import RunReport, load_run
from simulator.program.chrome_trace import to_chrome
from simulator.program.trace import Span, Trace
from topology import codec
from topology.codec import JsonObject
from topology.errors import PlannerError
from topology.redact import redact as redact_text


def report(asked: Report) -> None:
    """Print what `planner report` answers."""
    for path in (asked.html, asked.picture, asked.trace):
        if path is not None:
            refuse_overwrite(path, force=asked.force)
    found = load_run(asked.run, measured=measurements(asked.profile, strict=asked.strict))
    answer = found.answer(asked.tolerance)
    if asked.learn is not None:
        answer["learned"] = _learn(found, asked.learn)
    with output.redacted(asked.redact):
        if asked.json:
            output.emit_json(answer)
        else:
            _print(answer)
    _write(found, answer, asked)
    if asked.tolerance is not None and answer["within"] is None:
        raise PlannerError(
            "nothing could be compared with the tolerance",
            why=f"the run is {answer['status']}"
            if found.document.get("predicted")
            else "the run was not predicted: only saved plans on the planned GPUs are",
        )
    if answer["within"] is False:
        raise Exit(4)


def _print(answer: JsonObject) -> None:
    screen = console()
    screen.print(printable(f"{answer['model']}, {plan_in_words(answer['plan'])}"))
    partial = "" if answer["complete"] else ", not complete"
    screen.print(printable(f"run {answer['id']} of {answer['taken_at']}: {answer['status']}{partial}"))

    for heads, rows, below in report_text.tables(answer):
        screen.print()
        screen.print(grid(heads, rows))
        if below:
            screen.print(printable(below))
    if any(row["error"] is not None for row in answer["quantities"]):
        screen.print()
        screen.print("Errors and differences are predicted / measured - 1 and predicted - measured.")
    for note in answer["notes"]:
        screen.print(printable(f"note: {note}"))


def _learn(found: RunReport, profile: Path) -> JsonObject:
    lesson = profile_update.add_run_to_profile(found, profile)
    output.warn(f"{profile}: {lesson.samples} operators of the run, {lesson.fresh} of them new")
    return dict(codec.to_builtins(lesson))


def _write(found: RunReport, answer: JsonObject, asked: Report) -> None:
    html, picture, trace = asked.html, asked.picture, asked.trace
    hide = redact_text if asked.redact else str
    words = plan_in_words(answer["plan"])
    drawn = ""
    if found.simulated or found.measured:
        drawn = timelines(found.simulated, found.slowest, title=f"{answer['model']}, {words}")
    elif picture or trace:
        raise PlannerError("there is no timeline to write", why="; ".join(found.notes))
    if html:
        codec.write_text(html, hide(to_html(answer, words, drawn)))
        output.warn(f"saved {html}")
    if picture:
        codec.write_text(picture, hide(drawn))
        output.warn(f"saved {picture}")
    if trace:
        codec.write_text(trace, hide(codec.to_json(side_by_side(found.simulated, found.measured), indent=None)))
        output.warn(f"saved {trace}: open it at https://ui.perfetto.dev")


# --- both timelines in one trace --------------------------------------------------------------------------------------


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
