"""The listed plans on hypothetical machines: with other rates of links, memory or arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import streamlit as st

from planner.io.plan_words import plan_chips, plan_name
from planner.search.flips import KNOBS, OCTAVES, STEPS, knobs_of
from topology.rates import scaling
from topology.units import GIB
from ui.charts.row_types import PlanOnMachine, RatePoint

if TYPE_CHECKING:
    from planner.search.result import SearchResult
    from simulator.analytical.estimates import EstimateTable
    from simulator.config.plan import Plan
    from ui.question.state import Inputs


from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.io.figures import change_text, gib_text, gpus_text
from simulator.config.estimate import Fit, chance
from topology.units import two_digits
from ui.charts.row_types import RunRow, SavingRow, SizeRow

if TYPE_CHECKING:
    from planner.search.fixes import Fix
    from planner.search.result import RankedPlan
    from planner.search.size_grid import Size
    from planner.search.whole_run import WholeRun
    from simulator.config.estimate import Estimate, Interval


_SCALE = {
    "network": scaling.scale_network,
    "NVLink": scaling.scale_nvlink,
    "memory": scaling.scale_memory,
    "FLOP/s": scaling.scale_flops,
}


def rate_curves(result: SearchResult, plans: tuple[Plan, ...], quantity: str) -> list[RatePoint]:
    """Return the steps (s) of `plans` with the network or NVLink scaled by factors from 1/4 to 4, where flip points
    were looked for and where they are.

    The clusters are scaled, and the steps follow the curves that flip points were read off (`planner.search.flips`): a
    plan has no step where its curve ends. No step is longer than on slower links: where NCCL chooses worse on faster
    ones, the curve is a bound.
    """
    knob = next(knob for knob in KNOBS if knob.quantity == quantity)
    now = knob.now(result.question.cluster)
    ranked = {one.plan: one for one in result.plans}
    flips = [flip for plan in plans if plan in ranked for flip in ranked[plan].flips if flip.quantity == quantity]
    looked_at = {step / STEPS for step in range(-OCTAVES * STEPS, OCTAVES * STEPS + 1)}
    shifts = sorted(looked_at | {math.log2(flip.at / flip.now) for flip in flips})
    machines = [knob.scale(result.question.cluster, 2.0**shift) for shift in shifts]
    each_on = [machine for machine in machines for _ in plans]
    steps = result.question.estimate([*plans] * len(shifts), each_on=each_on).step_s.reshape(len(shifts), len(plans))
    for column, plan in enumerate(plans):
        if one := ranked.get(plan):
            steps[:, column] *= one.estimate.step_s.value / steps[shifts.index(0.0), column]
            known = {curve.sign: curve for curve in one.rate_curves if curve.quantity == quantity}
            for row, shift in enumerate(shifts):
                if curve := known.get(int(np.sign(shift))):
                    steps[row, column] *= curve.factor(abs(shift)) if abs(shift) <= curve.end else np.nan
    curves = np.fmin.accumulate(steps, axis=0)
    return [
        {"rate": now * 2.0**shift, "plan": plan_chips(plan), "step_s": float(curves[row, column])}
        for row, shift in enumerate(shifts)
        for column, plan in enumerate(plans)
        if not np.isnan(steps[row, column])
    ]


@st.cache_resource(max_entries=64, show_spinner=False)
def _on_machine(_result: SearchResult, key: str, factors: Mapping[str, float]) -> EstimateTable:
    """Return the listed plans by the analytical model, on a machine that is `factors` times what it is. `key` names the
    question and the plans.
    """
    del key
    machine = _result.question.cluster
    for name, factor in factors.items():
        if factor != 1:
            machine = _SCALE[name](machine, factor)
    return replace(_result.question, cluster=machine).estimate([ranked.plan for ranked in _result.plans])


def changed_machine(question: Inputs, result: SearchResult, factors: Mapping[str, float]) -> list[PlanOnMachine]:
    """Return the listed plans on a machine whose rates and memory are `factors` times what they are.

    A step is scaled by the ratio of the analytical model's steps there and here; memory use stays the same. Raises
    PlannerError.
    """
    key = " ".join([question.key, *(plan_name(ranked.plan) for ranked in result.plans)])
    now, then = _on_machine(result, key, dict.fromkeys(factors, 1.0)), _on_machine(result, key, dict(factors))
    return [
        {
            "rank": ranked.rank,
            "plan": plan_chips(ranked.plan),
            "before_s": ranked.estimate.step_s.value,
            "after_s": ranked.estimate.step_s.value * float(then.step_s[i] / now.step_s[i]),
            "reserved_gib": ranked.estimate.memory.reserved_bytes / GIB,
            "fits": ranked.estimate.memory.reserved_bytes <= then.capacity_bytes,
        }
        for i, ranked in enumerate(result.plans)
    ]


def knobs(result: SearchResult) -> list[tuple[str, float]]:
    """Return the link rates that can be varied on this cluster: (name, present value in bytes/s)."""
    cluster = result.question.cluster
    return [(knob.quantity, knob.now(cluster)) for knob in knobs_of(cluster)]


LEAST_CHANGE = 0.005  # relative difference from which a step is called longer or shorter


def size_rows(sizes: Sequence[Size], ranked: RankedPlan, seq_len: int) -> list[SizeRow]:
    """Return the cells of a plan over lengths and micro batches: the step, and a rate for what surely fits."""
    return [_size_row(size, ranked, seq_len) for size in sizes]


def _size_row(size: Size, ranked: RankedPlan, seq_len: int) -> SizeRow:
    row: SizeRow = {
        "length": f"{size.seq_len:,}",
        "micro_batch": str(size.micro_batch_size),
        "tokens_per_s": None,
        "rate": "",
        "upper": "not legal",
        "lower": "",
        "state": size.problem,
        "here": (size.seq_len, size.micro_batch_size) == (seq_len, ranked.plan.micro_batch_size),
    }
    if size.step_s is None or size.tokens_per_s_per_gpu is None or size.reserved_bytes is None or size.fit is None:
        return row
    row["lower"] = f"{gib_text(size.reserved_bytes)} GiB"
    row["rate"] = f"{float(f'{size.tokens_per_s_per_gpu:.2g}'):,.0f} tokens/s"
    row["upper"] = f"{two_digits(size.step_s)} s"
    if size.fit is Fit.YES:
        row["tokens_per_s"], row["state"] = size.tokens_per_s_per_gpu, "fits"
    elif size.fit is Fit.NO:
        row["upper"], row["state"] = "does not fit", "does not fit"
    else:
        row["state"] = f"{chance(size.fit_probability)} likely to fit"
    return row


def run_rows(runs: Sequence[WholeRun], here: int) -> list[RunRow]:
    """Return whole runs as they are drawn, those that have a plan; `here` is the number of GPUs that is asked about."""
    rows: list[RunRow] = []
    for run in runs:
        cost = run.cost or run.gpu_hours
        if run.days is not None and cost is not None:
            rows.append(
                {
                    "label": gpus_text(run.gpus),
                    "days": run.days.value,
                    "days_low": run.days.low,
                    "days_high": run.days.high,
                    "days_text": with_ends(run.days),
                    "cost": cost.value,
                    "cost_low": cost.low,
                    "cost_high": cost.high,
                    "cost_text": with_ends(cost),
                    "here": run.gpus == here,
                }
            )
    return rows


def with_ends(interval: Interval) -> str:
    """Return a figure of a whole run with its range: `84 (65 to 110)`."""
    return f"{two_digits(interval.value)} ({two_digits(interval.low)} to {two_digits(interval.high)})"


def saving_rows(fixes: Sequence[Fix], estimate: Estimate) -> list[SavingRow]:
    """Return changes that free memory, as they are drawn."""
    held = estimate.memory.reserved_bytes
    return [
        {
            "change": fix.change,
            "from_gib": held / GIB,
            "to_gib": fix.reserved_bytes / GIB,
            "quicker": fix.longer < LEAST_CHANGE,
            "text": f"-{gib_text(held - fix.reserved_bytes)} GiB, {_time_text(fix)}",
        }
        for fix in fixes
    ]


def _time_text(fix: Fix) -> str:
    return f"{change_text(fix.longer)} time" if abs(fix.longer) >= LEAST_CHANGE else "as fast"
