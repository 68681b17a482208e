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
