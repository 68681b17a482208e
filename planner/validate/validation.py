"""Compare predictions with measured runs, row by row: signed errors, interval coverage, and what was skipped and why.

Errors are `predicted / measured - 1` of step time and of peak memory. Where a source states only throughput or FLOP/s,
the step time is computed from it, and the row names the convention. What no run can have shown is not compared: a step
in which products alone would be above the GPU's peak, and an outcome with more memory than the GPU has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict

from planner.question.case_fields import case_id
from planner.question.cases import Case, load_case
from simulator.config.estimate import Estimate, MemoryEstimate
from simulator.fitting.calibrations import UNMEASURED, Calibrations
from simulator.legality.rules import is_legal
from simulator.memory.estimate import with_replay
from simulator.step.frozen import trained_flops_per_token
from topology.errors import PlannerError
from topology.units import GIB


class Predicted(TypedDict):
    """What was predicted; `peak_memory_bytes` as the source counts it."""

    step_s: float
    step_low_s: float
    step_high_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float
    peak_memory_bytes: float
    allocated_bytes: float
    reserved_bytes: float
    fits: bool


class Errors(TypedDict):
    """Signed relative errors; None if the source has nothing to compare."""

    step: float | None
    memory: float | None


class Within(TypedDict):
    """Whether measurements are in the predicted range."""

    step: bool | None
    memory: bool | None


class About(TypedDict):
    """The subject of a row, for finding the rows nearest to a question."""

    model: str
    parameters: int
    gpu: str | None
    gpus: int
    framework: str


class ValidationRow(TypedDict):
    """A case: predicted, measured and their errors, or why it was `skipped`."""

    id: str
    predicted: Predicted | None
    measured: Any
    error: Errors
    within_interval: bool | None
    within: Within
    outcome: Any
    outcome_right: bool | None
    convention: str | None
    memory_is: str | None
    assumed: list[str]
    about: About | None
    skipped: str | None


class ErrorSummary(TypedDict):
    """Errors over rows: mean absolute error, mean error, the worst, and the share within the range."""

    rows: int
    mean_abs: float
    bias: float
    worst: float
    worst_id: str
    coverage: float


class Summary(TypedDict):
    rows: int
    compared: int
    skipped: int
    step: ErrorSummary | None
    memory: ErrorSummary | None
    outcomes: dict[str, int]


def validate_case(data: Mapping[str, Any], *, measured: Calibrations = UNMEASURED) -> ValidationRow:
    """Return one row of the report.

    A PlannerError about the case becomes the row's `skipped`; other exceptions are raised.
    """
    row: ValidationRow = {
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
        "about": None,
        "skipped": None,
    }
    try:
        case = load_case(data, measured)
        row["assumed"] = list(case.assumed)
        row["about"] = about(case)
        problems = case.question.problems(case.plan)
        if not is_legal(problems):
            row["skipped"] = f"not legal in {case.question.framework.title}: {problems[0].message}"
            return row
        estimate = with_replay(case.question, case.plan, case.question.estimate([case.plan]).estimate(0))
    except PlannerError as error:
        row["skipped"] = str(error)
        return row
    _compare(row, case, estimate)
    return row


def about(case: Case) -> About:
    kind = case.question.cluster.slowest_kind
    return {
        "model": case.question.model.name,
        "parameters": case.question.model.parameters,
        "gpu": kind.name if kind is not None else None,
        "gpus": case.plan.gpus,
        "framework": case.question.framework.name,
    }


def _compare(row: ValidationRow, case: Case, estimate: Estimate) -> None:
    memory = estimate.memory
    compared, row["memory_is"] = compared_bytes(case, memory)
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
    peak = _number(case.measured.get("peak_memory_gib"))
    if peak is not None and peak * GIB > case.question.cluster.gpu_memory_bytes:
        row["memory_is"] = f"{row['memory_is']}; more than the GPU has, so no run showed it"
    elif case.outcome in {"ok", "oom"}:
        row["outcome_right"] = memory.fits == (case.outcome == "ok")
    step, row["convention"] = measured_step_s(case)
    if step is not None and (beyond := _beyond_the_peak(case, estimate, step)):
        step, row["convention"] = None, beyond
    if step is not None:
        row["error"]["step"] = estimate.step_s.value / step - 1
        row["within"]["step"] = estimate.step_s.low <= step <= estimate.step_s.high
    if peak is not None:
        # The interval is stated for allocated bytes; reserved memory carries the same relative width.
        ratio = compared / memory.peak_bytes.value if memory.peak_bytes.value else 1.0
        row["error"]["memory"] = compared / (peak * GIB) - 1
        row["within"]["memory"] = memory.peak_bytes.low * ratio <= peak * GIB <= memory.peak_bytes.high * ratio
    within = [value for value in row["within"].values() if value is not None]
    row["within_interval"] = all(within) if within else None
    if step is None and peak is None and row["outcome_right"] is None:
        nothing = "the source states nothing to compare: no time, throughput, FLOP/s, memory or outcome"
        row["skipped"] = row["convention"] or nothing


def _beyond_the_peak(case: Case, estimate: Estimate, step_s: float) -> str:
    """Return why no run on such GPUs can have been so quick: its products alone, with the recomputation that is stated,
    would be above their peak. Empty if one can.
    """
    model, question = case.question.model, case.question
    flops = trained_flops_per_token(model, question.runtime.adapter, seq_len=1)
    flops += 2.0 * model.layer_matmul_parameters * (case.plan.recompute == "full")
    rate = flops * question.workload.tokens_per_step / case.plan.gpus / step_s
    if rate <= estimate.peak_flops:
        return ""
    gpu, most = question.cluster.slowest_kind.name, estimate.peak_flops / 1e12
    return (
        f"not compared: products at {rate / 1e12:.0f} TFLOP/s, where the peak of {gpu} is {most:.0f};"
        " cluster.gpu, plan.recompute or the measurement is of another run"
    )


def _reserved_on(case: Case, memory: MemoryEstimate) -> float:
    """Return the bytes reserved on the rank that the source measured, or on the worst rank if it names none."""
    rank = case.measured.get("memory_rank")
    plan = case.plan
    if not isinstance(rank, int) or not memory.reserved_by_stage or not 0 <= rank < plan.gpus:
        return memory.reserved_bytes
    return memory.reserved_by_stage[rank // (plan.gpus // plan.pp)]


def measured_step_s(case: Case) -> tuple[float | None, str | None]:
    """Return the step time in seconds that the source states or implies, and how it was derived.

    Throughput counts the tokens of the whole global batch. FLOP/s are read as model FLOPs (no recompute), unless the
    source says that they are hardware FLOPs (`measured.flops_are`): then as all matmuls and attention
    scores that ran, including the second forward pass of full recompute and both halves of the causal mask (the formula
    of Narayanan et al., arXiv 2104.04473, section 5.1).
    """
    measured, plan = case.measured, case.plan
    step = _number(measured.get("step_s"))
    if step is not None:
        return step, "step time as stated"
    tokens = case.question.workload.tokens_per_step / plan.gpus
    throughput = _number(measured.get("tokens_per_s_per_gpu"))
    if throughput is not None:
        return tokens / throughput, "from tokens/s/GPU"
    tflops = _number(measured.get("tflops_per_gpu"))
    if tflops is None:
        return None, None
    model, seq = case.question.model, case.question.workload.seq_len
    if measured.get("flops_are") == "hardware":
        flops = model.training_flops_per_token(seq, recompute_layers=float(plan.recompute == "full"))
        return tokens * flops / (tflops * 1e12), "from FLOP/s, hardware FLOPs with recompute"
    return tokens * model.training_flops_per_token(seq, causal=True) / (tflops * 1e12), "from FLOP/s, model FLOPs"


def compared_bytes(case: Case, memory: MemoryEstimate) -> tuple[float, str]:
    """Return the predicted bytes that correspond to the source's peak memory, and a description of that quantity.

    nvidia-smi shows all memory of a process: what the allocator reserved, NCCL's buffers, and the CUDA context.
    """
    stated = case.measured.get("memory_is")
    description = stated.lower() if isinstance(stated, str) else ""
    if "nvidia-smi" in description:
        others = case.question.cluster.gpu_memory_bytes - memory.capacity_bytes + memory.communicator_bytes
        return _reserved_on(case, memory) + others, str(stated)
    if "reserved" in description:
        return _reserved_on(case, memory), str(stated)
    if "allocated" not in description and case.question.framework.tools.logs_reserved:
        return _reserved_on(case, memory), f"reserved (what {case.question.framework.name} logs)"
    return memory.peak_bytes.value, str(stated) if description else "allocated (not stated)"


def _number(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    return float(value) if good else None


def summarise(rows: Iterable[ValidationRow]) -> Summary:
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


def _errors(rows: list[ValidationRow], quantity: Literal["step", "memory"]) -> ErrorSummary | None:
    pairs = [(error, row) for row in rows if (error := row["error"][quantity]) is not None]
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
