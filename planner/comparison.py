"""A run held against its prediction: every quantity with its signed error, and the term that is to blame.

Errors are predicted / measured - 1. Terms are where a step's time went, on the rank that computes longest: of the
simulated timeline as the simulator counts them, of the measured one by the kernels' names. A measured collective lasts
from its launch until all partners have come and the data has moved, and cannot be told from waiting: both sides of that
term hold communication that nothing hides, and waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator import trace as tr
from simulator.trace import Span, Trace

# Parts of kernel names, lower case. The optimizer: AdamW's fused kernel and the norms of clipping. Copies: FSDP's into
# and out of its buffers, and its casts, which are of the same kind of kernel as the optimizer's.
OPTIMIZER = ("adam", "lpnorm", "multi_tensor_apply")
COPIES = ("split_with_sizes_copy", "chunk_cat", "copy_in", "copy_out", "accumulate", "native::copy<")
# How NCCL's kernels and our simulated transfers are called, by collective. All-to-alls are sends and receives in NCCL.
COLLECTIVES = {
    "all_reduce": ("allreduce", "all_reduce"),
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reducescatter", "reduce_scatter"),
    "send and receive": ("sendrecv", "all_to_all", "send ", "recv ", "ring"),
    "broadcast": ("broadcast",),
}
WAITING = "communication and waiting"
TERMS = ("compute", WAITING, "copies", "host", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number of a run, in `unit`; None where one side does not know it. `low` and `high` bound the prediction."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    low: float | None = None
    high: float | None = None
    source: str = ""  # of the prediction

    @property
    def error(self) -> float | None:
        return self.predicted / self.measured - 1 if self.predicted and self.measured else None

    def within(self, tolerance_percent: float | None) -> bool | None:
        """Return whether the measured value lies in the interval, or the error within the tolerance; None if unknown."""
        if self.error is None or self.measured is None:
            return None
        if tolerance_percent is not None:
            return abs(self.error) * 100 <= tolerance_percent
        if self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high


def quantities(document: Mapping[str, Any]) -> tuple[Quantity, ...]:
    """Return what a run's report predicts and measures, the step first."""
    predicted, measured = document.get("predicted") or {}, document.get("measured") or {}
    step, memory = predicted.get("step_s") or {}, predicted.get("memory") or {}
    peak = memory.get("peak_bytes") or {}
    ranks = measured.get("memory_by_rank") or ()
    return (
        Quantity(
            name="step",
            unit="s",
            predicted=step.get("value"),
            measured=(measured.get("step_s") or {}).get("median"),
            low=step.get("low"),
            high=step.get("high"),
            source=str(step.get("source", "")),
        ),
        Quantity(
            name="tokens per GPU",
            unit="tokens/s",
            predicted=predicted.get("tokens_per_s_per_gpu"),
            measured=measured.get("tokens_per_s_per_gpu"),
        ),
        Quantity(
            name="model FLOPs per GPU",
            unit="TFLOP/s",
            predicted=predicted.get("tflops_per_gpu"),
            measured=measured.get("tflops_per_gpu"),
        ),
        Quantity(name="MFU", unit="", predicted=predicted.get("mfu"), measured=measured.get("mfu")),
        Quantity(
            name="peak allocated memory",
            unit="bytes",
            predicted=peak.get("value"),
            measured=_largest(ranks, "peak_allocated_bytes"),
            low=peak.get("low"),
            high=peak.get("high"),
            source=str(peak.get("source", "")),
        ),
        Quantity(
            name="peak reserved memory",
            unit="bytes",
            predicted=memory.get("reserved_bytes"),
            measured=_largest(ranks, "peak_reserved_bytes"),
        ),
    )


def _largest(ranks: Iterable[Mapping[str, Any]], key: str) -> float | None:
    return max((float(rank[key]) for rank in ranks if rank.get(key)), default=None)


def compare(document: Mapping[str, Any], tolerance_percent: float | None) -> dict[str, Any] | None:
    """Return how far the prediction of a run is off, or None where there is nothing to compare.

    Within means: the measured median of the step lies in the predicted interval, or, with a tolerance given, the error
    is at most that.
    """
    if not document.get("complete"):
        return None
    found = {quantity.name: quantity for quantity in quantities(document)}
    step, memory = found["step"], found["peak allocated memory"]
    if step.error is None:
        return None
    return {
        "step_error": step.error,
        "memory_error": memory.error,
        "within": step.within(tolerance_percent),
        "tolerance_percent": tolerance_percent,
    }


# --- terms of the step ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    name: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        """Return predicted - measured: negative where more was needed than predicted."""
        return self.predicted_s - self.measured_s


def terms_of(trace: Trace) -> dict[str, float]:
    """Return where a step's time went on the rank that computes longest; the parts add up to the end of the trace."""
    rank = max(trace.ranks, key=lambda r: (trace.busy_s(r, tr.COMPUTE), -r))
    sorted_out = Trace(spans=tuple(_by_name(span) for span in trace.of(rank)), source=trace.source)
    parts: dict[str, float] = {}
    seen: list[tr.Interval] = []
    for term, categories in (
        ("optimizer", {"optimizer"}),
        ("compute", {tr.COMPUTE}),
        ("copies", {tr.COPY}),
        (WAITING, {tr.COMMUNICATION, tr.WAIT}),
        ("host", {tr.HOST}),
    ):
        own = tr.union((s.start_s, s.end_s) for s in sorted_out.spans if s.category in categories)
        parts[term] = tr.length_s(tr.difference(own, seen))
        seen = tr.union([*seen, *own])
    parts[WAITING] += trace.end_s - tr.length_s(seen)
    return {term: parts[term] for term in TERMS}


def _by_name(span: Span) -> Span:
    name = span.name.lower()
    if span.category == tr.COMPUTE and any(part in name for part in COPIES):
        return Span(span.rank, span.stream, span.name, span.start_s, span.end_s, tr.COPY)
    if span.category == tr.COMPUTE and (name == "optimizer" or any(part in name for part in OPTIMIZER)):
        return Span(span.rank, span.stream, span.name, span.start_s, span.end_s, "optimizer")
    return span


def compare_terms(simulated: Trace, measured: Trace) -> tuple[Term, ...]:
    """Return the terms of both timelines side by side."""
    predicted, found = terms_of(simulated), terms_of(measured)
    return tuple(Term(name=name, predicted_s=predicted[name], measured_s=found[name]) for name in TERMS)


def blame(terms: Sequence[Term]) -> str:
    """Say in words which term makes most of the difference between predicted and measured step."""
    total = sum(term.difference_s for term in terms)
    if not terms or not total:
        return "nothing to explain"
    # What pulls against the total explains none of it.
    worst = max(terms, key=lambda term: term.difference_s / total)
    how = "longer" if worst.difference_s < 0 else "shorter"
    against = [t for t in terms if t.difference_s * total < 0 and abs(t.difference_s) > 0.25 * abs(total)]
    said = (
        f"{worst.name} took {abs(worst.difference_s):.3g} s {how} than predicted, of {abs(total):.3g} s"
        f" {'longer' if total < 0 else 'shorter'} in all"
    )
    if against:
        said += "; against it " + ", ".join(f"{t.name} {-t.difference_s:+.3g} s" for t in against)
    return said


# --- collectives ------------------------------------------------------------------------------------------------------


def collectives(trace: Trace) -> dict[str, dict[str, float]]:
    """Return calls and seconds by collective on the rank that communicates longest: `{calls, seconds, exposed_s}`.

    Exposed is what no computing hides. Seconds are of unions of intervals: two at once count once.
    """
    ranks = [rank for rank in trace.ranks if next(trace.of(rank, category=tr.COMMUNICATION), None)]
    if not ranks:
        return {}
    rank = max(ranks, key=lambda r: (trace.busy_s(r, tr.COMMUNICATION), -r))
    computing = tr.union((s.start_s, s.end_s) for s in trace.of(rank, category=tr.COMPUTE))
    by_kind: dict[str, list[Span]] = {}
    for span in trace.of(rank, category=tr.COMMUNICATION):
        by_kind.setdefault(kind_of(span.name), []).append(span)
    answer = {}
    for kind, spans in sorted(by_kind.items()):
        busy = tr.union((s.start_s, s.end_s) for s in spans)
        answer[kind] = {
            "calls": float(len(spans)),
            "seconds": tr.length_s(busy),
            "exposed_s": tr.length_s(tr.difference(busy, computing)),
        }
    return answer


def kind_of(name: str) -> str:
    """Return which collective a span is."""
    lower = name.lower()
    return next((kind for kind, parts in COLLECTIVES.items() if any(part in lower for part in parts)), "other")
