"""Explain a plan: where its step and memory go, why other plans lost, and what would change the answer.

Data for the command and the explorer. The flip points of the answer, if requested, are found by searching again on a
changed cluster, not by comparing two plans: below this bandwidth, or with this much memory, the *best plan* is another.
Both plans are then predicted for that cluster, and flip points that the predictions do not confirm are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from planner.explain.traffic import Traffic, traffic_of
from planner.explain.waterfall import Difference, MemoryRow, Waterfall, difference, memory_rows, waterfall
from planner.question.prediction import predict
from planner.question.question import Question
from planner.search.finalists import Finalist, in_order
from planner.search.fixes import Fix, find_fixes
from planner.search.flips import FlipPoint, Knob, knobs_of
from planner.search.plan_space.candidates import Bounds, enumerate_nodes
from planner.search.plan_space.judged import fastest_fitting
from planner.search.plan_space.overlap_choice import with_overlap_by_site
from planner.search.plan_space.screened import Screened
from planner.search.plan_space.stated import exactly
from planner.search.reasons import lost_because
from planner.search.result import SearchResult
from simulator.analytical.estimates import EstimateTable
from simulator.bounds.screening import Screening
from simulator.config.estimate import Estimate, MemoryEstimate
from simulator.config.overlap_sites import NONE, SITES, modes_by_site, written
from simulator.config.plan import MESH_AXES, Plan
from simulator.memory.plan_memory import Replays
from topology.cluster import Cluster
from topology.errors import PlannerError, Unproved, UserError
from topology.rates.scaling import scale_memory, with_gpus

# The categories in an estimate of model state (NVIDIA/Megatron-LM#525), which leaves out everything else.
STATE = frozenset({"parameters", "gradients", "optimizer"})
FACTORS = (0.25, 0.5, 2.0, 4.0)  # factors of a rate or memory size for which the search is repeated
BISECTIONS = 4  # bisections of the interval of factors, down to 2^(1/16), 4.4 %
OUTSIDE_LAYERS = "embedding and head"


@dataclass(frozen=True, slots=True, kw_only=True)
class LosingPlan:
    """A plan that lost: the reason in one line, its terms compared with the best plan, and its flip points."""

    plan: Plan
    estimate: Estimate
    lost_because: str
    terms: tuple[Difference, ...]
    flips: tuple[FlipPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFlip:
    """When `quantity`, at present `now`, passes `at`, the best plan has other degrees: `becomes`."""

    quantity: str
    now: float
    at: float
    unit: str
    wins: str  # below or above
    becomes: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccount:
    """Bytes by stage and category, the fullest stage, and the bytes there that an estimate of model state
    leaves out.
    """

    rows: tuple[MemoryRow, ...]
    worst_stage: int
    worst_rank: int
    state_bytes: float  # parameters, gradients and optimizer of the fullest stage
    omitted: tuple[tuple[str, float], ...]  # all other categories of that stage, largest first
    allocated_bytes: float
    reserved_bytes: float
    capacity_bytes: float
    observed_bytes: float | None = None
    host_bytes: float = 0.0  # of state that is kept in host memory
    paged: MemoryEstimate | None = None  # where an optimizer's states are paged


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explanation of one plan. `behind_s` is how many seconds it is slower than the best plan; None if `none_fits`
    says why there is none.
    """

    plan: Plan
    estimate: Estimate
    waterfall: Waterfall
    memory: MemoryAccount
    behind_s: float | None = None
    none_fits: str = ""
    runners: tuple[LosingPlan, ...] = ()
    flips: tuple[AnswerFlip, ...] = ()
    rejected: dict[str, int] = field(default_factory=dict)
    pruned: dict[str, int] = field(default_factory=dict)
    overlap: tuple[SiteOverlap, ...] = ()  # what the overlap mode of each tensor-parallel communication hides
    traffic: Traffic | None = None  # None if the plan is not legal, or the time limit ended before
    fixes: tuple[Fix, ...] = ()  # for a plan that may not fit: changes that make it fit, cheapest first


def memory_account(estimate: Estimate, observed_bytes: float | None = None) -> MemoryAccount:
    """Return the memory of a plan by stage; `observed_bytes` is a measured peak to compare with."""
    memory = estimate.memory
    reserved = memory.reserved_by_stage or (memory.reserved_bytes,)
    worst = max(range(len(reserved)), key=lambda stage: (reserved[stage], -stage))
    by_category = memory.by_stage[worst] if memory.by_stage else memory.by_category
    others = sorted(
        ((k, v) for k, v in by_category.items() if k not in STATE and v > 0), key=lambda pair: (-pair[1], pair[0])
    )
    return MemoryAccount(
        rows=memory_rows(estimate),
        worst_stage=worst,
        worst_rank=memory.worst_rank,
        state_bytes=sum(nbytes for name, nbytes in by_category.items() if name in STATE),
        omitted=tuple(others),
        allocated_bytes=memory.peak_bytes.value,
        reserved_bytes=memory.reserved_bytes,
        capacity_bytes=memory.capacity_bytes,
        observed_bytes=observed_bytes,
        host_bytes=memory.host_bytes,
        paged=memory if memory.paging_s else None,
    )


def explain(
    plan: Plan,
    result: SearchResult,
    *,
    observed_bytes: float | None = None,
    with_flips: bool = False,
    grow: Callable[[int], Cluster] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """Explain `plan`, the best plan of `result` or another plan for the same question.

    `with_flips` repeats the search dozens of times. `grow(n)` returns the cluster with n GPUs.
    """
    question, first = result.question, result.plans[0]
    chosen = next((ranked for ranked in result.plans if ranked.plan == plan), None)
    estimate = chosen.estimate if chosen else predict(question, plan).estimate
    runners = tuple(
        LosingPlan(
            plan=other.plan,
            estimate=other.estimate,
            lost_because=(other.lost_because if chosen is first else None) or lost_because(estimate, other.estimate),
            terms=difference(estimate, other.estimate),
            flips=other.flips if chosen is first else (),
        )
        for other in result.plans
        if other is not chosen
    )
    own_question = replace(question, gpus=first.plan.gpus)
    fixes = first.fixes if chosen is first else find_fixes(replace(question, gpus=plan.gpus), plan, estimate)
    return replace(
        _of_plan(question, plan, estimate, fixes, observed_bytes, cut_short=result.cut_short),
        behind_s=0.0 if chosen is first else estimate.step_s.value - first.estimate.step_s.value,
        runners=runners,
        flips=tuple(answer_flips(own_question, grow, progress)) if with_flips else (),
        rejected=result.rejected,
        pruned=result.search.pruned,
    )


def explain_alone(question: Question, plan: Plan, none_fits: str, observed_bytes: float | None = None) -> Explanation:
    """Explain a plan for a question without a plan that fits; `none_fits` says why."""
    estimate = predict(question, plan).estimate
    fixes = find_fixes(question, plan, estimate)
    return replace(_of_plan(question, plan, estimate, fixes, observed_bytes), none_fits=none_fits)


def _of_plan(
    question: Question,
    plan: Plan,
    estimate: Estimate,
    fixes: tuple[Fix, ...],
    observed_bytes: float | None,
    *,
    cut_short: bool = False,
) -> Explanation:
    """Return what there is to say of a plan by itself."""
    overlap: tuple[SiteOverlap, ...] = ()
    traffic: Traffic | None = None
    with suppress(Unproved):  # after the deadline, the explanation has neither
        if not cut_short:
            overlap = overlap_by_site(plan, question.estimate)
            traffic = traffic_of(replace(question, gpus=plan.gpus), plan, estimate)
    return Explanation(
        plan=plan,
        estimate=estimate,
        waterfall=waterfall(estimate),
        memory=memory_account(estimate, observed_bytes),
        overlap=overlap,
        traffic=traffic,
        fixes=fixes,
    )


# --- searching again --------------------------------------------------------------------------------------------------


def best_plan(question: Question, bounds: Bounds | None = None) -> Plan | None:
    """Return the fastest plan that surely fits, else the fastest that may, by the analytical model; None if there is
    none.
    """
    try:
        nodes = enumerate_nodes(question, bounds=bounds)
    except UserError:
        return None
    if not len(nodes):
        return None
    recomputes = question.framework.recomputes
    screening = Screening(question)
    nodes = with_overlap_by_site(screening, nodes, question.framework, recomputes)
    return fastest_fitting(Screened(screening, nodes, recomputes), Replays(question))


def flip_is_confirmed(question: Question, now: Plan, becomes: Plan) -> bool:
    """Return whether `becomes` is listed before `now` when both are predicted for `question`; a plan that does not run
    is not listed.
    """
    try:
        found = [
            Finalist(plan=plan, estimate=predict(question, plan).estimate) if question.legal(plan) else None
            for plan in (now, becomes)
        ]
    except PlannerError:
        return False
    mine, theirs = found
    if theirs is None or mine is None:
        return theirs is not None
    return in_order([mine, theirs], "time")[0].plan == becomes


def degrees(plan: Plan | None) -> tuple[int, ...]:
    """Return the parallel degrees of a plan, by which answers are compared."""
    return () if plan is None else (*(int(getattr(plan, axis)) for axis in (*MESH_AXES, "ep")), plan.etp or 0)


def answer_flips(
    question: Question, grow: Callable[[int], Cluster] | None = None, progress: Callable[[str], None] | None = None
) -> Iterator[AnswerFlip]:
    """Yield the link rates, memory sizes, micro batches and GPU counts past which the best plan has other degrees.

    Rates and memory are tried within a factor of four, half and twice the micro batch, and half and twice the GPUs with
    the same global batch.
    """
    now = best_plan(question)
    memory = Knob(quantity="memory per GPU", unit="bytes", now=lambda c: float(c.gpu_memory_bytes), scale=scale_memory)
    for knob in (*knobs_of(question.cluster), memory):
        value = knob.now(question.cluster)
        for direction in (FACTORS[1::-1], FACTORS[2:]):
            yield from _flip_in_direction(question, knob, value, now, direction, progress)
    if now is None:
        return
    for size in (now.micro_batch_size // 2, now.micro_batch_size * 2):
        other = best_plan(question, Bounds(stated={"micro_batch_size": exactly(size)})) if size else None
        if other is not None and degrees(other) != degrees(now):  # another question, so there is nothing to compare
            yield _flip("micro batch", now.micro_batch_size, size, "sequences", other)
    for count in (question.count // 2, question.count * 2):
        try:
            cluster = grow(count) if grow else with_gpus(question.cluster, count)
        except (UserError, ValueError, ZeroDivisionError):
            continue  # the cluster does not exist in this size
        other = best_plan(replace(question, cluster=cluster, gpus=count))
        if other is not None and degrees(replace(other, dp_shard=1, dp_replicate=1)) != degrees(
            replace(now, dp_shard=1, dp_replicate=1)
        ):
            yield _flip("GPUs", question.count, count, "GPUs", other)


def _flip_in_direction(
    question: Question,
    knob: Knob,
    value: float,
    now: Plan | None,
    factors: Sequence[float],
    progress: Callable[[str], None] | None,
) -> Iterator[AnswerFlip]:
    """Yield the flip point nearest to the present value in one direction, if there is one."""
    unchanged_factor = 1.0
    for factor in factors:
        if progress:
            progress(f"searching with {factor:g} times the {knob.quantity}")
        found = best_plan(replace(question, cluster=knob.scale(question.cluster, factor)))
        if degrees(found) == degrees(now):
            unchanged_factor = factor
            continue
        for _ in range(BISECTIONS):
            middle = (unchanged_factor * factor) ** 0.5
            middle_plan = best_plan(replace(question, cluster=knob.scale(question.cluster, middle)))
            if degrees(middle_plan) == degrees(now):
                unchanged_factor = middle
            else:
                factor, found = middle, middle_plan  # noqa: PLW2901 - the bracket closes
        there = replace(question, cluster=knob.scale(question.cluster, factor))
        if found is not None and (now is None or flip_is_confirmed(there, now, found)):
            yield _flip(knob.quantity, value, value * factor, knob.unit, found)
        return


def _flip(quantity: str, now: float, at: float, unit: str, becomes: Plan) -> AnswerFlip:
    return AnswerFlip(
        quantity=quantity, now=now, at=at, unit=unit, wins="below" if at < now else "above", becomes=becomes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteOverlap:
    """One communication: seconds of a step that its mode hides, and seconds by which the step is shorter.

    The latter is smaller if the overlapped matrix products take longer, or if the host issues more kernels. `site` is
    one of `simulator.config.overlap_sites.SITES`, or ENDS for the communications outside layers.
    """

    site: str
    mode: str
    hides_s: float
    saves_s: float


def overlap_by_site(plan: Plan, cost: Callable[[Sequence[Plan]], EstimateTable]) -> tuple[SiteOverlap, ...]:
    """Return the saving of each site's mode alone, in the order of a layer; empty if nothing overlaps."""
    modes = modes_by_site(plan.tp_overlap)
    if plan.tp == 1 or set(modes) == {NONE}:
        return ()
    texts = [NONE, *(written({site: mode}) for site, mode in zip(SITES, modes, strict=True)), plan.tp_overlap]
    table = cost([replace(plan, tp_overlap=text) for text in texts])
    hides = table.exposed_by_axis_s["tp"][0] - table.exposed_by_axis_s["tp"]
    saves = table.step_s[0] - table.step_s
    found = [
        SiteOverlap(site=site, mode=mode, hides_s=float(hides[number]), saves_s=float(saves[number]))
        for number, (site, mode) in enumerate(zip(SITES, modes, strict=True), start=1)
    ]
    ends_hidden_s = float(hides[-1] - hides[1:-1].sum())
    if len(set(modes)) == 1 and ends_hidden_s > 0:
        ends_saved_s = float(saves[-1] - saves[1:-1].sum())
        found.append(SiteOverlap(site=OUTSIDE_LAYERS, mode=modes[0], hides_s=ends_hidden_s, saves_s=ends_saved_s))
    return tuple(found)
