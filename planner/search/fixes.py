"""Changes that make a plan fit its memory, in the order of their cost: time on the same GPUs, then GPUs, then
precision.

Changed are recomputation, the micro batch, resharding, sharding over replicas, tensor and context parallelism, what is
kept in host memory, memory savers that the software has, compilation, the number of GPUs and the type of parameters,
one by one and together. A change is shown if no part of it is as good, to within a tie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from planner.io.figures import change_text, gib_text
from planner.io.plan_words import listed, plan_in_words
from planner.question.prediction import predict
from planner.question.question import Question
from planner.search.finalists import TIE
from planner.search.savers import more_savers, paged_instead
from simulator.analytical.estimates import Counted, counted_rows, memory_of_plans
from simulator.analytical.memory import CONTEXT_BYTES
from simulator.config.estimate import Estimate, Fit, MemoryEstimate, chance, sure_bytes
from simulator.config.plan import Plan
from simulator.config.savers import TITLES
from simulator.legality.rule import divisors
from simulator.legality.rules import legal_ones
from simulator.memory.plan_memory import PlanMemory, Replays
from simulator.runtimes.library import compiles
from topology.errors import Unproved, UserError
from topology.rates.scaling import with_gpus
from topology.time_limit import check_time, reading, until
from topology.units import GIB

MOST_FIXES = (3, 1, 1)  # changes that are returned: on the same GPUs, on more GPUs, in another precision
MOST_LAYERS = 2048  # layers of a model; each of hundreds of variants is counted layer by layer
WIDER = (2, 4)  # factors of tensor and context parallelism, and of the GPU count, that are tried
LEAST_FREED_BYTES = 0.1 * GIB  # smaller savings are not worth a change of plan
SAME_GPUS, MORE_GPUS, PRECISION = range(3)  # kinds of cost of a change


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A variant of a plan that needs less memory; `change` describes the difference.

    `longer` is its cost in time: the relative increase of the step. `slower` is its cost in throughput: the relative
    increase of GPU seconds per token.
    """

    change: str
    plan: Plan
    compiled: bool
    savers: tuple[str, ...]
    param_dtype: str
    step_s: float
    longer: float
    slower: float
    reserved_bytes: float
    headroom_bytes: float
    fit: Fit
    fit_probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    paid: int
    changes: tuple[str, ...]
    kinds: frozenset[str]
    question: Question
    plan: Plan
    held: PlanMemory | None = None  # where a search has replayed it


_Groups = Iterator[list[_Variant]]


def find_fixes(question: Question, plan: Plan, estimate: Estimate, deadline: float | None = None) -> tuple[Fix, ...]:
    """Return the variants that surely fit, cheapest first; if none does, the one with the most headroom; of those tried
    by `deadline`.

    Empty if `plan` surely fits itself, if no variant needs less memory, and for models of more than MOST_LAYERS.
    """
    if estimate.memory.fit is Fit.YES or question.model.layers > MOST_LAYERS:
        return ()
    found: list[_Costed] = []
    # Cheapest first, each judged by its replay, until enough surely fit; more expensive ones are not examined.
    chosen: list[_Costed] = []
    fixes: list[tuple[int, Fix]] = []
    with suppress(Unproved), until(reading() if deadline is None else min(deadline, reading())):
        with suppress(Unproved):
            _choose(chosen, found, _by_price(question, plan, deadline), estimate)
        for one in chosen or sorted(found, key=lambda one: one.reserved_bytes)[:1]:
            fixes.append((one.variant.paid, _fix(one, plan, estimate)))  # noqa: PERF401 - as far as there is time
    fixes = [(paid, one) for paid, one in fixes if one.reserved_bytes < estimate.memory.reserved_bytes]
    fixes = [(paid, one) for paid, one in fixes if one.fit is Fit.YES] or fixes[:1]
    return tuple(one for _, one in sorted(fixes, key=lambda pair: (pair[0], pair[1].plan.gpus, pair[1].step_s)))


def find_savings(question: Question, plan: Plan, estimate: Estimate) -> tuple[Fix, ...]:
    """Return the changes of one setting, on the same GPUs, that need less memory, whether the plan fits or not; the
    largest saving first.
    """
    compiled = replace(question, runtime=replace(question.runtime, compile=True))
    others = [("torch.compile", "compile", compiled)] if _may_compile(question) else []
    if paged := paged_instead(question.runtime):
        others.append((f"optimizer {paged.optimizer}", "optimizer", replace(question, runtime=paged)))
    for words in more_savers(question.runtime):
        if len(words) == 1:
            saving = replace(question, runtime=question.runtime.with_savers(words))
            others.append((TITLES[words[0]], words[0], saving))
    alone = [
        _Variant(paid=SAME_GPUS, changes=(change,), kinds=frozenset({kind}), question=asked, plan=plan)
        for change, kind, asked in others
    ]
    single = [one for one in _variants(question, plan) if len(one.kinds) == 1] + alone
    found = [
        _fix(_Costed(variant=one, reserved_bytes=estimate.memory.reserved_bytes), plan, estimate)
        for one in single
        if one.question.legal(one.plan)
    ]
    frees = [one for one in found if estimate.memory.reserved_bytes - one.reserved_bytes >= LEAST_FREED_BYTES]
    return tuple(sorted(frees, key=lambda one: one.reserved_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costed:
    """A variant and the lower bound of its memory; `may` is whether by that bound it may surely fit."""

    variant: _Variant
    reserved_bytes: float
    counted: Counted | None = None
    held: PlanMemory | None = None

    @property
    def may(self) -> bool:
        return self.counted is not None

    @property
    def step_s(self) -> float:
        return inf if self.counted is None else self.counted.step_s

    def replaces(self, other: _Costed) -> bool:
        """Return whether this variant changes less than another one and costs no more, to within a tie."""
        mine, theirs = self.variant, other.variant
        paid = (mine.paid, mine.plan.gpus) <= (theirs.paid, theirs.plan.gpus)
        return mine.kinds < theirs.kinds and paid and self.step_s <= other.step_s * (1 + TIE)


def _choose(
    chosen: list[_Costed], found: list[_Costed], by_price: Iterable[tuple[int, _Groups]], estimate: Estimate
) -> None:
    """Add to `found` the variants whose memory is known, and to `chosen` those that surely fit."""
    for paid, tried in by_price:
        if _enough(chosen, paid):
            continue
        costed: list[_Costed] = []
        for variants in tried:
            check_time()
            better = [one for one in variants if not any(other.variant.kinds <= one.kinds for other in chosen)]
            costed += _costed(better, estimate)
        found += costed
        for one in sorted((one for one in costed if one.may), key=lambda one: one.step_s):
            variant = one.variant
            if _enough(chosen, paid):
                break
            if any(other.variant.kinds <= variant.kinds for other in chosen):
                continue
            held = variant.held or PlanMemory(variant.question, variant.plan)
            if held.surely_fits:
                chosen[:] = [*(other for other in chosen if not one.replaces(other)), replace(one, held=held)]


def _enough(chosen: Sequence[_Costed], paid: int) -> bool:
    return sum(one.variant.paid == paid for one in chosen) == MOST_FIXES[paid]


def _costed(variants: Sequence[_Variant], estimate: Estimate) -> list[_Costed]:
    """Return the legal variants of one question; those that may surely fit include their accounts."""
    if variants:
        asked = variants[0].question
        legal = legal_ones([one.plan for one in variants], asked.facts())
        variants = [one for one, runs in zip(variants, legal, strict=True) if runs]
    if not variants:
        return []
    reserved = memory_of_plans(asked, [one.plan for one in variants]).reserved_bytes.max(axis=1).tolist()
    most = sure_bytes(asked.cluster.gpu_memory_bytes - CONTEXT_BYTES, estimate.memory.reserved_factors)
    may = [row for row, nbytes in enumerate(reserved) if nbytes <= most]
    table = asked.estimate([variants[row].plan for row in may]) if may else None
    counted = {} if table is None else dict(zip(may, counted_rows(table), strict=True))
    return [
        _Costed(variant=one, reserved_bytes=nbytes, counted=counted.get(row))
        for row, (one, nbytes) in enumerate(zip(variants, reserved, strict=True))
    ]


def _fix(costed: _Costed, plan: Plan, estimate: Estimate) -> Fix:
    variant = costed.variant
    found = predict(variant.question, variant.plan, held=costed.held, counted=costed.counted).estimate
    return Fix(
        change=listed(variant.changes),
        plan=variant.plan,
        compiled=variant.question.runtime.compile,
        savers=variant.question.runtime.all_savers,
        param_dtype=variant.question.runtime.param_dtype,
        step_s=found.step_s.value,
        longer=found.step_s.value / estimate.step_s.value - 1,
        slower=found.step_s.value * variant.plan.gpus / (estimate.step_s.value * plan.gpus) - 1,
        reserved_bytes=found.memory.reserved_bytes,
        headroom_bytes=found.memory.headroom_bytes,
        fit=found.memory.fit,
        fit_probability=found.memory.fit_probability,
    )


def _by_price(question: Question, plan: Plan, deadline: float | None) -> Iterator[tuple[int, _Groups]]:
    """Yield the kinds of cost, the least first, with the variants of a plan at that cost, grouped by question."""
    yield SAME_GPUS, _on_same_gpus(question, plan)
    for count in _more_gpus(question, plan):
        yield MORE_GPUS, _on_more_gpus(question, plan, count, deadline)
    if question.runtime.param_dtype == "float32":
        short = replace(question, runtime=replace(question.runtime, param_dtype="bfloat16"))
        changed = ("parameters in bfloat16",), frozenset({"precision"})
        yield PRECISION, iter([list(_variants(short, plan, *changed, paid=PRECISION, degrees=False))])


def _may_compile(question: Question) -> bool:
    return not question.runtime.compile and compiles(question.runtime)


def _on_same_gpus(question: Question, plan: Plan) -> _Groups:
    """Yield the variants of a plan as requested, compiled, and with memory savers."""
    yield [one for one in _variants(question, plan) if one.changes]
    if _may_compile(question):
        compiled = replace(question, runtime=replace(question.runtime, compile=True))
        yield list(_variants(compiled, plan, ("torch.compile",), frozenset({"compile"})))
    if paged := paged_instead(question.runtime):
        changed = (f"optimizer {paged.optimizer}",), frozenset({"optimizer"})
        yield list(_variants(replace(question, runtime=paged), plan, *changed, degrees=False))
    for words in more_savers(question.runtime):
        saving = replace(question, runtime=question.runtime.with_savers(words))
        named, kinds = tuple(TITLES[word] for word in words), frozenset(words)
        yield list(_variants(saving, plan, named, kinds, degrees=False))


def _on_more_gpus(question: Question, plan: Plan, count: int, deadline: float | None) -> _Groups:
    try:
        cluster = question.cluster
        larger = cluster if count <= cluster.gpu_count else with_gpus(cluster, count)
    except (UserError, ValueError, ZeroDivisionError):
        return  # the cluster does not exist in this size
    more = replace(question, cluster=larger, gpus=count)
    named, kinds = f"{count} GPUs", frozenset({"GPUs"})
    if count % plan.gpus == 0:
        wider = _sharded_over(plan, count // plan.gpus)
        yield list(_variants(more, wider, (named,), kinds, paid=MORE_GPUS, degrees=False))
    elif best := _best_plan(more, deadline):
        changes = (f"{named} ({plan_in_words(best.plan)})",)
        yield [_Variant(paid=MORE_GPUS, changes=changes, kinds=kinds, question=more, plan=best.plan, held=best)]


def _best_plan(question: Question, deadline: float | None) -> PlanMemory | None:
    # A search, which a plan that fits needs not.
    from planner.search.infeasible import ConstrainedQuestion  # noqa: PLC0415
    from planner.search.plan_space.candidates import Bounds  # noqa: PLC0415

    replays = Replays(question)
    with suppress(Unproved):  # the time was over before there was one
        best = ConstrainedQuestion(question=question, bounds=Bounds()).best_plan(deadline, replays)
        return None if best is None else replays[best]
    return None


def _more_gpus(question: Question, plan: Plan) -> list[int]:
    """Return the GPU counts to try: one more node, twice as many, and four times as many."""
    node = question.cluster.gpus_per_node
    another = [plan.gpus + node] if plan.gpus >= node else []
    return sorted({*another, *(plan.gpus * factor for factor in WIDER)})


def _sharded_over(plan: Plan, factor: int) -> Plan:
    """Return the plan with `factor` times the data-parallel ranks; its shards are multiplied if it has any."""
    if plan.zero_stage is not None:
        return replace(plan, dp_replicate=plan.dp_replicate * factor, placement=())
    return replace(plan, dp_shard=plan.dp_shard * factor, placement=())


def _variants(
    question: Question,
    plan: Plan,
    changes: tuple[str, ...] = (),
    kinds: frozenset[str] = frozenset(),
    *,
    paid: int = SAME_GPUS,
    degrees: bool = True,
) -> Iterator[_Variant]:
    """Yield the plan itself, then its variants by every combination of settings that needs less memory."""
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
            paid=paid,
            changes=(*changes, *named.values()),
            kinds=kinds | named.keys(),
            question=question,
            plan=changed,
        )


def _recomputes(question: Question, plan: Plan) -> Sequence[str]:
    """Return the recompute modes that keep less than the plan's; the empty word keeps the plan's mode."""
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
    """Yield (kind, change, plan) with a larger part of a plan's state in host memory."""
    words = question.framework.offloads
    for word in words[words.index(plan.offload) + 1 :] if plan.offload in words else ():
        yield "offload", f"offload {word}", replace(plan, offload=word)


def held_text(memory: MemoryEstimate) -> str:
    """Return whether a plan fits, and how much memory it needs: `fits: 61 GiB (57 to 65) of 78`."""
    low, high = (gib_text(end) for end in (memory.reserved_low_bytes, memory.reserved_high_bytes))
    state = {Fit.YES: "fits", Fit.NO: "does not fit"}.get(memory.fit, f"{chance(memory.fit_probability)} likely to fit")
    return f"{state}: {gib_text(memory.reserved_bytes)} GiB ({low} to {high}) of {gib_text(memory.capacity_bytes)}"


def memory_text(estimate: Estimate, fixes: Sequence[Fix], gpus: int) -> str:
    """Return a sentence: how much memory a plan on `gpus` needs, whether that fits, and which changes make it."""
    held = held_text(estimate.memory)
    if estimate.memory.fit is Fit.YES:
        return held
    if not fixes:
        return f"{held}; nothing tried needs less"
    if all(one.fit is not Fit.YES for one in fixes):
        return f"{held}; nothing tried surely fits, and least is needed by {fix_text(fixes[0], gpus)}"
    return f"{held}; to make it fit, cheapest first: " + "; ".join(fix_text(one, gpus) for one in fixes)


def fix_text(fix: Fix, gpus: int) -> str:
    """Return a change of a plan on `gpus`, what it needs and costs: `recompute selective (47 GiB, +8% time)`."""
    cost = f"{change_text(fix.longer)} time" if abs(fix.longer) >= 0.005 else "as fast"
    if fix.plan.gpus != gpus:
        cost += f", {change_text(1 / (1 + fix.slower) - 1)} throughput a GPU"
    sure = {Fit.YES: "", Fit.NO: ", does not fit"}.get(fix.fit, f", {chance(fix.fit_probability)} likely")
    return f"{fix.change} ({gib_text(fix.reserved_bytes)} GiB{sure}, {cost})"
