"""Why this plan: where its step goes, what holds its memory, why others lost, and what would have to change.

Pure data for the command and the explorer. Flip points are found by asking the whole question again on a changed machine,
not by comparing two plans: below so much bandwidth, or with so much memory, the *answer* is another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.branch_and_bound import explore
from planner.candidates import Bounds, enumerate_nodes
from planner.costs import cost_table
from planner.flips import KNOBS, Flip, Knob, Verdict, find_flips, lost_because, memory_flip
from planner.frameworks import Framework
from planner.headroom import Room, more_room
from planner.legality import check, is_legal
from planner.overlap_account import SiteOverlap, overlap_by_site
from planner.overlap_choice import with_sites
from planner.scaling import scale_memory, with_gpus
from planner.search import ranked_rows
from planner.waterfall import Difference, MemoryRow, Waterfall, difference, memory_rows, waterfall
from simulator.estimate import Estimate
from simulator.model import Model
from simulator.plan import MESH_AXES, Plan
from simulator.runtime import Runtime
from simulator.screening import Screening
from simulator.workload import Workload
from topology.cluster import Cluster
from topology.errors import UserError

if TYPE_CHECKING:
    from planner.search import SearchResult

# What an estimate of weights and optimizer alone counts (NVIDIA/Megatron-LM#525); everything else it leaves out.
STATE = frozenset({"parameters", "gradients", "optimizer"})
TURNS = (0.25, 0.5, 2.0, 4.0)  # factors on a rate or on memory at which the question is asked again
HALVINGS = 4  # then the factor is narrowed down to 2^(1/16), 4.4%


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """A plan that lost: the reason in a line, its terms against the best plan's, and when it would win."""

    plan: Plan
    estimate: Estimate
    lost_because: str
    terms: tuple[Difference, ...]
    flips: tuple[Flip, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFlip:
    """Past `at` the answer has other degrees: `becomes` is the plan of then. `now` is the value of the question."""

    quantity: str
    now: float
    at: float
    unit: str
    wins: str  # below or above
    becomes: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccount:
    """Bytes by stage and category, which of them an estimate of state alone leaves out, and the worst stage."""

    rows: tuple[MemoryRow, ...]
    worst_stage: int
    worst_rank: int
    state_bytes: float  # parameters, gradients and optimizer of the worst stage
    omitted: tuple[tuple[str, float], ...]  # what is beside them there, largest first
    allocated_bytes: float
    reserved_bytes: float
    capacity_bytes: float
    observed_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All there is to say about one plan. `behind_s` is what it takes beyond the answer to the question."""

    plan: Plan
    estimate: Estimate
    waterfall: Waterfall
    memory: MemoryAccount
    behind_s: float
    runners: tuple[Runner, ...]
    flips: tuple[AnswerFlip, ...]
    rejected: dict[str, int]
    pruned: dict[str, int]
    overlap: tuple[SiteOverlap, ...] = ()  # what the mode of each tensor-parallel communication hides
    room: Room | None = None  # where memory is tight: what would give room


def memory_account(estimate: Estimate, observed_bytes: float | None = None) -> MemoryAccount:
    """Return the memory of a plan, stage by stage; `observed_bytes` is a peak that somebody measured."""
    memory = estimate.memory
    reserved = memory.reserved_by_stage or (memory.reserved_bytes,)
    worst = max(range(len(reserved)), key=lambda stage: (reserved[stage], -stage))
    here = memory.by_stage[worst] if memory.by_stage else memory.by_category
    beside = sorted(((k, v) for k, v in here.items() if k not in STATE and v > 0), key=lambda pair: (-pair[1], pair[0]))
    return MemoryAccount(
        rows=memory_rows(estimate),
        worst_stage=worst,
        worst_rank=memory.worst_rank,
        state_bytes=sum(nbytes for name, nbytes in here.items() if name in STATE),
        omitted=tuple(beside),
        allocated_bytes=memory.peak_bytes.value,
        reserved_bytes=memory.reserved_bytes,
        capacity_bytes=memory.capacity_bytes,
        observed_bytes=observed_bytes,
    )


def explain(
    plan: Plan,
    result: SearchResult,
    *,
    profile: Any = None,
    observed_bytes: float | None = None,
    with_flips: bool = True,
    grow: Callable[[int], Cluster] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """Return what there is to say about `plan`, a plan for the question that `result` answers (or the answer itself).

    `with_flips` asks the question again some dozens of times. `grow(n)` gives the cluster with n GPUs.
    """
    model, cluster, workload, runtime = result.model, result.cluster, result.workload, result.runtime
    estimate = cost_table(model, cluster, workload, [plan], runtime, profile).estimate(0)
    others = [ranked.plan for ranked in result.plans if ranked.plan != plan]
    table = cost_table(model, cluster, workload, others, runtime, profile) if others else None

    def judge(asked: Sequence[tuple[Cluster, Plan]]) -> list[Verdict]:
        machines, which = zip(*asked, strict=True)
        judged = cost_table(model, cluster, workload, which, runtime, profile, each_on=machines)
        return [(float(s), bool(f)) for s, f in zip(judged.step_s, judged.fits, strict=True)]

    first = result.plans[0]
    # Against the answer itself the search has given its reasons, simulation included.
    reasons = {ranked.plan: ranked.lost_because for ranked in result.plans} if plan == first.plan else {}
    flips = find_flips(cluster, plan, others, judge) if others else []
    runners = tuple(
        Runner(
            plan=other,
            estimate=(theirs := table.estimate(i)),
            lost_because=reasons.get(other) or lost_because(estimate, theirs, objective="time"),
            terms=difference(estimate, theirs),
            flips=(*flips[i], *memory_flip(cluster, estimate, theirs)),
        )
        for i, other in enumerate(others)
        if table is not None
    )
    asked = AskedAgain(
        model=model,
        cluster=cluster,
        workload=workload,
        runtime=runtime,
        framework=result.framework,
        gpus=result.plans[0].plan.gpus,
        profile=profile,
        progress=progress,
    )
    return Explanation(
        plan=plan,
        estimate=estimate,
        waterfall=waterfall(estimate),
        memory=memory_account(estimate, observed_bytes),
        behind_s=0.0 if plan == first.plan else estimate.step_s.value - first.estimate.step_s.value,
        runners=runners,
        flips=tuple(answer_flips(asked, grow)) if with_flips else (),
        rejected=result.rejected,
        pruned=result.search.pruned,
        overlap=overlap_by_site(plan, lambda plans: cost_table(model, cluster, workload, plans, runtime, profile)),
        room=more_room(
            plan,
            estimate,
            result.framework,
            lambda plans: cost_table(model, cluster, workload, plans, runtime, profile),
            lambda other: is_legal(
                check(other, model, cluster, workload, result.framework, runtime=runtime, gpus=plan.gpus)
            ),
        ),
    )


# --- asking again -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAgain:
    """A question that can be asked of changed machines."""

    model: Model
    cluster: Cluster
    workload: Workload
    runtime: Runtime
    framework: Framework
    gpus: int
    profile: Any = None
    progress: Callable[[str], None] | None = None

    def best(self, **changes: Any) -> Plan | None:
        """Return the best plan, with fields of the question changed; None where nothing fits or is legal."""
        bounds = changes.pop("bounds", Bounds())
        asked = replace(self, **changes)
        screening = Screening(
            model=asked.model,
            cluster=asked.cluster,
            workload=asked.workload,
            runtime=asked.runtime,
            profile=asked.profile,
        )
        try:
            nodes = enumerate_nodes(
                asked.model,
                asked.cluster,
                asked.workload,
                asked.framework,
                gpus=asked.gpus,
                runtime=asked.runtime,
                bounds=bounds,
            )
        except UserError:
            return None
        if not len(nodes):
            return None
        nodes = with_sites(screening, nodes, asked.framework, asked.framework.recomputes)
        found = explore(screening, nodes, asked.framework.recomputes)
        if not len(found):
            return None
        return found.columns.plan(ranked_rows(found.columns, found.step_s, top=1, all_variants=True)[0])


def degrees(plan: Plan | None) -> tuple[int, ...]:
    """Return what makes an answer another one: the degrees of parallelism."""
    return () if plan is None else tuple(int(getattr(plan, axis)) for axis in (*MESH_AXES, "ep"))


def answer_flips(asked: AskedAgain, grow: Callable[[int], Cluster] | None = None) -> Iterator[AnswerFlip]:
    """Yield the values of link rates, memory, micro batch and GPU count past which the answer has other degrees.

    Rates and memory within a factor of four either way; half and twice the GPUs with the same global batch.
    """
    now = asked.best()
    memory = Knob(quantity="memory per GPU", unit="bytes", now=lambda c: float(c.gpu_memory_bytes), scale=scale_memory)
    for knob in (*KNOBS, memory):
        value = knob.now(asked.cluster)
        if value <= 0 or (knob.quantity.startswith("network") and asked.cluster.node_count == 1):
            continue
        for direction in (TURNS[1::-1], TURNS[2:]):
            yield from _turned(asked, knob, value, now, direction)
    if now is None:
        return
    for size in (now.micro_batch_size // 2, now.micro_batch_size * 2):
        other = asked.best(bounds=Bounds(micro_batch=size)) if size else None
        if other is not None and degrees(other) != degrees(now):
            yield _flip("micro batch", now.micro_batch_size, size, "sequences", other)
    for count in (asked.gpus // 2, asked.gpus * 2):
        try:
            cluster = grow(count) if grow else with_gpus(asked.cluster, count)
        except (UserError, ValueError, ZeroDivisionError):
            continue  # a cluster that does not come in this size
        other = asked.best(cluster=cluster, gpus=count)
        if other is not None and degrees(replace(other, dp_shard=1, dp_replicate=1)) != degrees(
            replace(now, dp_shard=1, dp_replicate=1)
        ):
            yield _flip("GPUs", asked.gpus, count, "GPUs", other)


def _turned(
    asked: AskedAgain, knob: Knob, value: float, now: Plan | None, factors: Sequence[float]
) -> Iterator[AnswerFlip]:
    """Yield the flip nearest to the present value of a knob turned in one direction, if there is one."""
    same = 1.0
    for factor in factors:
        if asked.progress:
            asked.progress(f"asking again with {factor:g} times the {knob.quantity}")
        found = asked.best(cluster=knob.scale(asked.cluster, factor))
        if degrees(found) == degrees(now):
            same = factor
            continue
        for _ in range(HALVINGS):
            middle = (same * factor) ** 0.5
            there = asked.best(cluster=knob.scale(asked.cluster, middle))
            if degrees(there) == degrees(now):
                same = middle
            else:
                factor, found = middle, there  # noqa: PLW2901 - the bracket closes
        if found is not None:
            yield _flip(knob.quantity, value, value * factor, knob.unit, found)
        return


def _flip(quantity: str, now: float, at: float, unit: str, becomes: Plan) -> AnswerFlip:
    return AnswerFlip(
        quantity=quantity, now=now, at=at, unit=unit, wins="below" if at < now else "above", becomes=becomes
    )
