"""Search: bound every legal plan, cost those that could be best, simulate the finalists, and say why the others lost.

Branch and bound over the closed form (`plan_space.branch_and_bound`) finds the plans to list and proves that no other
plan of the space (`plan_space.candidates`) beats them there. Pipelines among them get layers and recompute modes by
stage (`stages.assignment`). The simulation then orders the plans that are too close for the closed form. Ties go to the
simpler plan, in a fixed order, so that the same question has the same answer on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from planner.question.question import Question, require_plannable
from planner.search.finalists import Finalist, order_by_simulation
from planner.search.flips import GIB, PlanCost, find_flips, lost_because, memory_flip
from planner.search.gpu_counts import cost_per_million_tokens
from planner.search.headroom import find_headroom
from planner.search.infeasible import no_fitting_plan, no_legal_plan
from planner.search.plan_space.branch_and_bound import Explored, explore, pareto_rows
from planner.search.plan_space.candidates import Bounds, Nodes, enumerate_nodes
from planner.search.plan_space.overlap_choice import with_overlap_by_site
from planner.search.result import RankedPlan, SearchResult, SearchStats
from planner.search.stages.assignment import NEAR_FIT, AssignedPipelines, assign_stages, plan_of_row
from planner.search.stated_parts import contradiction
from simulator.closed_form.screening import Screening
from simulator.columns.plan_columns import PlanColumns
from simulator.config.plan import MESH_AXES, Plan
from simulator.legality.frameworks import Framework
from topology.cluster import Cluster
from topology.errors import UserError

OBJECTIVES = ("time", "throughput", "memory", "cost", "pareto")
# The closed form is within this much of the simulation (tests/simulator/test_lowering_grid.py): plans closer than that
# are ordered by simulating them.
CLOSED_FORM_ERROR = 0.13


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How to search, and which plans to list.

    `objective` is time (seconds per step), memory (bytes reserved on the worst rank) or pareto (the plans that no other
    beats in both, fastest first). On one GPU count, throughput (tokens/s/GPU) and cost (per token) order plans as time
    does; they differ where GPU counts are compared. The result lists `top` plans, one per set of parallel degrees
    unless `all_variants`. After `time_limit_s` it has the best plans so far, and their gap.
    """

    objective: str = "time"
    top: int = 5
    bounds: Bounds = field(default_factory=Bounds)
    all_variants: bool = False
    gpu_price_per_hour: float | None = None
    simulate: bool = True
    time_limit_s: float | None = None


def suggest(
    question: Question,
    options: SearchOptions | None = None,
    *,
    grow: Callable[[int], Cluster] | None = None,
    progress: Callable[[str], None] | None = None,
) -> SearchResult:
    """Return the best plans for one training step.

    `grow(n)` returns the cluster with n GPUs, for advice on an infeasible question. Raises Infeasible (exit 3) when no
    plan is legal or none fits.
    """
    started = time.monotonic()
    options = options or SearchOptions()
    if options.objective not in OBJECTIVES:
        raise UserError(f"unknown objective {options.objective!r}", remedy=f"one of {', '.join(OBJECTIVES)}")
    require_plannable(question.cluster)
    nodes = enumerate_nodes(question, bounds=options.bounds)
    if not len(nodes):
        raise contradiction(question, options.bounds, nodes) or no_legal_plan(question, nodes)
    screening = Screening(question)
    deadline = None if options.time_limit_s is None else started + options.time_limit_s
    nodes, explored, assigned = _explore(screening, question.framework, nodes, options, deadline, progress)
    if not len(explored) and not assigned.plans:
        raise no_fitting_plan(question, nodes, options.bounds, grow=grow)
    plans = _listed_plans(explored, assigned, options, question.cluster)
    table = question.estimate(plans)
    finalists = [Finalist(plan=plan, estimate=table.estimate(i)) for i, plan in enumerate(plans)]
    if options.simulate and options.objective not in {"memory", "pareto"}:
        finalists = order_by_simulation(screening, finalists, within=CLOSED_FORM_ERROR, progress=progress)
    ranked = _rank(question, finalists, options)
    stats = _search_stats(nodes, explored, assigned, options.objective, finalists, seconds=time.monotonic() - started)
    rejected = {**nodes.rejected, "memory": explored.legal - explored.fitting}
    return SearchResult(
        question=question,
        search=stats,
        plans=ranked,
        rejected=dict(sorted(rejected.items(), key=lambda item: (-item[1], item[0]))),
    )


def _explore(
    screening: Screening,
    framework: Framework,
    nodes: Nodes,
    options: SearchOptions,
    deadline: float | None,
    progress: Callable[[str], None] | None,
) -> tuple[Nodes, Explored, AssignedPipelines]:
    """Return the nodes with overlap modes by site, the plans that could be listed, and pipelines with better stages."""
    objective, recomputes = options.objective, options.bounds.recomputes or framework.recomputes
    nodes = with_overlap_by_site(screening, nodes, framework, recomputes)
    explored = explore(
        screening,
        nodes,
        recomputes,
        objective=objective if objective in {"memory", "pareto"} else "time",
        keep=options.top,
        one_per_grid=not options.all_variants,
        deadline=deadline,
        progress=progress,
        nearly=NEAR_FIT if framework.lists_layers or framework.lists_recompute else 1.0,
    )
    if objective in {"memory", "pareto"} and len(explored):
        return nodes, explored, AssignedPipelines()
    assigned = assign_stages(
        screening, framework, nodes, explored, recomputes, top=options.top, deadline=deadline, progress=progress
    )
    return nodes, explored, assigned


def _rank(question: Question, finalists: Sequence[Finalist], options: SearchOptions) -> tuple[RankedPlan, ...]:
    """Return the finalists as listed plans: why each lost, when it would win, its problems and its cost."""

    def cost_plans(pairs: Sequence[tuple[Cluster, Plan]]) -> list[PlanCost]:
        clusters, plans_of_pairs = zip(*pairs, strict=True)
        costs = question.estimate(plans_of_pairs, each_on=clusters)
        value = costs.reserved_bytes if options.objective == "memory" else costs.step_s
        return [(float(v), bool(f)) for v, f in zip(value, costs.fits, strict=True)]

    plans, best = [finalist.plan for finalist in finalists], finalists[0].estimate
    flips = find_flips(question.cluster, plans[0], plans[1:], cost_plans)
    room = find_headroom(question, plans[0], best)
    return tuple(
        RankedPlan(
            rank=i + 1,
            plan=finalist.plan,
            estimate=finalist.estimate,
            lost_because=_why_it_lost(finalists[0], finalist, options.objective) if i else None,
            flips=(*flips[i - 1], *memory_flip(question.cluster, best, finalist.estimate)) if i else (),
            problems=question.problems(finalist.plan),
            simulated_s=finalist.simulated_s,
            simulated_bytes=finalist.simulated_bytes,
            cost_per_million_tokens=cost_per_million_tokens(finalist.estimate, options.gpu_price_per_hour),
            room=None if i else room,
        )
        for i, finalist in enumerate(finalists)
    )


def _why_it_lost(best: Finalist, other: Finalist, objective: str) -> str:
    behind = None
    if best.fits_simulated() and not other.fits_simulated():
        needs, has = (other.simulated_bytes or 0.0) / GIB, other.estimate.memory.capacity_bytes / GIB
        return f"may not fit: its simulated allocator reserves {needs:.1f} of {has:.1f} GiB, as its memory fragments"
    if best.simulated_s is not None and other.simulated_s is not None:
        behind = other.simulated_s - best.simulated_s
    return lost_because(best.estimate, other.estimate, objective=objective, simulated_s=behind)


def _listed_plans(
    explored: Explored, assigned: AssignedPipelines, options: SearchOptions, cluster: Cluster
) -> list[Plan]:
    """Return the plans to list, best first by the closed form."""
    top = options.top
    if options.objective == "pareto":
        rows = pareto_rows(explored.step_s, explored.reserved_bytes)
        front = [plan_of_row(explored.columns, row, cluster) for row in rows]
        return front or [plan for plan, _ in assigned.plans[:top]]
    values = explored.reserved_bytes if options.objective == "memory" else explored.step_s
    rows = rank_rows(explored.columns, values, top=top, all_variants=options.all_variants)
    found = [(float(values[row]), plan_of_row(explored.columns, row, cluster)) for row in rows]
    if assigned.plans:
        found = sorted([*found, *((step, plan) for plan, step in assigned.plans)], key=lambda pair: pair[0])
    if not options.all_variants:
        first: dict[tuple[int, ...], tuple[float, Plan]] = {}
        for value, plan in found:
            first.setdefault(tuple(getattr(plan, axis) for axis in (*MESH_AXES, "ep")), (value, plan))
        found = list(first.values())
    return [plan for _, plan in found[:top]]


def _search_stats(
    nodes: Nodes,
    explored: Explored,
    assigned: AssignedPipelines,
    objective: str,
    finalists: Sequence[Finalist],
    *,
    seconds: float,
) -> SearchStats:
    """Return the account of the search, with the gap to the optimum."""
    memory = objective == "memory"
    listed = min(finalist.estimate.step_s.value for finalist in finalists)
    status = "optimal within the model" if explored.complete else "best found within the time limit"
    if not len(explored):  # only pipelines with other stages than the runtime's fit, of which not all were tried
        status = "best of the pipelines tried"
        explored = replace(explored, complete=False, bound=0.0 if memory else explored.floor_s)
    values = explored.reserved_bytes if memory else explored.step_s
    value = float(values.min(initial=np.inf)) if len(values) else listed
    gap = 0.0 if explored.complete else value / explored.bound - 1 if explored.bound > 0 else float("inf")
    beaten = explored.fitting - len(explored)
    pruned = {**nodes.pruned, **({"bound above the plans listed": beaten} if beaten else {})}
    return SearchStats(
        candidates=explored.legal + sum(nodes.rejected.values()) + sum(nodes.pruned.values()),
        legal=explored.legal,
        fitting=explored.fitting,
        costed=len(explored),
        pruned=pruned,
        simulated=sum(finalist.simulated_s is not None for finalist in finalists),
        seconds=seconds,
        status=status,
        objective=objective,
        bound_s=explored.floor_s if memory else min(explored.bound, listed),
        gap=gap,
        filled=assigned.solved,
        filled_gap=assigned.gap,
    )


def rank_rows(table: PlanColumns, values: NDArray[np.float64], *, top: int, all_variants: bool) -> list[int]:
    """Return up to `top` rows, best value first; one per grid unless `all_variants`.

    Equal values go to the plan with fewer pipeline stages, then context, tensor and expert ranks, then shards, then
    smaller micro batches: the simpler plan. Remaining ties go by enumeration order.
    """
    keys = (
        table.reshard,
        table.sequence_parallel,
        table.zero_stage,
        table.virtual_stages,
        table.micro_batch_size,
        table.dp_shard,
        table.ep,
        table.tp,
        table.cp,
        table.pp,
        values,
    )
    rows: list[int] = []
    seen: set[tuple[int, ...]] = set()
    for candidate in np.lexsort(keys):
        row = int(candidate)
        if len(rows) >= top:
            break
        grid = tuple(int(getattr(table, axis)[row]) for axis in (*MESH_AXES, "ep"))
        if all_variants or grid not in seen:
            rows.append(row)
            seen.add(grid)
    return rows
