"""The search: cost every legal plan with the closed form, keep the feasible ones, and say why the others lost.
from simulator.plan_columns import PlanColumns

Exhaustive within the bounds of `planner.candidates`, so the answer is optimal *within the closed form*: the gap is
zero, and what the closed form does not know is the estimate's own interval. Ties go to the simpler plan, in a fixed
order, so that the same question has the same answer on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.candidates import Bounds, Candidates, enumerate_candidates
from planner.costs import cost_table
from planner.flips import Flip, Verdict, find_flips, lost_because, memory_flip
from planner.frameworks import Framework, framework_named
from planner.legality import Problem, check
from simulator.estimate import Estimate
from simulator.model import Model
from simulator.plan import MESH_AXES, Plan
from simulator.plan_columns import PlanColumns
from simulator.runtime import Runtime
from simulator.workload import Workload
from topology.cluster import Cluster, LinkKind
from topology.errors import UserError

CHUNK = 4096  # plans per call of the closed form: bounds its memory, and gives progress something to say
OBJECTIVES = ("time", "throughput", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan of the answer. `lost_because` is empty for the first."""

    rank: int
    plan: Plan
    estimate: Estimate
    lost_because: str | None = None
    flips: tuple[Flip, ...] = ()
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStats:
    """What the search went through. `bound_s` is a lower bound on the best objective among all plans considered."""

    candidates: int
    legal: int
    fitting: int
    pruned: dict[str, int]
    simulated: int
    seconds: float
    status: str
    objective: str
    bound_s: float
    gap: float


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the closed form says of every candidate: seconds, bytes, and whether it fits."""

    step_s: NDArray[np.float64]
    reserved_bytes: NDArray[np.float64]
    fits: NDArray[np.bool_]


def suggest(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    framework: str | Framework = "torchtitan",
    objective: str = "time",
    top: int = 5,
    gpus: int | None = None,
    seed: int = 0,
    runtime: Runtime | None = None,
    profile: Any = None,
    bounds: Bounds | None = None,
    all_variants: bool = False,
    grow: Callable[[int], Cluster] | None = None,
    progress: Callable[[str], None] | None = None,
) -> SearchResult:
    """Return the best plans of `framework` for one training step.

    `objective` is time (seconds a step), throughput (tokens/s/GPU) or memory (bytes reserved on the worst rank). The
    answer lists one plan per distinct grid unless `all_variants`. `grow(n)` gives the cluster with n GPUs, for the
    advice on an infeasible question. The search has no randomness; `seed` is kept for searches that do.

    Raises Infeasible (exit 3) when no plan is legal or none fits.
    """
    del seed  # exhaustive and deterministic
    started = time.monotonic()
    if objective not in OBJECTIVES:
        raise UserError(f"unknown objective {objective!r}", remedy=f"one of {', '.join(OBJECTIVES)}")
    framework = framework_named(framework) if isinstance(framework, str) else framework
    runtime = runtime or default_runtime(framework)
    found = enumerate_candidates(model, cluster, workload, framework, gpus=gpus, runtime=runtime, bounds=bounds)
    if not len(found):
        from planner.infeasible import nothing_legal  # noqa: PLC0415 - only on this path

        raise nothing_legal(model, cluster, workload, framework, found, gpus=gpus)
    costs = evaluate(found, model, cluster, workload, runtime, profile=profile, progress=progress)
    if not costs.fits.any():
        from planner.infeasible import nothing_fits  # noqa: PLC0415 - only on this path

        raise nothing_fits(
            model, cluster, workload, framework, runtime, found, costs, profile=profile, gpus=gpus, grow=grow
        )

    values = costs.reserved_bytes if objective == "memory" else costs.step_s
    rows = ranked_rows(found.columns, values, costs.fits, top=top, all_variants=all_variants)
    plans = [_placed(found.columns.plan(row), cluster) for row in rows]
    table = cost_table(model, cluster, workload, plans, runtime, profile)
    estimates = [table.estimate(i) for i in range(len(plans))]

    def judge(changed: Cluster, which: Sequence[Plan]) -> list[Verdict]:
        judged = cost_table(model, changed, workload, which, runtime, profile)
        value = judged.reserved_bytes if objective == "memory" else judged.step_s
        return [(float(v), bool(f)) for v, f in zip(value, judged.fits, strict=True)]

    flips = find_flips(cluster, plans[0], plans[1:], judge)
    ranked = tuple(
        RankedPlan(
            rank=i + 1,
            plan=plan,
            estimate=estimate,
            lost_because=lost_because(estimates[0], estimate, objective=objective) if i else None,
            flips=(*flips[i - 1], *memory_flip(cluster, estimates[0], estimate)) if i else (),
            problems=check(plan, model, cluster, workload, framework, runtime=runtime, gpus=gpus),
        )
        for i, (plan, estimate) in enumerate(zip(plans, estimates, strict=True))
    )
    stats = SearchStats(
        candidates=found.total,
        legal=len(found),
        fitting=int(costs.fits.sum()),
        pruned=found.pruned,
        simulated=0,
        seconds=time.monotonic() - started,
        status="optimal within the closed form",
        objective=objective,
        bound_s=float(costs.step_s[costs.fits].min()),
        gap=0.0,
    )
    rejected = {**found.rejected, "memory": int((~costs.fits).sum())}
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


def default_runtime(framework: Framework) -> Runtime:
    """Return the runtime a framework's plans run in, at its defaults. Raises BadPlan if none is described."""
    from simulator.runtime_library import resolve  # noqa: PLC0415 - keeps `--help` light

    return resolve({"name": "pytorch" if framework.name == "any" else framework.name})[0]


def evaluate(
    found: Candidates,
    model: Model,
    cluster: Cluster,
    workload: Workload,
    runtime: Runtime,
    *,
    profile: Any = None,
    progress: Callable[[str], None] | None = None,
) -> Costs:
    """Return the closed form's verdict on every candidate, in chunks."""
    step, reserved, fits = [], [], []
    for start in range(0, len(found), CHUNK):
        table = cost_table(model, cluster, workload, found.plans(start, start + CHUNK), runtime, profile)
        step.append(np.asarray(table.step_s, dtype=np.float64))
        reserved.append(np.asarray(table.reserved_bytes, dtype=np.float64))
        fits.append(np.asarray(table.fits, dtype=np.bool_))
        if progress and len(found) > CHUNK:
            progress(f"costed {min(start + CHUNK, len(found)):,} of {len(found):,} legal plans")
    return Costs(
        step_s=np.concatenate(step), reserved_bytes=np.concatenate(reserved), fits=np.concatenate(fits).astype(np.bool_)
    )


def ranked_rows(
    table: PlanColumns, values: NDArray[np.float64], fits: NDArray[np.bool_], *, top: int, all_variants: bool
) -> list[int]:
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
        np.where(fits, values, np.inf),
    )
    rows: list[int] = []
    seen: set[tuple[int, ...]] = set()
    for candidate in np.lexsort(keys):
        row = int(candidate)
        if len(rows) >= top or not fits[row]:
            break
        grid = tuple(int(getattr(table, axis)[row]) for axis in (*MESH_AXES, "ep"))
        if all_variants or grid not in seen:
            rows.append(row)
            seen.add(grid)
    return rows


def _placed(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan with ranks placed on GPUs, where the node is irregular enough for that to matter."""
    if not irregular(cluster) or plan.gpus == 1:
        return plan
    from topology.placement import place  # noqa: PLC0415 - only irregular machines need it

    axes = {axis: int(getattr(plan, axis)) for axis in MESH_AXES if getattr(plan, axis) > 1}
    return replace(plan, placement=tuple(place(cluster, axes)))


def irregular(cluster: Cluster) -> bool:
    """Return whether it matters which GPUs of a node talk.

    It does without a switch between pairs of different classes, and where some GPUs are off the switch.
    """
    from topology.node_rates import node_rates  # noqa: PLC0415 - keeps the module light

    for position, group in enumerate(cluster.groups):
        node = group.node
        if len(node_rates(cluster, position).on_fabric) < len(node.gpus):
            return True
        switched = any(link.kind is LinkKind.NVSWITCH for link in node.links)
        if not switched and len(set(node.pairs.values())) > 1:
            return True
    return False
