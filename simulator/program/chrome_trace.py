"""Convert traces to files in the Chrome trace format, which Perfetto opens, and from files of torch's profiler
(Kineto).
"""

from __future__ import annotations

from typing import Any

from simulator.program import trace as tr
from topology.codec import JsonObject
from topology.errors import BadInput

# Our categories for those of the profiler. Annotations on GPU streams repeat host spans and are left out.
_ON_GPU = {"kernel": tr.COMPUTE, "gpu_memcpy": tr.COPY, "gpu_memset": tr.COPY}
_ON_HOST = frozenset({"cpu_op", "cuda_runtime", "cuda_driver", "user_annotation"})
# Kernels that move data between GPUs, by parts of their names: NCCL, NVSHMEM, torch's symmetric memory.
_COMMUNICATES = ("nccl", "nvshmem", "symm_mem", "one_shot_all_reduce", "two_shot_all_reduce", "multimem")


def to_chrome(trace: tr.Trace) -> JsonObject:
    """Return `trace` as a Chrome trace: a process per rank, a thread per stream, microseconds with three decimals.

    Messages are flow arrows, memory and link use are counters. Raises ValueError when two spans of a stream cross,
    because viewers drop or mangle such spans.
    """
    # Compared as they will be written: float noise below a nanosecond is no crossing.
    pair = tr.crossing(
        tr.Span(s.rank, s.stream, s.name, _microseconds(s.start_s), _microseconds(s.end_s)) for s in trace.spans
    )
    if pair:
        raise ValueError(f"spans of one stream must be nested or disjoint: {pair[0]} and {pair[1]}")
    threads: dict[tuple[int, str], int] = {}
    for rank, stream in sorted({(s.rank, s.stream) for s in trace.spans}, key=lambda k: (k[0], k[1] != tr.HOST, k[1])):
        threads[rank, stream] = len(threads) + 1
    events: list[JsonObject] = []
    # Counters of links belong to no rank: they get a process of their own, after the ranks.
    elsewhere = max(trace.ranks, default=-1) + 1
    names = {rank: f"rank {rank}" for rank in trace.ranks}
    names.update({elsewhere: "links"} if any(counter.rank < 0 for counter in trace.counters) else {})
    for pid, name in names.items():
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
    for (rank, stream), tid in threads.items():
        events.append({"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": stream}})
        events.append({"ph": "M", "pid": rank, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    for span in trace.spans:
        start, end = _microseconds(span.start_s), _microseconds(span.end_s)
        events.append(
            {
                "ph": "X",
                "pid": span.rank,
                "tid": threads[span.rank, span.stream],
                "name": span.name,
                "cat": span.category,
                "ts": start,
                "dur": round(end - start, 3),
            }
        )
    for number, flow in enumerate(trace.flows):
        start, end = _microseconds(flow.start_s), _microseconds(flow.end_s)
        arrow = {"name": flow.name, "cat": "message", "id": number}
        events.append({"ph": "s", "pid": flow.rank, "tid": threads[flow.rank, flow.stream], "ts": start, **arrow})
        # The head must lie inside its span to be bound to it: a nanosecond before the end.
        head = max(start, round(end - 0.001, 3))
        to_tid = threads[flow.to_rank, flow.to_stream]
        events.append({"ph": "f", "bp": "e", "pid": flow.to_rank, "tid": to_tid, "ts": head, **arrow})
    for counter in trace.counters:
        pid = counter.rank if counter.rank >= 0 else elsewhere
        events += [
            {"ph": "C", "pid": pid, "name": counter.name, "ts": _microseconds(time), "args": {counter.unit: value}}
            for time, value in counter.samples
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": trace.source}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def from_kineto(data: Any, *, rank: int | None = None) -> tr.Trace:
    """Return a torch profiler trace (decoded Chrome JSON) as a Trace: kernels by stream, operators by host thread.

    Time 0 is the earliest span. `rank` defaults to the one that torch wrote into the file, else 0. Raises BadInput
    when `data` is not such a trace.
    """
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise BadInput("this is not a profiler trace", why="it has no list of traceEvents")
    if rank is None:
        info = data.get("distributedInfo") if isinstance(data, dict) else None
        found = info.get("rank") if isinstance(info, dict) else None
        rank = found if isinstance(found, int) else 0
    spans: list[tr.Span] = []
    memory: list[tuple[float, float]] = []
    for position, event in enumerate(events):
        if not isinstance(event, dict):
            raise BadInput("this is not a profiler trace", why=f"event {position} is not an object")
        category = event.get("cat")
        if category is not None and not isinstance(category, str):
            raise BadInput("this is not a profiler trace", why=f"cat of event {position} is {category!r}, not a word")
        if event.get("ph") == "X" and (category in _ON_GPU or category in _ON_HOST):
            spans.append(_span(event, position, rank))
        elif event.get("ph") == "i" and event.get("name") == "[memory]":
            memory += _allocated(event, position)
    # So far in whole nanoseconds: spans that touch in the file must touch here, not overlap by a rounding error.
    origin = min((span.start_s for span in spans), default=0)
    moved = [
        tr.Span(s.rank, s.stream, s.name, (s.start_s - origin) * 1e-9, (s.end_s - origin) * 1e-9, s.category)
        for s in sorted(spans, key=lambda s: (s.start_s, s.stream, -s.end_s))
    ]
    samples = tuple(((time - origin) * 1e-9, value) for time, value in sorted(memory))
    counters = (tr.Counter(rank, "memory", "bytes", samples),) if samples else ()
    return tr.Trace(spans=tuple(moved), counters=counters, source="measured")


def _span(event: JsonObject, position: int, rank: int) -> tr.Span:
    """Return the span of one event, its times still in nanoseconds of the file's clock."""
    name, thread = str(event.get("name", "")), event.get("tid")
    start, duration = _number(event, "ts", position), _number(event, "dur", position)
    category = str(event["cat"])
    if category in _ON_GPU:
        args = event.get("args")
        stream = f"stream {args['stream'] if isinstance(args, dict) and 'stream' in args else thread}"
        kind = _ON_GPU[category]
        if any(part in name.lower() for part in _COMMUNICATES):
            kind = tr.COMMUNICATION
    else:
        stream, kind = f"{tr.HOST} {thread}", tr.HOST
    return tr.Span(rank, stream, name, round(start * 1e3), round((start + duration) * 1e3), kind)


def _allocated(event: JsonObject, position: int) -> list[tuple[float, float]]:
    """Return the sample of one allocator event, if it is of a GPU."""
    args = event.get("args")
    if not isinstance(args, dict) or args.get("Device Type") != 1 or "Total Allocated" not in args:
        return []
    return [(round(_number(event, "ts", position) * 1e3), _number(args, "Total Allocated", position))]


def _number(fields: JsonObject, key: str, position: int) -> float:
    value = fields.get(key)
    # Beyond 1e18 microseconds (30,000 years) there is no time, only a broken file; this also refuses nan and inf.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e18:
        raise BadInput("this is not a profiler trace", why=f"{key} of event {position} is {value!r}, not a number >= 0")
    return float(value)
