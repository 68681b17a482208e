"""One plan, simulated: its step as a Program on SimPy, read back as an Estimate.

simulated = simulate_plan(scenario, plan)
simulated.estimate.step_s.value, simulated.run.trace
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from simulator.analytical.account import WALKED
from simulator.analytical.estimates import Counted, estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.estimate import Estimate
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.kernels.operators import active_rows
from simulator.lowering.block_code import Detail
from simulator.lowering.training import lower_training, plan_context
from simulator.pipeline.schedule_walk import shown
from simulator.program import trace as tr
from simulator.runtimes.model_operators import operators_for

if TYPE_CHECKING:
    from simulator.engine.simulate import Run

# Finding which ranks behave alike takes, for each rank, as long as simulating this many instructions.
INSTRUCTIONS_PER_RANK = 2
# Instructions of a layer and pass, and further instructions of a stage and pass: rough counts, used only to choose.
PER_LAYER, PER_STAGE = 24, 14
# Of a hop of ring attention: sends and receipts, a kernel, and their events. Source: programs of 8B with 4 to 64 ranks
# in a ring have 11 to 17, in Megatron-LM and in torchtitan.
PER_HOP = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """`estimate` has the step, its interval and rates, and the memory of the analytical model; `run` is the timeline
    they come from.
    """

    estimate: Estimate
    run: Run
    detail: Detail


# A timeline with more instructions shows only the micro batches after which its schedule repeats itself.
DRAWN_INSTRUCTIONS = 60_000


def drawn_micro_batches(model: Model, workload: Workload, plan: Plan) -> int:
    """Return the number of micro batches in a timeline: all of them, or for a long step enough to show every kind of
    pass.
    """
    micro_batches = plan.micro_batches(workload.global_batch_size)
    if program_length(model, workload, plan) <= DRAWN_INSTRUCTIONS:
        return micro_batches
    if plan.pp == 1:
        return min(micro_batches, WALKED + (plan.ep_overlap != "none"))
    return shown(plan.schedule_name, plan.pp, micro_batches)


def program_length(
    model: Model, workload: Workload, plan: Plan, *, micro_batches: int | None = None, hops: int = 0
) -> float:
    """Return the approximate cost of simulating a plan layer by layer, in instructions: those of its program, and the
    equivalent of folding its ranks. `micro_batches` replaces the number of the step, and `hops` are `ring_hops`.
    """
    passes = 2 * (micro_batches or plan.micro_batches(workload.global_batch_size))
    stages = plan.stages * PER_STAGE
    transfers = 1 + 2 * (plan.tp > 1) + (plan.cp > 1) + (plan.ep > 1)
    per_layer = PER_LAYER * transfers / 2 + PER_HOP * hops
    return passes * (model.layers * per_layer + stages) + plan.gpus * INSTRUCTIONS_PER_RANK


def ring_hops(scenario: Scenario, plan: Plan) -> int:
    """Return the hops in which keys and values go round a ring in a layer, for all ranks that behave differently: 0
    without a ring, on one node, or with one rank on each, where ranks behave alike; else those of each place in a
    node.
    """
    places = scenario.cluster.gpus_per_node // plan.tp
    if plan.cp <= places or places <= 1:
        return 0
    operators, table = operators_for(scenario.model, scenario.runtime), plan_context(scenario, plan).table
    layer = operators.moe_layer or operators.dense_layer
    rings = any(one.collective == "ring" and (active_rows(one, table) > 0).any() for one in layer)
    return (plan.cp - 1) * places if rings else 0


def simulate_plan(
    scenario: Scenario,
    plan: Plan,
    *,
    detail: Detail = Detail.LAYER,
    spans: bool = True,
    links: bool = True,
    micro_batches: int | None = None,
    counted: Counted | None = None,
    progress: Callable[[str], None] | None = None,
) -> Simulated:
    """Return the simulated step. Without `spans` the trace stays empty and the breakdown is the analytical model's,
    scaled to the simulated step; without `links` the trace has no link's use. With `micro_batches` the run (not the
    estimate) is of a step with that many, and marks the ends of passes (`lower_training`). `counted` is the plan's row
    in a table of `estimate_plans`, if there is one. `progress` is called with a text on how far the simulation is; an
    exception that it raises ends the simulation.

    Raises BadPlan as `estimate_plans` and `lower_training` do, ValueError if the global batch does not divide.
    """
    from simulator.engine.simulate import simulate  # noqa: PLC0415 - loads SimPy, which most plans do without

    table, row = counted or Counted(estimate_plans(scenario, [plan]), 0)
    say = progress or (lambda _: None)
    say("writing down what every rank does")
    lowered = lower_training(
        scenario, plan, detail=detail, micro_batches=micro_batches, marks=micro_batches is not None
    )
    say("finding ranks that behave alike")
    about = float(table.step_s[row])
    watch = None if progress is None else lambda now: say(f"at {now:.3g} s of a step of about {about:.3g} s")
    run = simulate(lowered.program, lowered.costs, spans=spans, links=links, watch=watch)
    whole = micro_batches in {None, plan.micro_batches(scenario.workload.global_batch_size)}
    formula = table.estimate(row)
    estimate = _estimate(formula, run, spans=spans) if whole else formula
    return Simulated(estimate=estimate, run=run, detail=detail)


def _estimate(formula: Estimate, run: Run, *, spans: bool) -> Estimate:
    """Return the analytical model's estimate with the time of the run in place of its own."""
    scale = run.step_s / formula.step_s.value
    if spans:
        parts, by_axis = _parts_s(formula, run)
    else:
        parts = {name: part * scale for name, part in formula.breakdown_s.items()}
        by_axis = {axis: part * scale for axis, part in formula.exposed_by_axis_s.items()}
    return replace(
        formula,
        step_s=formula.step_s.at(run.step_s),
        breakdown_s={**parts, "allocator": 0.0},
        exposed_by_axis_s=by_axis,
    )


def _parts_s(formula: Estimate, run: Run) -> tuple[dict[str, float], dict[str, float]]:
    """Return the parts of the simulated step, and its exposed communication by mesh axis.

    A kernel's span is split into compute, recomputation and contention as in the analytical model.
    """
    seen, axes = breakdown_s(run), formula.exposed_by_axis_s or {"dp": 0.0}
    computed = {name: formula.breakdown_s.get(name, 0.0) for name in ("compute", "recompute", "contention")}
    whole, known, waited = sum(computed.values()), sum(axes.values()), seen["exposed_communication"]
    scale = seen["compute"] / whole if whole else 0.0
    by_axis = {axis: waited * (part / known if known else 1 / len(axes)) for axis, part in axes.items()}
    parts = {name: part * scale for name, part in computed.items()}
    for name in ("copies", "exposed_communication", "bubble", "host", "optimizer"):
        parts[name] = max(0.0, seen[name])
    return parts, by_axis


def breakdown_s(run: Run) -> dict[str, float]:
    """Return where the step's time goes on the rank that computes longest; the parts add up to the step.

    Each moment counts once, with this priority: compute, exposed communication, copies, waiting for partners (bubble),
    the host where it alone was busy, else bubble.

    The account (`simulator.analytical.account`) instead names a wait by what ends it: a wait that a late launch ends
    counts to the host even if a partner was also late. Steps agree, as do the sums of communication, bubble and host;
    in host-bound steps the division into these three may differ.
    """
    trace = run.trace
    slowest = max(trace.ranks, key=lambda rank: (trace.busy_s(rank, tr.COMPUTE), -rank))
    parts = trace.breakdown_s(slowest)
    rest = run.step_s - sum(parts.values())
    special = {"optimizer": 0.0, "copies": 0.0}
    for span in trace.of(slowest, category=tr.COMPUTE):
        kind = "optimizer" if span.name == "optimizer" else "copies" if span.name.startswith(_COPIES) else ""
        if kind:
            special[kind] += span.duration_s
    return {
        "compute": parts[tr.COMPUTE] - special["optimizer"] - special["copies"],
        "exposed_communication": parts[tr.COMMUNICATION],
        "copies": parts[tr.COPY] + special["copies"],
        "bubble": parts[tr.WAIT] + parts["idle"] + rest,
        "host": parts[tr.HOST],
        "optimizer": special["optimizer"],
    }


_COPIES = ("copy_in", "copy_out", "accumulate")
