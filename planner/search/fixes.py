"""What would make a plan fit its memory, cheapest first: all that can be changed, in the order of throughput lost.

Changed are recomputation, the micro batch, resharding, sharding over replicas, tensor and context parallelism, what is
kept in host memory, compilation and the number of GPUs, one by one and together. A change is shown where nothing that
is part of it does as well, to within a tie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from planner.io.figures import change_text, gib_text
from planner.question.prediction import predict
from planner.question.question import Question
from planner.search.deadline import deadline_of, left_s, over
from planner.search.finalists import TIE
from planner.search.scaling import with_gpus
from simulator.config.estimate import Estimate, Fit, chance, sure_bytes
from simulator.config.plan import Plan
from simulator.legality.rule import divisors
from simulator.memory.plan_memory import PlanMemory
from topology.errors import UserError

MOST_FIXES = 4  # that are returned
MOST_LAYERS = 2048  # of a model; each of hundreds of variants is counted layer by layer
WIDER = (2, 4)  # factors of tensor and context parallelism, and of the number of GPUs, that are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A variant of a plan that needs less memory; `change` says in words what differs.

    `slower` is what it costs in throughput: GPU seconds a token above those of the plan, relative.
    """

    change: str
    plan: Plan
    compiled: bool
    step_s: float
    slower: float
    reserved_bytes: float
    headroom_bytes: float
    fit: Fit
    fit_probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    changes: tuple[str, ...]
    kinds: frozenset[str]
    question: Question
    plan: Plan


def find_fixes(question: Question, plan: Plan, estimate: Estimate, deadline: float | None = None) -> tuple[Fix, ...]:
    """Return the variants that surely fit, cheapest first; where none does, the one with the most headroom.

    Variants of other runtimes and more GPUs are tried until the first half of what is left until `deadline` is over.

    There is none where `plan` surely fits itself, where no variant needs less memory, and of models of more than
    MOST_LAYERS.
    """
    if estimate.memory.fit is Fit.YES or question.model.layers > MOST_LAYERS:
        return ()
    found: list[tuple[bool, float, float, _Variant]] = []
    left = left_s(deadline)
    half = None if left is None else deadline_of(left / 2)
    for asked, variants in _by_question(question, plan):
        if over(half):
            break
        legal = [one for one in variants if asked.legal(one.plan)]
        table = asked.estimate([one.plan for one in legal]) if legal else None
        for row, one in enumerate(legal):
            assert table is not None  # noqa: S101 - there is a row
            high = estimate.memory.reserved_high_bytes / estimate.memory.reserved_bytes
            may = float(table.reserved_bytes[row]) <= sure_bytes(table.capacity_bytes, high)
            found.append((not may, float(table.step_s[row]) * one.plan.gpus, float(table.reserved_bytes[row]), one))
    # Cheapest first, each judged by its replay, until there are enough of them that surely fit.
    chosen: list[tuple[float, _Variant]] = []
    for _, cost, _, one in sorted((one for one in found if not one[0]), key=lambda one: one[1]):
        if len(chosen) == MOST_FIXES or over(half):
            break
        if any(other.kinds <= one.kinds for _, other in chosen) or not PlanMemory(one.question, one.plan).surely_fits:
            continue
        chosen = [(c, other) for c, other in chosen if not (one.kinds < other.kinds and cost <= c * (1 + TIE))]
        chosen.append((cost, one))
    if not chosen:
        chosen = [(cost, one) for _, cost, _, one in sorted(found, key=lambda one: one[2])[:1]]
    fixes = [_fix(one, plan, estimate) for _, one in chosen if not over(half)]
    fixes = [one for one in fixes if one.reserved_bytes < estimate.memory.reserved_bytes]
    return tuple(sorted(fixes, key=lambda one: one.slower))


def _fix(variant: _Variant, plan: Plan, estimate: Estimate) -> Fix:
    found = predict(variant.question, variant.plan).estimate
    return Fix(
        change=" with ".join(variant.changes),
        plan=variant.plan,
        compiled=variant.question.runtime.compile,
        step_s=found.step_s.value,
        slower=found.step_s.value * variant.plan.gpus / (estimate.step_s.value * plan.gpus) - 1,
        reserved_bytes=found.memory.reserved_bytes,
        headroom_bytes=found.memory.headroom_bytes,
        fit=found.memory.fit,
        fit_probability=found.memory.fit_probability,
    )


def _by_question(question: Question, plan: Plan) -> Iterator[tuple[Question, list[_Variant]]]:
    """Yield the variants of a plan by the question that they answer: this one, compiled, or on more GPUs."""
    yield question, [one for one in _variants(question, plan, (), frozenset()) if one.changes]
    if not question.runtime.compile:
        compiled = replace(question, runtime=replace(question.runtime, compile=True))
        yield compiled, list(_variants(compiled, plan, ("compiled",), frozenset({"compile"})))
    for factor in WIDER:
        count = plan.gpus * factor
        try:
            cluster = question.cluster
            larger = cluster if count <= cluster.gpu_count else with_gpus(cluster, count)
        except (UserError, ValueError, ZeroDivisionError):
            continue  # the cluster does not come in this size
        more = replace(question, cluster=larger, gpus=count)
        wider = _sharded_over(plan, factor)
        yield more, list(_variants(more, wider, (f"{count} GPUs",), frozenset({"GPUs"}), degrees=False))


def _sharded_over(plan: Plan, factor: int) -> Plan:
    """Return the plan with `factor` times the ranks of data parallelism, and of its shards where it has any."""
    if plan.zero_stage is not None:
        return replace(plan, dp_replicate=plan.dp_replicate * factor, placement=())
    return replace(plan, dp_shard=plan.dp_shard * factor, placement=())


def _variants(
    question: Question, plan: Plan, changes: tuple[str, ...], kinds: frozenset[str], *, degrees: bool = True
) -> Iterator[_Variant]:
    """Yield what the settings of a plan can be changed to, itself first: every combination that needs less memory."""
    sharings = [("", "", plan), *([*_sharings(question, plan), *_offloads(question, plan)] if degrees else ())]
    for (kind, sharing, shared), recompute, size, reshard in product(
        sharings, _recomputes(question, plan), _sizes(plan), _reshards(plan)
    ):
        changed = replace(shared, micro_batch_size=size)
        named = {kind: sharing} if sharing else {}
        if recompute:
            changed = replace(changed, recompute=recompute, recompute_per_stage=())
            named["recompute"] = f"recompute {recompute}"
        if size != plan.micro_batch_size:
            named["micro batch"] = f"micro batch {size}"
        if reshard:
            changed = replace(changed, reshard_after_forward=True)
            named["reshard"] = "resharding after forward"
        yield _Variant(
            changes=(*changes, *named.values()),
            kinds=kinds | named.keys(),
            question=question,
            plan=changed,
        )


def _recomputes(question: Question, plan: Plan) -> Sequence[str]:
    """Return the words of recomputation that keep less than the plan does; the empty one keeps the plan's."""
    words = question.framework.recomputes
    known = plan.recompute in words and not plan.recompute_per_stage
    return ["", *(words[words.index(plan.recompute) + 1 :] if known else [word for word in words if word != "none"])]


def _sizes(plan: Plan) -> Sequence[int]:
    return divisors(plan.micro_batch_size)[::-1]


def _reshards(plan: Plan) -> Sequence[bool]:
    gathered = plan.reshard_after_forward is False and plan.dp_shard * plan.cp > 1
    return [False, True] if gathered else [False]


def _sharings(question: Question, plan: Plan) -> Iterator[tuple[str, str, Plan]]:
    """Yield (kind, change, plan) with the state or the sequences of a plan shared by more ranks, on as many GPUs."""
    if plan.zero_stage is None and plan.dp_replicate > 1:
        shards = plan.dp_shard * plan.dp_replicate
        yield "shards", f"fsdp {shards} instead of replicas", replace(plan, dp_replicate=1, dp_shard=shards)
    for stage in question.framework.zero_stages if plan.zero_stage is not None and plan.dp_replicate > 1 else ():
        if stage > (plan.zero_stage or 0):
            yield "shards", f"ZeRO-{stage}", replace(plan, zero_stage=stage)
    for factor in WIDER:
        for axis in ("tp", "cp"):
            taken = next((a for a in ("dp_shard", "dp_replicate") if getattr(plan, a) % factor == 0), None)
            if taken is None:
                continue
            degree = getattr(plan, axis) * factor
            wider = replace(plan.with_(**{axis: degree, taken: getattr(plan, taken) // factor}), placement=())
            yield axis, f"{axis} {degree}", replace(wider, sequence_parallel=wider.sequence_parallel or axis == "tp")


def _offloads(question: Question, plan: Plan) -> Iterator[tuple[str, str, Plan]]:
    """Yield (kind, change, plan) with more of a plan's state in host memory."""
    words = question.framework.offloads
    for word in words[words.index(plan.offload) + 1 :] if plan.offload in words else ():
        yield "offload", f"offload {word}", replace(plan, offload=word)


def memory_text(estimate: Estimate, fixes: Sequence[Fix]) -> str:
    """Return a sentence: how much memory is needed, whether that fits, and which changes make it, cheapest first."""
    memory = estimate.memory
    low, high = (gib_text(end) for end in (memory.reserved_low_bytes, memory.reserved_high_bytes))
    needs = f"{gib_text(memory.reserved_bytes)} GiB ({low} to {high}) of {gib_text(memory.capacity_bytes)}"
    if memory.fit is Fit.YES:
        return f"fits: {needs}"
    state = "does not fit" if memory.fit is Fit.NO else f"{chance(memory.fit_probability)} likely to fit"
    if not fixes:
        return f"{state}: {needs}; nothing tried needs less"
    if all(one.fit is not Fit.YES for one in fixes):
        return f"{state}: {needs}; nothing tried surely fits, and least is needed by {fix_text(fixes[0])}"
    return f"{state}: {needs}; to make it fit, cheapest first: " + "; ".join(fix_text(one) for one in fixes)


def fix_text(fix: Fix) -> str:
    """Return a change, what it needs, and what it costs: `recompute selective (47 GiB, 8% less throughput)`."""
    lost = 1 - 1 / (1 + fix.slower)
    cost = "no throughput lost" if abs(lost) < 0.005 else f"{change_text(-lost)} throughput"
    sure = "" if fix.fit is Fit.YES else f", {chance(fix.fit_probability)} likely"
    return f"{fix.change} ({gib_text(fix.reserved_bytes)} GiB{sure}, {cost})"
