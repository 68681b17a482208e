"""The sources of a predicted step's error: terms shared by plans, the spread of each, and its effect on steps.

A term's error is a standard normal number; one unit of it multiplies a cost by the exponential of the term's spread. So
a row of effects says how much the logarithm of a step changes by one unit of each term, at costs as they are predicted
before anything is measured. Effects are found by predicting again with the term one spread higher, so a cost also
counts that has an effect only when it is higher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.estimates import EstimateTable, estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.calibration.calibration import LOADING, Calibration, calibrated_host
from simulator.calibration.measured_operators import MeasuredOperators
from simulator.collectives.measured import MeasuredCollectives, Model, Ratios
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.fitting.host_fit import COST_SPREAD, HOST_SPREAD, LAUNCHES, LEAST_S, spread_of, usual_costs
from simulator.fitting.runtime_fit import INSIDE_SPREAD
from simulator.kernels.operators import Work, WorkKind
from simulator.kernels.roofline import Packing
from simulator.runtimes.library import runtime_spec
from simulator.step.host import costs_in
from topology.rates.groups import GroupShape

Floats = NDArray[np.float64]

# Spreads of logarithms before anything is measured on a machine: kernels predicted from datasheets and published
# efficiencies, compared with measured ones (examples/validation/fresh.md, parts of a step); collectives of the NCCL
# model compared with tables; contention and overlap from one machine.
KERNELS = {
    "matrix products": WorkKind.MATMUL,
    "attention": WorkKind.ATTENTION,
    "kernels that move memory": WorkKind.MOVE,
}
KERNEL_SPREADS = {"matrix products": 0.06, "attention": 0.12, "kernels that move memory": 0.12}
COLLECTIVE_SPREAD = 0.15
PACKING_SPREAD, UPDATE_SPREAD, CONTENTION_SPREAD, OVERLAP_SPREAD = 0.3, 0.25, 0.4, 0.3
UNKNOWN_S = 1.5e-3  # spread of a host cost that is described as zero; assumed
HOST_WORDS = {
    "launch_s": "launches",
    "fsdp_layer_s": "a layer's FSDP",
    "ddp_layer_s": "a layer's DDP",
    "tp_layer_s": "a layer's tensor parallelism",
    "cp_layer_s": "a layer's context parallelism",
    "moe_layer_s": "a layer's experts",
    "ep_layer_s": "a layer's expert parallelism",
    "fsdp_tp_layer_s": "a layer's FSDP with tensor parallelism",
    "pp_pass_s": "a stage's pass in a pipeline",
    "checkpoint_s": "recomputing a layer",
    "fsdp_again_s": "recomputing a layer under FSDP",
    "selective_s": "recomputing a layer operator by operator",
    "rest_s": "a step outside layers",
    "fsdp_rest_s": "a step outside layers, more under FSDP",
    "ddp_rest_s": "a step outside layers, more under DDP",
    "tp_rest_s": "a step outside layers, more under tensor parallelism",
    "cp_rest_s": "a step outside layers, more under context parallelism",
}

Change = Callable[[Scenario], Calibration]


def _anywhere(_: Plan) -> bool:
    return True


def _among_gpus(plan: Plan) -> bool:
    return plan.gpus > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A term `name` with a `spread` of its logarithm. `change` raises it by one spread; for costs that no calibration
    contains, `share` names its part of a step instead. `occurs`: whether it can occur in a plan. `host`: it is a host
    cost, the only kind that narrow layers show.
    """

    name: str
    spread: float
    change: Change | None = field(default=None, compare=False)
    share: str = ""
    occurs: Callable[[Plan], bool] = field(default=_anywhere, compare=False)
    host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _RaisedOperators(MeasuredOperators):
    """Multiplies the time of operators of one kind, and of FSDP's packing if no kind is given, by `factor`."""

    base: MeasuredOperators
    kind: WorkKind | None
    factor: float

    def seconds(
        self, work: Work, datasheet: Callable[[], Floats], *, dtype: str, runtime: str
    ) -> tuple[Floats, Floats]:
        seconds, source = self.base.seconds(work, datasheet, dtype=dtype, runtime=runtime)
        return (seconds * self.factor if work.kind is self.kind else seconds), source

    def packing_factor(self, packing: Packing, usual: Floats | float) -> Floats:
        found = self.base.packing_factor(packing, usual)
        return found if self.kind is not None else found * self.factor

    def update_bytes_per_s(self, param_dtype: str) -> float | None:
        return self.base.update_bytes_per_s(param_dtype)


class _RaisedCollectives(MeasuredCollectives):
    """Multiplies the time of collectives of one kind by `factor`."""

    def __init__(self, base: MeasuredCollectives | None, op: str, factor: float) -> None:
        super().__init__(base.samples if base is not None else ())
        self.op, self.factor = op, factor

    def blend(
        self, op: str, sizes: Floats, shape: GroupShape, model: Model, ratios: Ratios | None = None
    ) -> tuple[Floats, NDArray[np.bool_]]:
        seconds, known = super().blend(op, sizes, shape, model, ratios)
        return (seconds * self.factor if op == self.op else seconds), known


def terms_of(plans: Sequence[Plan], runtimes: Sequence[Runtime], ops: Sequence[str]) -> list[Term]:
    """Return the terms in steps of `plans` under `runtimes` with the collectives `ops`."""
    found = [
        Term(name=name, spread=KERNEL_SPREADS[name], change=_raise_operators(kind, KERNEL_SPREADS[name]))
        for name, kind in KERNELS.items()
    ]
    found += [
        Term(
            name="packing of FSDP",
            spread=PACKING_SPREAD,
            change=_raise_operators(None, PACKING_SPREAD),
            occurs=lambda plan: plan.dp_shard * plan.cp > 1,
        ),
        Term(name="clipping and updating", spread=UPDATE_SPREAD, share="optimizer"),
        Term(name="kernels alongside collectives", spread=CONTENTION_SPREAD, share="contention"),
    ]
    found += [
        Term(name=collective_term(op), spread=COLLECTIVE_SPREAD, change=_raise_collective(op), occurs=_among_gpus)
        for op in sorted(set(ops))
    ]
    if any(plan.tp_overlap != "none" for plan in plans):
        found.append(Term(name="overlap of tensor parallelism", spread=OVERLAP_SPREAD, share="tp"))
    found.append(Term(name="this host's speed", spread=HOST_SPREAD, change=_raise_host(None, COST_SPREAD), host=True))
    names = sorted({name for plan in plans for name in costs_in(plan, sparse=True)})
    for runtime in dict.fromkeys((runtime_spec(one.name).names[0], one.compile) for one in runtimes):
        found.append(
            Term(name=f"kernels inside a step of {_called(*runtime)}", spread=INSIDE_SPREAD, change=_inside(runtime))
        )
        described = runtime_spec(runtime[0]).host
        known = usual_costs(described)
        found += [
            Term(
                name=f"host, {_called(*runtime)}: {HOST_WORDS.get(name, name)}",
                spread=spread_of(name, described),
                change=_raise_host((*runtime, name), spread_of(name, described)),
                occurs=partial(_costs, name),
                host=True,
            )
            for name in names
            if name in known
        ]
    return found


def _costs(name: str, plan: Plan) -> bool:
    return name in costs_in(plan, sparse=True)  # without experts their terms have no effect


def collective_term(op: str) -> str:
    """Return the name of the term of a collective."""
    return f"{op.replace('_', '-')}s"


def effects(
    scenario: Scenario, plans: Sequence[Plan], terms: Sequence[Term], *, hosts_alone: bool = False
) -> tuple[Floats, EstimateTable]:
    """Return the change of the logarithm of each plan's step for one unit of each term, shape (plans, terms), and the
    prediction, whose first rows are the plans.

    With `hosts_alone` only host terms have an effect. Raises the errors of predicting the plans.
    """
    known = _known(scenario)
    base = replace(scenario, calibration=known)
    asked = [
        (place, term)
        for place, term in enumerate(terms)
        if (term.host or not hosts_alone) and any(map(term.occurs, plans))
    ]
    changed = {place: one for place, term in asked if term.change and (one := term.change(base)) is not known}
    # Predicts the plans unchanged, and again for every change.
    each_with = [one for one in (known, *changed.values()) for _ in plans]
    table = estimate_plans(base, [*plans] * (1 + len(changed)), each_with=each_with)
    steps = table.step_s.reshape(1 + len(changed), len(plans))
    found = np.zeros((len(plans), len(terms)))
    for row, place in enumerate(changed, 1):
        found[:, place] = np.log(steps[row] / steps[0])
    parts = {**table.exposed_by_axis_s, **table.breakdown_s}
    for place, term in asked:
        if term.change is None:
            found[:, place] = term.spread * parts[term.share][: len(plans)] / steps[0]
    return found, table


def _known(scenario: Scenario) -> Calibration:
    return scenario.calibration or Calibration(gpu=scenario.cluster.slowest_kind)


def _raise_operators(kind: WorkKind | None, spread: float) -> Change:
    def change(scenario: Scenario) -> Calibration:
        known = _known(scenario)
        return replace(known, operators=_RaisedOperators(base=known.operators, kind=kind, factor=math.exp(spread)))

    return change


def _raise_collective(op: str) -> Change:
    def change(scenario: Scenario) -> Calibration:
        known = _known(scenario)
        return replace(known, collectives=_RaisedCollectives(known.collectives, op, math.exp(COLLECTIVE_SPREAD)))

    return change


def _inside(runtime: tuple[str, bool]) -> Change:
    def change(scenario: Scenario) -> Calibration:
        known = _known(scenario)
        if (runtime_spec(scenario.runtime.name).names[0], scenario.runtime.compile) != runtime:
            return known
        costs = known.runtime(runtime[0], compiled=runtime[1])
        return replace(known, runtimes={**known.runtimes, runtime: costs.slower(math.exp(INSIDE_SPREAD))})

    return change


def _raise_host(cost: tuple[str, bool, str] | None, spread: float) -> Change:
    """Return a change that raises one host cost of a runtime; for None all host costs of the scenario's runtime."""

    def change(scenario: Scenario) -> Calibration:
        name, compiled = runtime_spec(scenario.runtime.name).names[0], scenario.runtime.compile
        known = _known(scenario)
        if cost is not None and cost[:2] != (name, compiled):
            return known
        spec = runtime_spec(name)
        host = calibrated_host(spec, known, compiled=compiled).host
        if cost is None:
            raised = {
                one.name: value * math.exp(HOST_SPREAD)
                for one in fields(host)
                if isinstance(value := getattr(host, one.name), float) and one.name not in LOADING
            }
        else:
            names = LAUNCHES if cost[2] == "launch_s" else (cost[2],)
            raised = {one: _higher(getattr(host, one) or 0.0, spread, launch=cost[2] == "launch_s") for one in names}
        costs = known.runtime(name, compiled=compiled)
        changed = {**known.runtimes, (name, compiled): replace(costs, host={**costs.host, **raised})}
        return replace(known, runtimes=changed)

    return change


def _higher(seconds: float, spread: float, *, launch: bool) -> float:
    if seconds <= LEAST_S and not launch:
        return seconds + UNKNOWN_S
    return seconds * math.exp(spread)


def _called(name: str, compiled: bool) -> str:
    return f"{name}, compiled" if compiled else name
