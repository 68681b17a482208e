"""Predicted against measured, row by row: signed errors, whether the interval held, and what could not be compared.

Errors are `predicted / measured - 1` of the step time and of peak memory. A source that states only throughput or
FLOP/s is turned into the step time it implies, and the row says by which convention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from planner.cases import Case, case_id, load_case
from planner.costs import cost_table
from planner.legality import check, is_legal
from topology.errors import PlannerError

if TYPE_CHECKING:
    from simulator.estimate import Estimate, MemoryEstimate
    from topology.profile import Profile

GIB = 2.0**30


def validate_case(data: Mapping[str, Any], *, profile: Profile | None = None) -> dict[str, Any]:
    """Return one row of the report. An error of ours about the row becomes its `skipped`; bugs are raised."""
    row: dict[str, Any] = {
        "id": case_id(data),
        "predicted": None,
        "measured": data.get("measured"),
        "error": {"step": None, "memory": None},
        "within_interval": None,
        "within": {"step": None, "memory": None},
        "outcome": data.get("outcome"),
        "outcome_right": None,
        "convention": None,
        "memory_is": None,
        "assumed": [],
        "skipped": None,
    }
    try:
        case = load_case(data)
        row["assumed"] = list(case.assumed)
        problems = check(case.plan, case.model, case.cluster, case.workload, case.framework, runtime=case.runtime)
        if not is_legal(problems):
            row["skipped"] = f"not legal in {case.framework.title}: {problems[0].message}"
            return row
        estimate = _estimate(case, profile)
    except PlannerError as error:
        row["skipped"] = str(error)
        return row
    _compare(row, case, estimate)
    return row


def _estimate(case: Case, profile: Profile | None) -> Estimate:
    return cost_table(case.model, case.cluster, case.workload, [case.plan], case.runtime, profile).estimate(0)


def _compare(row: dict[str, Any], case: Case, estimate: Estimate) -> None:
    memory = estimate.memory
    reserved, row["memory_is"] = _memory_convention(case)
    compared = _reserved_on(case, memory) if reserved else memory.peak_bytes.value
    row["predicted"] = {
        "step_s": estimate.step_s.value,
        "step_low_s": estimate.step_s.low,
        "step_high_s": estimate.step_s.high,
        "tokens_per_s_per_gpu": estimate.tokens_per_s_per_gpu,
        "tflops_per_gpu": estimate.tflops_per_gpu,
        "mfu": estimate.mfu,
        "peak_memory_bytes": compared,
        "allocated_bytes": memory.peak_bytes.value,
        "reserved_bytes": memory.reserved_bytes,
        "fits": memory.fits,
    }
    if case.outcome in {"ok", "oom"}:
        row["outcome_right"] = memory.fits == (case.outcome == "ok")
    step, row["convention"] = measured_step_s(case)
    if step is not None:
        row["error"]["step"] = estimate.step_s.value / step - 1
        row["within"]["step"] = estimate.step_s.low <= step <= estimate.step_s.high
    peak = _number(case.measured.get("peak_memory_gib"))
    if peak is not None:
        # The interval is stated for allocated bytes; reserved memory carries the same relative width.
        ratio = compared / memory.peak_bytes.value if memory.peak_bytes.value else 1.0
        row["error"]["memory"] = compared / (peak * GIB) - 1
        row["within"]["memory"] = memory.peak_bytes.low * ratio <= peak * GIB <= memory.peak_bytes.high * ratio
    held = [value for value in row["within"].values() if value is not None]
    row["within_interval"] = all(held) if held else None
    if step is None and peak is None and row["outcome_right"] is None:
        row["skipped"] = "the source states nothing to compare: no time, throughput, FLOP/s, memory or outcome"


def _reserved_on(case: Case, memory: MemoryEstimate) -> float:
    """Return the bytes reserved on the rank that the source looked at, or on the worst one where it names none."""
    rank = case.measured.get("memory_rank")
    plan = case.plan
    if not isinstance(rank, int) or not memory.reserved_by_stage or not 0 <= rank < plan.gpus:
        return memory.reserved_bytes
    return memory.reserved_by_stage[rank // (plan.gpus // plan.pp)]


def measured_step_s(case: Case) -> tuple[float | None, str | None]:
    """Return the step time the source states or implies, and how it was read.

    Throughput counts the tokens of the whole global batch. FLOP/s are read as model FLOPs (no recompute), unless the
    source says that they are hardware FLOPs (`measured.flops_are`, or its note): then as every matmul and attention
    score that ran, the second forward pass of full recompute included, attention counted without the causal half
    (the formula of Narayanan et al., arXiv 2104.04473, section 5.1).
    """
    measured, plan = case.measured, case.plan
    step = _number(measured.get("step_s"))
    if step is not None:
        return step, "step time as stated"
    tokens = case.workload.tokens_per_step / plan.gpus
    throughput = _number(measured.get("tokens_per_s_per_gpu"))
    if throughput is not None:
        return tokens / throughput, "from tokens/s/GPU"
    tflops = _number(measured.get("tflops_per_gpu"))
    if tflops is None:
        return None, None
    model, seq = case.model, case.workload.seq_len
    if measured.get("flops_are") == "hardware" or "hardware flop" in case.note.lower():
        forward = 2.0 * model.matmul_parameters() + model.full_attention_flops_per_token(seq)
        again = forward - 2.0 * model.vocab * model.hidden if plan.recompute == "full" else 0.0
        return tokens * (3.0 * forward + again) / (tflops * 1e12), "from FLOP/s, hardware FLOPs with recompute"
    return tokens * 3.0 * model.forward_flops_per_token(seq) / (tflops * 1e12), "from FLOP/s, model FLOPs"


def _memory_convention(case: Case) -> tuple[bool, str]:
    """Return whether the source's peak is what the allocator reserved, and the words for it."""
    stated = case.measured.get("memory_is")
    if isinstance(stated, str):
        return "reserved" in stated.lower(), stated
    if case.framework.name == "torchtitan":
        return True, "reserved (what torchtitan logs)"
    return False, "allocated (not stated)"


def _number(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    return float(value) if good else None


def summarise(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return counts, and for step and memory: mean absolute error, bias, worst row, and interval coverage."""
    rows = list(rows)
    compared = [row for row in rows if row["skipped"] is None]
    right = [row["outcome_right"] for row in compared if row["outcome_right"] is not None]
    return {
        "rows": len(rows),
        "compared": len(compared),
        "skipped": len(rows) - len(compared),
        "step": _errors(compared, "step"),
        "memory": _errors(compared, "memory"),
        "outcomes": {"right": sum(right), "wrong": len(right) - sum(right)},
    }


def _errors(rows: list[Mapping[str, Any]], quantity: str) -> dict[str, Any] | None:
    pairs = [(row["error"][quantity], row) for row in rows if row["error"][quantity] is not None]
    if not pairs:
        return None
    worst, row = max(pairs, key=lambda pair: (abs(pair[0]), str(pair[1]["id"])))
    n = len(pairs)
    return {
        "rows": n,
        "mean_abs": sum(abs(error) for error, _ in pairs) / n,
        "bias": sum(error for error, _ in pairs) / n,
        "worst": worst,
        "worst_id": row["id"],
        "coverage": sum(bool(r["within"][quantity]) for _, r in pairs) / n,
    }
