"""Search: bound every legal plan, cost those that could be best, simulate the finalists, and explain why the others
lost.

Branch and bound over the analytical model (`plan_space.branch_and_bound`) finds the plans to list and proves that no
other plan of the space (`plan_space.candidates`) beats them there. It is asked for plans that surely fit, and then for
all that may. Pipelines among them get layers and recompute modes by stage (`stages.assignment`). Every listed plan is
then simulated, and the list is sorted by the results (`finalists`). Ties go to the simpler plan, in a fixed order, so
that the same question has the same answer on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from planner.question.question import Question
from planner.search.deadline import NOT_EXPLAINED, NOT_SIMULATED, deadline_of, over
from planner.search.finalists import TIE, Finalist, counted_finalists, in_order, predict_all
from planner.search.fixes import find_fixes
from planner.search.flips import RateFlips, find_flips, memory_flip
from planner.search.gpu_counts import cost_per_million_tokens
from planner.search.infeasible import no_fitting_plan, no_legal_plan, nothing_fits
from planner.search.legal_ways import contradiction, legal_ways
from planner.search.plan_space.branch_and_bound import BestFirst, Explored, pareto_rows
from planner.search.plan_space.candidates import Bounds, Nodes, enumerate_nodes
from planner.search.plan_space.collected import ListedTies
from planner.search.plan_space.judged import explore, plan_of_row
from planner.search.plan_space.overlap_choice import with_overlap_by_site
from planner.search.plan_space.screened import Screened
from planner.search.reasons import faster_unsure, why_it_lost
from planner.search.result import PRELIMINARY, OtherBatch, RankedPlan, SearchResult
from planner.search.stages.assignment import (
    AT_ONCE,
    MAX_SOLVED,
    NEAR_FIT,
    AssignedPipelines,
    KnownPipelines,
    assign_stages,
)
from planner.search.stats import Found, search_stats
from planner.search.tie_groups import PER_TIE_GROUP, TIE_GROUP_MARGIN, one_of_tie_group, rank_rows
from simulator.bounds.screening import Screening
from simulator.config.estimate import LEVELS, RATHER_SURE, SLIGHT, SURE
from simulator.config.plan import MESH_AXES, Plan
from simulator.legality.frameworks import Framework
from simulator.memory.plan_memory import Replays
from topology.cluster import Cluster
from topology.errors import PlannerError, Unproved, UserError
from topology.time_limit import limited

OBJECTIVES = ("time", "throughput", "memory", "cost", "pareto")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How to search, and which plans to list.

    `objective` is time (seconds per step), memory (bytes reserved on the worst rank) or pareto (the plans that no other
    beats in both, fastest first). On one GPU count, throughput (tokens/s/GPU) and cost (per token) order plans as time
    does; they differ if GPU counts are compared. The result lists `top` plans, one per set of parallel degrees unless
    `all_variants`. After `time_limit_s` it has the best plans so far, and their gap. Without `reasons` the result does
    not explain why plans lost or what would change the answer, and hardly why none fits; `explained` adds that. Without
    `flips` it has no flip points.
    """

    objective: str = "time"
    top: int = 5
    bounds: Bounds = field(default_factory=Bounds)
    all_variants: bool = False
    gpu_price_per_hour: float | None = None
    simulate: bool = True
    time_limit_s: float | None = None
    reasons: bool = True
    flips: bool = True


SCREENING = 0.6  # share of a time limit for screening memory, since plans that fit must be bounded and costed as well
LEVEL = 0.5  # share of the time left for stages at a level of certainty at which no plan fits with the runtime's


def suggest(
    question: Question,
    options: SearchOptions | None = None,
    *,
    grow: Callable[[int], Cluster] | None = None,
    progress: Callable[[str], None] | None = None,
    early: Callable[[SearchResult], None] | None = None,
) -> SearchResult:
    """Return the best plans for one training step.

    `grow(n)` returns the cluster with n GPUs, for advice on an infeasible question. `early` receives preliminary
    results: the plans of the analytical model, with the status PRELIMINARY, before their allocations are replayed; and
    the simulated plans before their reasons are known. Raises Infeasible (exit 3) when no plan is legal or none fits.
    """
    options = options or SearchOptions()
    by_time = options.objective not in {"memory", "pareto"}
    started, deadline = time.monotonic(), deadline_of(options.time_limit_s)
    if options.objective not in OBJECTIVES:
        raise UserError(f"unknown objective {options.objective!r}", remedy=f"one of {', '.join(OBJECTIVES)}")
    nodes = enumerate_nodes(question, bounds=options.bounds)

    def result(
        found: Found, finalists: list[Finalist], *, reasons: bool, assumed: tuple[str, ...] = ()
    ) -> SearchResult:
        listed = in_order(finalists[: len(found.plans)], options.objective)
        rejected = {**nodes.rejected, "memory": found.everything.legal - found.everything.fitting}
        return SearchResult(
            question=question,
            search=search_stats(nodes, found, options.objective, listed, seconds=time.monotonic() - started),
            plans=_rank(question, listed, options, reasons=reasons and options.flips),
            rejected=dict(sorted(rejected.items(), key=lambda item: (-item[1], item[0]))),
            assumed=assumed,
            likely=faster_unsure(listed, finalists) if by_time else (),
            other_batch=batch_that_divides(listed[0]) if reasons and by_time and "global-batch" in rejected else None,
        )

    def batch_that_divides(best: Finalist) -> OtherBatch | None:
        from planner.search.other_batch import other_batch  # noqa: PLC0415 - most batches divide

        return other_batch(question, options.bounds, best, deadline)

    def preliminary(explored: Explored) -> SearchResult:
        plans = _listed_plans(explored, AssignedPipelines(), options, question.cluster)
        table = question.estimate(plans)
        finalists = [Finalist(plan=plan, estimate=table.estimate(i)) for i, plan in enumerate(table.plans)]
        found = Found(plans=plans, may_fit=[], everything=explored, asked=explored, assigned=AssignedPipelines())
        first = result(found, finalists, reasons=False)
        return replace(first, search=replace(first.search, status=PRELIMINARY))

    if not len(nodes):

        def ways() -> list[str]:
            return legal_ways(question, options.bounds, grow, deadline) if options.reasons else []

        raise contradiction(question, options.bounds, nodes, ways) or no_legal_plan(question, nodes, ways(), deadline)
    screening = Screening(question)
    replays = Replays(question)
    tell_first = None if early is None or over(deadline) else _once(lambda first: early(preliminary(first)))
    found = _explore(screening, question.framework, nodes, options, replays, deadline, progress, tell_first)
    if not found.plans:
        raise _no_plan(question, nodes, options, found, grow=grow, deadline=deadline)
    with limited(None):
        free = by_time and "fsdp_exchange" not in options.bounds.stated
        finalists = counted_finalists(question, found.plans, found.may_fit, replays, exchanges=free)
    simulated: list[Finalist] | None = finalists
    if options.simulate:
        try:
            simulated = predict_all(question, finalists, replays, progress, deadline=deadline)
        except Unproved:
            simulated = None
    if simulated is not None and not over(deadline):
        if early is not None and options.reasons and options.flips:
            early(result(found, simulated, reasons=False))
        with suppress(Unproved):
            return result(found, simulated, reasons=options.reasons)
    left_out = NOT_SIMULATED if simulated is None else NOT_EXPLAINED
    with limited(None):
        return result(found, simulated or finalists, reasons=False, assumed=(left_out,))


def _once(tell: Callable[[Explored], None]) -> Callable[[Explored], None]:
    """Return a function that reports the first plans found, and none afterwards."""
    shown: list[Explored] = []

    def first(explored: Explored) -> None:
        if len(explored) and not shown:
            shown.append(explored)
            tell(explored)

    return first


def _no_plan(
    question: Question,
    nodes: Nodes,
    options: SearchOptions,
    found: Found,
    *,
    grow: Callable[[int], Cluster] | None,
    deadline: float | None,
) -> PlannerError:
    """Return the error for no plan to list: none fits, or not all pipelines with other stages than the runtime's were
    tried.
    """
    if over(deadline) and len(found.everything.near_pipelines):
        return Unproved(
            "the time limit ended before a plan was found that fits",
            why="no plan fits as it is; pipelines that could with other layers on their stages were not all tried",
            remedy="a longer --time-limit",
        )
    if options.reasons:
        with suppress(Unproved):
            return no_fitting_plan(question, nodes, options.bounds, grow=grow, deadline=deadline)
    with limited(None):
        return nothing_fits(question, nodes, options.bounds)


def explained(result: SearchResult, options: SearchOptions) -> SearchResult:
    """Return the result of a search without reasons, with reasons added."""
    listed = [Finalist(plan=one.plan, estimate=one.estimate, method=one.method, tie=one.tie) for one in result.plans]
    return replace(result, plans=_rank(result.question, listed, options, reasons=True))


def _explore(
    screening: Screening,
    framework: Framework,
    nodes: Nodes,
    options: SearchOptions,
    replays: Replays,
    deadline: float | None,
    progress: Callable[[str], None] | None,
    tell_first: Callable[[Explored], None] | None,
) -> Found:
    """Return the plans to list: by time those that surely fit, then those that may fit; by memory any that fit.

    `tell_first` receives the first that are costed.
    """
    objective, recomputes = options.objective, options.bounds.words("recompute") or framework.recomputes
    cluster = screening.scenario.cluster
    nodes = with_overlap_by_site(screening, nodes, framework, recomputes)  # the account of nodes is the same

    lists = framework.lists_layers or framework.lists_recompute
    until = None if deadline is None else deadline - (1 - SCREENING) * (options.time_limit_s or 0.0)
    screened = Screened(
        screening, nodes, recomputes, nearly=NEAR_FIT if lists else 1.0, deadline=until, progress=progress
    )
    known, every = KnownPipelines(framework, nodes, screened.shared, recomputes), screening

    def ask(
        screening: Screening, *, keep: int, stages: bool, sure: Sequence[Plan] = ()
    ) -> tuple[Explored, AssignedPipelines]:
        ties = ListedTies(count=keep, tie=TIE, margin=TIE_GROUP_MARGIN)
        search = BestFirst(
            screening,
            screened,
            objective=objective if objective in {"memory", "pareto"} else "time",
            keep=keep * (1 if options.all_variants or objective == "memory" else PER_TIE_GROUP),
            ties=None if sure or options.all_variants or objective in {"memory", "pareto"} else ties,
            one_per_grid=not options.all_variants,
            deadline=deadline,
            progress=progress,
            nearly=NEAR_FIT if stages and lists else 1.0,
            nearest=None if framework.lists_recompute else AT_ONCE,  # otherwise they were ordered by another mode
        )

        def listed(explored: Explored) -> list[int]:
            if objective == "pareto":
                return _rows(explored, options)
            rows = {plan_of_row(explored.columns, row, cluster): row for row in _rows(explored, options)}
            plans = _listed_plans(explored, AssignedPipelines(), options, cluster)
            added = [plan for plan in _one_per_grid([*sure, *plans], options)[: options.top] if plan not in sure]
            return [rows[plan] for plan in dict.fromkeys([*added, *plans[: 1 if sure else 0]])]

        explored = explore(search, replays, listed, tell_first)
        # Plans that are too unsure for this search are not shown to need too much.
        explored = replace(explored, fitting=int(screened.bounds.may_fit(every).sum()))
        if not stages or (len(explored) and objective in {"memory", "pareto"}):
            return explored, AssignedPipelines()
        if over(deadline) and (len(explored) or not len(explored.near_pipelines)):
            return explored, AssignedPipelines(left_s=explored.least_near_s)
        end = deadline
        if deadline is not None and screening.sure and not len(explored):  # there may be plans that are less sure
            end = time.monotonic() + LEVEL * (deadline - time.monotonic())
        try:
            asked = (screening, framework, explored, recomputes)
            assigned = assign_stages(*asked, top=keep, replays=replays, known=known, deadline=end, progress=progress)
        except Unproved:
            assigned = AssignedPipelines(left_s=explored.least_near_s)
        return explored, assigned

    if objective in {"memory", "pareto"}:
        everything, assigned = ask(screening, keep=options.top, stages=True)
        plans = _listed_plans(everything, assigned, options, cluster)
        return Found(plans=plans, may_fit=[], everything=everything, asked=everything, assigned=assigned)

    any_fits = bool(screened.bounds.may_fit(screening).any())
    return _surely_first(ask, screening, options, cluster, any_fits=any_fits)


def _surely_first(
    ask: Callable[..., tuple[Explored, AssignedPipelines]],
    screening: Screening,
    options: SearchOptions,
    cluster: Cluster,
    *,
    any_fits: bool,
) -> Found:
    """Return the plans to list by time: those that surely fit, else the likeliest level of which there are any; then
    others that may fit. `any_fits`: whether any may with the stages that the runtime makes.
    """
    if not any_fits:  # with the runtime's stages; what fits with no others either is not asked level by level
        asked, assigned = ask(screening, keep=options.top, stages=True)
        if not _listed_plans(asked, assigned, options, cluster) and assigned.solved < MAX_SOLVED:
            return Found(plans=[], may_fit=[], everything=asked, asked=asked, assigned=assigned)
    asked, assigned = ask(replace(screening, sure=SURE), keep=options.top, stages=True)
    sure = _listed_plans(asked, assigned, options, cluster)
    certain, all_tried = bool(sure), assigned.left_s == np.inf
    with suppress(Unproved):
        for level in LEVELS[1:] if not certain else ():
            asked, assigned = ask(replace(screening, sure=level), keep=options.top, stages=True)
            if sure := _listed_plans(asked, assigned, options, cluster):
                asked = replace(asked, complete=asked.complete and all_tried)
                break
            all_tried &= assigned.left_s == np.inf
    more_to_list = options.top - len(sure)
    everything, more = asked, AssignedPipelines()
    # Besides a full list only faster plans that may well fit are mentioned, and only if its first surely fits.
    if certain or more_to_list:
        likely = replace(screening, sure=screening.sure if more_to_list else SLIGHT)
        try:
            everything, more = ask(likely, keep=more_to_list or 1, stages=more_to_list > 0, sure=sure)
        except Unproved:
            if not sure:
                raise
    others = _listed_plans(everything, more, options, cluster) if everything is not asked else []
    rather_sure: list[Plan] = []
    if certain:
        with suppress(Unproved):
            likelier, _ = ask(replace(screening, sure=RATHER_SURE), keep=1, stages=False, sure=sure)
            rather_sure = _listed_plans(likelier, AssignedPipelines(), options, cluster)
    plans = _one_per_grid([*sure, *others], options)[: options.top]
    may_fit = [plan for plan in dict.fromkeys([*others[:1], *rather_sure[:1]]) if plan not in plans]
    if not sure:
        asked, assigned = replace(everything, complete=everything.complete and all_tried), more
    return Found(plans=plans, may_fit=may_fit, everything=everything, asked=asked, assigned=assigned)


def _one_per_grid(plans: Sequence[Plan], options: SearchOptions) -> list[Plan]:
    """Return the first plan of each set of degrees; all plans, once, where variants are asked for."""
    first: dict[object, Plan] = {}
    for plan in plans:
        first.setdefault(
            plan if options.all_variants else tuple(getattr(plan, axis) for axis in (*MESH_AXES, "ep", "etp")), plan
        )
    return list(first.values())


def _rank(
    question: Question, finalists: Sequence[Finalist], options: SearchOptions, *, reasons: bool
) -> tuple[RankedPlan, ...]:
    """Return the finalists as listed plans: why each lost, its problems and its cost; with `reasons`, which need
    further searches, also when it would win and changes that would make the best one fit.
    """
    best, others = finalists[0], finalists[1:]
    flips = [RateFlips()] * len(others)
    if reasons and options.objective not in {"memory", "pareto"}:
        flips = find_flips(question, best, others)
    fixes = find_fixes(question, best.plan, best.estimate) if reasons else ()
    return tuple(
        RankedPlan(
            rank=i + 1,
            plan=finalist.plan,
            estimate=finalist.estimate,
            method=finalist.method,
            tie=finalist.tie,
            fit_probability=finalist.estimate.memory.fit_probability,
            lost_because=why_it_lost(best, finalist, options.objective) if i else None,
            flips=(*flips[i - 1].points, *memory_flip(question.cluster, best, finalist)) if i else (),
            rate_curves=flips[i - 1].curves if i else (),
            problems=question.problems(finalist.plan),
            cost_per_million_tokens=cost_per_million_tokens(finalist.estimate, options.gpu_price_per_hour),
            fixes=() if i else fixes,
        )
        for i, finalist in enumerate(finalists)
    )


def _listed_plans(
    explored: Explored, assigned: AssignedPipelines, options: SearchOptions, cluster: Cluster
) -> list[Plan]:
    """Return the plans to list, best first by the analytical model."""
    top = options.top
    if options.objective == "pareto":
        front = [plan_of_row(explored.columns, row, cluster) for row in _rows(explored, options)]
        return front or [plan for plan, _ in assigned.plans[:top]]
    values = _values(explored, options)
    found = [(float(values[row]), plan_of_row(explored.columns, row, cluster)) for row in _rows(explored, options)]
    if assigned.plans:
        found = sorted([*found, *((step, plan) for plan, step in assigned.plans)], key=lambda pair: pair[0])
    if options.all_variants or options.objective == "memory":
        return _one_per_grid([plan for _, plan in found], options)[:top]
    kept = one_of_tie_group(found)
    others = [plan for plan in _one_per_grid([plan for _, plan in found], options) if plan not in kept]
    return [*kept, *others][:top]


def _values(explored: Explored, options: SearchOptions) -> NDArray[np.float64]:
    return explored.reserved_bytes if options.objective == "memory" else explored.step_s


def _rows(explored: Explored, options: SearchOptions) -> list[int]:
    """Return the rows that contain the plans to list, best first by the analytical model."""
    if options.objective == "pareto":
        return pareto_rows(explored.step_s, explored.reserved_bytes)
    values, top = _values(explored, options), options.top * PER_TIE_GROUP
    return rank_rows(explored.columns, values, top=top, all_variants=options.all_variants)
