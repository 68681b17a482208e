"""The critical path of a step: a chain of spans, each of which began when the one before it had ended.

A simulation starts everything as early as possible, so what a span waited for ended at the moment it began: the
previous span of its stream, another stream of its rank, the host that issued it, or, for a transfer, what its last rank
did before. The chain is followed backwards from the end of the step. In a measured trace there are gaps; there the last
span that ended before is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.program import trace as tr

TOLERANCE_S = 1e-9  # and relative to the time, since sums of the same durations in another order differ
_ORDER = {tr.COMPUTE: 0, tr.COMMUNICATION: 1, tr.COPY: 2, tr.HOST: 3}


@dataclass(frozen=True, slots=True)
class _Rank:
    """The spans of a rank in the order of their ends, by position in the trace."""

    ends: list[float]
    positions: list[int]


def critical_path(trace: tr.Trace) -> tuple[int, ...]:
    """Return positions in `trace.spans` of a chain from the start to the end of the step, in order of time.

    Its spans do not overlap. Where several spans ended when one began, the one on its own stream is preferred, then
    compute, transfers, and the host.
    """
    spans = trace.spans
    ranks = _by_rank(spans)
    late = _last_to_arrive(trace)
    at = max((i for i, span in enumerate(spans) if _counts(span)), key=lambda i: spans[i].end_s, default=None)
    found = []
    while at is not None:
        found.append(at)
        at = _before(spans, ranks, late.get(at, at))
    return tuple(reversed(found))


def path_parts_s(spans: Sequence[tr.Span], step_s: float) -> dict[str, float]:
    """Return the seconds of a critical path by category; `gaps` is the rest of the step."""
    parts: dict[str, float] = defaultdict(float)
    for span in spans:
        parts[span.category] += span.duration_s
    return {**parts, "gaps": max(0.0, step_s - sum(parts.values()))}


def _counts(span: tr.Span) -> bool:
    return span.end_s > span.start_s and span.category != tr.WAIT


def _by_rank(spans: Sequence[tr.Span]) -> dict[int, _Rank]:
    positions: defaultdict[int, list[int]] = defaultdict(list)
    for i, span in enumerate(spans):
        if _counts(span):
            positions[span.rank].append(i)
    found = {}
    for rank, own in positions.items():
        own.sort(key=lambda i: spans[i].end_s)
        found[rank] = _Rank([spans[i].end_s for i in own], own)
    return found


def _last_to_arrive(trace: tr.Trace) -> dict[int, int]:
    """Return for each transfer that waited for a partner the span of the same transfer on a rank that did not wait."""
    waited = {(s.rank, s.stream, s.end_s) for s in trace.spans if s.category == tr.WAIT}
    partners: dict[tuple[int, str, float], tuple[int, str, float]] = {}
    for flow in trace.flows:
        ends = (flow.rank, flow.stream, flow.start_s), (flow.to_rank, flow.to_stream, flow.start_s)
        partners[ends[0]], partners[ends[1]] = ends[1], ends[0]
    transfers = {(s.rank, s.stream, s.start_s): i for i, s in enumerate(trace.spans) if s.category == tr.COMMUNICATION}
    prompt = {
        (trace.spans[i].name, key[2]): i for key, i in transfers.items() if key not in waited and key not in partners
    }
    found = {}
    for key, i in transfers.items():
        if key in waited:
            other = transfers.get(partners[key]) if key in partners else prompt.get((trace.spans[i].name, key[2]))
            if other is not None:
                found[i] = other
    return found


def _before(spans: Sequence[tr.Span], ranks: dict[int, _Rank], at: int) -> int | None:
    """Return the span that span `at` waited for; None where nothing of its rank ended before it began."""
    span = spans[at]
    own = ranks[span.rank]
    slack = TOLERANCE_S * max(1.0, span.start_s)
    last = bisect_right(own.ends, span.start_s + slack) - 1
    ended = []
    while last >= 0 and own.ends[last] >= span.start_s - slack:
        ended.append(own.positions[last])
        last -= 1
    ended = [i for i in ended if spans[i].start_s < span.start_s]
    if not ended:
        return own.positions[last] if last >= 0 else None
    return min(ended, key=lambda i: (spans[i].stream != span.stream, _ORDER.get(spans[i].category, 4), i))
