"""Compare a run with its prediction: the signed error of every quantity, and the term that causes most of it.

Errors are predicted / measured - 1. Terms divide the step's time on the rank with the most compute: in the simulated
timeline by category, in the measured one by kernel name. A measured collective lasts from its launch until all ranks
have joined and the data has moved, so it cannot be separated from waiting: on both sides, that term contains exposed
communication and waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.program import trace as tr
from simulator.program.trace import Span, Trace
from topology.codec import JsonObject

# Parts of kernel names, in lower case. Optimizer: the fused AdamW kernel and the norms of gradient clipping. Copies:
# those of FSDP into and out of its buffers, and its casts.
OPTIMIZER = ("adam", "lpnorm", "multi_tensor_apply")
COPIES = ("split_with_sizes_copy", "chunk_cat", "copy_in", "copy_out", "accumulate", "native::copy<")
# Names of NCCL kernels and of simulated transfers, by collective. All-to-alls are sends and receives in NCCL.
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
    """One quantity of a run, in `unit`; None where it is not known. `low` and `high` are the predicted range."""

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
        """Return whether the measured value is in the range, or the error within the tolerance if given; None if
        unknown.
        """
        if self.error is None or self.measured is None:
            return None
        if tolerance_percent is not None:
            return abs(self.error) * 100 <= tolerance_percent
        if self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high


def quantities(document: Mapping[str, Any]) -> tuple[Quantity, ...]:
    """Return the predicted and measured quantities of a run's report, the step first."""
    predicted, measured = document.get("predicted") or {}, document.get("measured") or {}
    step, memory = predicted.get("step_s") or {}, predicted.get("memory") or {}
    peak = memory.get("peak_bytes") or {}
    ranks = measured.get("memory_by_rank") or ()
    return (
        _ranged("step", "s", step, (measured.get("step_s") or {}).get("median")),
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
        _ranged("peak allocated memory", "bytes", peak, _largest(ranks, "peak_allocated_bytes")),
        Quantity(
            name="peak reserved memory",
            unit="bytes",
            predicted=memory.get("reserved_bytes"),
            measured=_largest(ranks, "peak_reserved_bytes"),
        ),
    )


def _ranged(name: str, unit: str, said: Mapping[str, Any], measured: float | None) -> Quantity:
    """Return a quantity whose prediction is an interval of a report."""
    return Quantity(
        name=name,
        unit=unit,
        predicted=said.get("value"),
        measured=measured,
        low=said.get("low"),
        high=said.get("high"),
        source=str(said.get("source", "")),
    )


def _largest(ranks: Iterable[Mapping[str, Any]], key: str) -> float | None:
    return max((float(rank[key]) for rank in ranks if rank.get(key)), default=None)


def compare(document: Mapping[str, Any], tolerance_percent: float | None) -> JsonObject | None:
    """Return the errors of a run's prediction, or None if there is nothing to compare.

    `within` is whether the measured median of the step is in the predicted interval or, if a tolerance is given,
    whether the error is at most that.
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
    """One part of the step's time, predicted and measured."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        """Return predicted - measured, in seconds."""
        return self.predicted_s - self.measured_s


def step_terms(trace: Trace) -> dict[str, float]:
    """Return the seconds of each term on the rank with the most compute; they add up to the length of the trace."""
    rank = max(trace.ranks, key=lambda r: (trace.busy_s(r, tr.COMPUTE), -r))
    by_name = Trace(spans=tuple(_by_name(span) for span in trace.of(rank)), source=trace.source)
    parts: dict[str, float] = {}
    seen: list[tr.Interval] = []
    for term, categories in (
        ("optimizer", {"optimizer"}),
        ("compute", {tr.COMPUTE}),
        ("copies", {tr.COPY}),
        (WAITING, {tr.COMMUNICATION, tr.WAIT}),
        ("host", {tr.HOST}),
    ):
        own = tr.union((s.start_s, s.end_s) for s in by_name.spans if s.category in categories)
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
    """Return the terms of both timelines."""
    predicted, found = step_terms(simulated), step_terms(measured)
    return tuple(Term(name=name, predicted_s=predicted[name], measured_s=found[name]) for name in TERMS)


def main_cause(terms: Sequence[Term]) -> str:
    """Return a sentence on the term that causes most of the difference between the predicted and the measured step."""
    total = sum(term.difference_s for term in terms)
    if not terms or not total:
        return "nothing to explain"
    # A term with the opposite sign does not explain the total.
    worst = max(terms, key=lambda term: term.difference_s / total)
    how = "longer" if worst.difference_s < 0 else "shorter"
    opposite = [t for t in terms if t.difference_s * total < 0 and abs(t.difference_s) > 0.25 * abs(total)]
    text = (
        f"{worst.name} took {abs(worst.difference_s):.3g} s {how} than predicted, of {abs(total):.3g} s"
        f" {'longer' if total < 0 else 'shorter'} in all"
    )
    if opposite:
        text += "; against it " + ", ".join(f"{t.name} {-t.difference_s:+.3g} s" for t in opposite)
    return text


# --- collectives ------------------------------------------------------------------------------------------------------


def collectives(trace: Trace) -> dict[str, dict[str, float]]:
    """Return `{calls, seconds, exposed_s}` by collective, on the rank with the most communication.

    Exposed time does not overlap with compute. Time in which several collectives run counts once.
    """
    ranks = [rank for rank in trace.ranks if next(trace.of(rank, category=tr.COMMUNICATION), None)]
    if not ranks:
        return {}
    rank = max(ranks, key=lambda r: (trace.busy_s(r, tr.COMMUNICATION), -r))
    computing = tr.union((s.start_s, s.end_s) for s in trace.of(rank, category=tr.COMPUTE))
    by_kind: dict[str, list[Span]] = {}
    for span in trace.of(rank, category=tr.COMMUNICATION):
        by_kind.setdefault(collective_kind(span.name), []).append(span)
    answer = {}
    for kind, spans in sorted(by_kind.items()):
        busy = tr.union((s.start_s, s.end_s) for s in spans)
        answer[kind] = {
            "calls": float(len(spans)),
            "seconds": tr.length_s(busy),
            "exposed_s": tr.length_s(tr.difference(busy, computing)),
        }
    return answer


def collective_kind(name: str) -> str:
    """Return the kind of collective of a span, from its name."""
    lower = name.lower()
    return next((kind for kind, parts in COLLECTIVES.items() if any(part in lower for part in parts)), "other")
