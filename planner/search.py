"""The search: bound every legal plan, cost what could be best, simulate the finalists, and say why the others lost.

Branch and bound over the closed form (`planner.branch_and_bound`) finds the plans to list and proves that no other of
the space (`planner.candidates`) beats them there. Pipelines among them get their layers and recomputation stage by stage
(`planner.filling`). The simulation then has the last word on the order of those that the closed form cannot tell
apart. Ties go to the simpler plan, in a fixed order, so that the same question has the same answer on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.branch_and_bound import Explored, explore, pareto_rows
from planner.candidates import Bounds, Nodes, enumerate_nodes
from planner.costs import cost_table, require_plannable
from planner.counts import CountRow, cost_per_million_tokens
from planner.filling import NEAR_FIT, Filled, fill, plan_of_row
from planner.finalists import Finalist, simulated_order
from planner.flips import GIB, Flip, Verdict, find_flips, lost_because, memory_flip
from planner.frameworks import Framework, framework_named
from planner.headroom import Room, more_room
from planner.legality import Problem, check, is_legal
from planner.overlap_choice import with_sites
from simulator.estimate import Estimate
from simulator.model import Model
from simulator.plan import MESH_AXES, Plan
from simulator.plan_columns import PlanColumns
from simulator.runtime import Runtime
from simulator.screening import Screening
from simulator.workload import Workload
from topology.cluster import Cluster
from topology.errors import UserError

OBJECTIVES = ("time", "throughput", "memory", "cost", "pareto")
# The closed form is within so much of the simulation (tests/simulator/test_lowering_grid.py): plans closer than that
# are told apart by simulating them.
CLOSED_FORM_ERROR = 0.13


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan of the answer. `lost_because` is empty for the first; `simulated_s` where it was not simulated."""

    rank: int
    plan: Plan
    estimate: Estimate
    lost_because: str | None = None
    flips: tuple[Flip, ...] = ()
    problems: tuple[Problem, ...] = ()
    simulated_s: float | None = None
    simulated_bytes: float | None = None  # what the simulated allocator reserves on the worst rank
    cost_per_million_tokens: float | None = None  # in the currency of the price given
    room: Room | None = None  # of the first plan, where memory is tight: what would give room


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStats:
    """What the search went through.

    `fitting` plans were not shown to need too much memory, `costed` of them had to be costed whole, as no bound ruled
    them out, and `simulated` were simulated.
    `bound_s` is a lower bound of the step over all legal plans that fit, `gap` how far the best found may be above the
    best there is, relative, by the objective. Both are about stages as the runtime splits them. Layers, recomputation,
    overlap and placement were decided together for the stages of the `filled` quickest pipelines, which can only be
    better; none of those can be better than found by more than `filled_gap`, relative.
    """

    candidates: int
    legal: int
    fitting: int
    costed: int
    pruned: dict[str, int]
    simulated: int
    seconds: float
    status: str
    objective: str
    bound_s: float
    gap: float
    filled: int = 0
    filled_gap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Plans best first, and the account of everything else."""

    model: Model
    cluster: Cluster
    workload: Workload
    runtime: Runtime
    framework: Framework
    search: SearchStats
    plans: tuple[RankedPlan, ...]
    rejected: dict[str, int]
    assumed: tuple[str, ...] = field(default=())
    by_gpus: tuple[CountRow, ...] = ()  # where several numbers of GPUs were compared


def suggest(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    framework: str | Framework = "torchtitan",
    objective: str = "time",
    top: int = 5,
    gpus: int | None = None,
    runtime: Runtime | None = None,
    profile: Any = None,
    bounds: Bounds | None = None,
    all_variants: bool = False,
    gpu_price_per_hour: float | None = None,
    simulate: bool = True,
    time_limit_s: float | None = None,
    grow: Callable[[int], Cluster] | None = None,
    progress: Callable[[str], None] | None = None,
) -> SearchResult:
    """Return the best plans of `framework` for one training step.

    `objective` is time (seconds a step), memory (bytes reserved on the worst rank) or pareto (the plans that no other
    beats in both, quickest first). On a given number of GPUs throughput (tokens/s/GPU) and cost (of a token) order plans
    as time does; they differ where numbers of GPUs are compared. The answer lists one plan per distinct grid unless
    `all_variants`. After `time_limit_s` the best so far is the answer, with its gap. `grow(n)` gives the cluster with n
    GPUs, for the advice on an infeasible question.

    Raises Infeasible (exit 3) when no plan is legal or none fits.
    """
    started = time.monotonic()
    if objective not in OBJECTIVES:
        raise UserError(f"unknown objective {objective!r}", remedy=f"one of {', '.join(OBJECTIVES)}")
    require_plannable(cluster)
    framework = framework_named(framework) if isinstance(framework, str) else framework
    runtime = runtime or default_runtime(framework)
    bounds = bounds or Bounds()
    nodes = enumerate_nodes(model, cluster, workload, framework, gpus=gpus, runtime=runtime, bounds=bounds)
    screening = Screening(model=model, cluster=cluster, workload=workload, runtime=runtime, profile=profile)
    if not len(nodes):
        from planner.infeasible import nothing_legal  # noqa: PLC0415 - only on this path

        raise nothing_legal(model, cluster, workload, framework, nodes, gpus=gpus)
    deadline = None if time_limit_s is None else started + time_limit_s
    nodes = with_sites(screening, nodes, framework, bounds.recomputes or framework.recomputes)
    explored = explore(
        screening,
        nodes,
        bounds.recomputes or framework.recomputes,
        objective=objective if objective in {"memory", "pareto"} else "time",
        keep=top,
        one_per_grid=not all_variants,
        deadline=deadline,
        progress=progress,
        nearly=NEAR_FIT if framework.lists_layers or framework.lists_recompute else 1.0,
    )
    filled = Filled()
    if objective not in {"memory", "pareto"} or not len(explored):
        filled = fill(
            screening,
            framework,
            nodes,
            explored,
            bounds.recomputes or framework.recomputes,
            top=top,
            deadline=deadline,
            progress=progress,
        )
    if not len(explored) and not filled.plans:
        from planner.infeasible import nothing_fits  # noqa: PLC0415 - only on this path

        raise nothing_fits(screening, framework, nodes, bounds, gpus=gpus, grow=grow)

    def judge(asked: Sequence[tuple[Cluster, Plan]]) -> list[Verdict]:
        machines, which = zip(*asked, strict=True)
        judged = cost_table(model, cluster, workload, which, runtime, profile, each_on=machines)
        value = judged.reserved_bytes if objective == "memory" else judged.step_s
        return [(float(v), bool(f)) for v, f in zip(value, judged.fits, strict=True)]

    plans = _listed(explored, filled, objective, cluster, top=top, all_variants=all_variants)
    table = cost_table(model, cluster, workload, plans, runtime, profile)
    finalists = [Finalist(plan=plan, estimate=table.estimate(i)) for i, plan in enumerate(plans)]
    if simulate and objective not in {"memory", "pareto"}:
        finalists = simulated_order(screening, finalists, within=CLOSED_FORM_ERROR, progress=progress)
    plans = [finalist.plan for finalist in finalists]
    best = finalists[0].estimate
    flips = find_flips(cluster, plans[0], plans[1:], judge)

    def problems_of(plan: Plan) -> tuple[Problem, ...]:
        return check(plan, model, cluster, workload, framework, runtime=runtime, gpus=gpus)

    room = more_room(
        plans[0],
        best,
        framework,
        lambda several: cost_table(model, cluster, workload, several, runtime, profile),
        lambda plan: is_legal(problems_of(plan)),
    )
    ranked = tuple(
        RankedPlan(
            rank=i + 1,
            plan=finalist.plan,
            estimate=finalist.estimate,
            lost_because=_reason(finalists[0], finalist, objective) if i else None,
            flips=(*flips[i - 1], *memory_flip(cluster, best, finalist.estimate)) if i else (),
            problems=problems_of(finalist.plan),
            simulated_s=finalist.simulated_s,
            simulated_bytes=finalist.simulated_bytes,
            cost_per_million_tokens=cost_per_million_tokens(finalist.estimate, gpu_price_per_hour),
            room=None if i else room,
        )
        for i, finalist in enumerate(finalists)
    )
    stats = _account(nodes, explored, filled, objective, finalists, seconds=time.monotonic() - started)
    rejected = {**nodes.rejected, "memory": explored.legal - explored.fitting}
    return SearchResult(
        model=model,
        cluster=cluster,
        workload=workload,
        runtime=runtime,
        framework=framework,
        search=stats,
        plans=ranked,
        rejected=dict(sorted(rejected.items(), key=lambda item: (-item[1], item[0]))),
    )


def _reason(best: Finalist, other: Finalist, objective: str) -> str:
    behind = None
    if best.fits_simulated() and not other.fits_simulated():
        needs, has = (other.simulated_bytes or 0.0) / GIB, other.estimate.memory.capacity_bytes / GIB
        return f"may not fit: its simulated allocator reserves {needs:.1f} of {has:.1f} GiB, as its memory fragments"
    if best.simulated_s is not None and other.simulated_s is not None:
        behind = other.simulated_s - best.simulated_s
    return lost_because(best.estimate, other.estimate, objective=objective, simulated_s=behind)


def _listed(
    explored: Explored,
    filled: Filled,
    objective: str,
    cluster: Cluster,
    *,
    top: int,
    all_variants: bool,
) -> list[Plan]:
    """Return the plans to list, best first by the closed form."""
    if objective == "pareto":
        rows = pareto_rows(explored.step_s, explored.reserved_bytes)
        return [plan_of_row(explored.columns, row, cluster) for row in rows] or [plan for plan, _ in filled.plans[:top]]
    values = explored.reserved_bytes if objective == "memory" else explored.step_s
    rows = ranked_rows(explored.columns, values, top=top, all_variants=all_variants)
    found = [(float(values[row]), plan_of_row(explored.columns, row, cluster)) for row in rows]
    if filled.plans:
        found = sorted([*found, *((step, plan) for plan, step in filled.plans)], key=lambda pair: pair[0])
    if not all_variants:
        first: dict[tuple[int, ...], tuple[float, Plan]] = {}
        for value, plan in found:
            first.setdefault(tuple(getattr(plan, axis) for axis in (*MESH_AXES, "ep")), (value, plan))
        found = list(first.values())
    return [plan for _, plan in found[:top]]


def _account(
    nodes: Nodes,
    explored: Explored,
    filled: Filled,
    objective: str,
    finalists: Sequence[Finalist],
    *,
    seconds: float,
) -> SearchStats:
    """Return what the search went through, and how much its answer may be off."""
    memory = objective == "memory"
    listed = min(finalist.estimate.step_s.value for finalist in finalists)
    status = "optimal within the model" if explored.complete else "best found within the time limit"
    if not len(explored):  # nothing fits but pipelines filled in another way, of which not all were tried
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
        filled=filled.solved,
        filled_gap=filled.gap,
    )


def default_runtime(framework: Framework) -> Runtime:
    """Return the runtime a framework's plans run in, at its defaults. Raises BadPlan if none is described."""
    from simulator.runtime_library import resolve  # noqa: PLC0415 - keeps `--help` light

    return resolve({"name": "pytorch" if framework.name == "any" else framework.name})[0]


def ranked_rows(table: PlanColumns, values: NDArray[np.float64], *, top: int, all_variants: bool) -> list[int]:
    """Return up to `top` rows, best value first; one per grid unless `all_variants`.

    Equal values go to the plan with fewer pipeline stages, then context, tensor and expert ranks, then shards, then
    smaller micro batches: the simpler plan. Enumeration order decides what is left.
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
