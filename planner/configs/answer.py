"""Judge a configuration: its legality and cost, the single change that gains most, and the best plan, both as diffs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from planner.configs.asked import Open, Stated, ask
from planner.configs.formats.configuration import CheckFlags, Configuration, Limits, did_you_mean
from planner.configs.stated_rate import Against, StatedRate, against
from planner.configs.variants import variants_of
from planner.configs.written_back import Writer
from planner.explain.plan_answer import FIXES_LEFT_OUT, PlanAnswer, answer_plan
from planner.io.output import SCHEMA_VERSION
from planner.question.prediction import predict, simulated_length
from planner.question.question import Question
from planner.search.deadline import deadline_of, left_s, over
from planner.search.plan_space.candidates import Bounds
from planner.search.plan_space.stated import Values, exactly, within
from planner.search.result import RankedPlan
from planner.search.search import SearchOptions, suggest
from simulator.config.estimate import SURE, Estimate, chance
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.fitting.calibrations import UNMEASURED, Calibrations
from simulator.legality.rule import Problem
from simulator.legality.rules import is_legal
from simulator.runtimes.library import compiles
from topology import codec
from topology.codec import JsonObject
from topology.errors import Infeasible, Unproved
from topology.time_limit import ended, limited

SHOWN = 5  # largest number of changes listed
PREDICTED = 8  # changes, best first by the analytical model, that are predicted like the plan itself
CANDIDATES = (8, 24)  # best plans asked for, until one of them can be written in the file
DEGREES = ("tp", "cp", "pp", "ep")
GAIN = 0.995  # of the step, that a change must get below: a smaller gain is within any prediction's noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """Another plan, with the unified diff of the file that states it."""

    plan: Plan
    runtime: Runtime
    estimate: Estimate
    diff: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a configuration; `what` describes it: `tp 8 -> 4, dp_shard 4 -> 8`."""

    what: str
    better: Better

    @property
    def diff(self) -> str:
        return self.better.diff

    @property
    def step_s(self) -> float:
        return self.better.estimate.step_s.value

    @property
    def fits(self) -> bool:
        return self.better.estimate.memory.fits

    @property
    def fit_probability(self) -> float:
        return self.better.estimate.memory.fit_probability


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result for a configuration. `found` is None if it contradicts itself (`problems`) or leaves something open
    (`questions`). If only the model is open, `stated` has the rest, checked by the rules that need no model.
    `open_length` is the tokens of a sequence that it is judged at, where the file does not say them.
    """

    configuration: Configuration
    problems: tuple[Problem, ...]
    assumed: tuple[str, ...]
    open_length: int | None = None
    questions: tuple[Open, ...] = ()
    found: PlanAnswer | None = None
    stated: Stated | None = None
    changes: tuple[Change, ...] = ()
    best: Better | None = None
    best_because: str = ""
    against: Against | None = None
    no_better: str = ""

    @property
    def legal(self) -> bool | None:
        """Whether its framework accepts it, as far as its statements can be checked; None if they cannot."""
        if self.found is None and self.stated is None and not self.problems:
            return None
        return is_legal(self.problems)


def check_text(
    text: str,
    where: str,
    flags: CheckFlags | None = None,
    *,
    measured: Calibrations = UNMEASURED,
    stated_rate: StatedRate | None = None,
    changes: bool = True,
    search: bool = True,
    time_limit_s: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Checked:
    """Judge the configuration `text`; `where` is its file's name, in messages and diffs.

    `flags` states what the file does not, `stated_rate` is the time that its source states. Without `changes` only the
    plan is judged; without `search` only plans one change away are tried. After `time_limit_s` the result is what was
    found by then. Raises the errors of `ask`.
    """
    flags, deadline = flags or CheckFlags(), deadline_of(time_limit_s)
    asked = ask(text, where, flags, measured=measured)
    case, stated = asked.case, asked.stated
    base = Checked(
        configuration=asked.configuration,
        problems=asked.problems if stated is None else stated.problems(),
        assumed=asked.assumed,
        open_length=asked.open_length,
        questions=asked.questions,
        stated=stated,
    )
    if case is None:
        return base
    found = answer_plan(case, deadline=deadline)
    late = (FIXES_LEFT_OUT,) if FIXES_LEFT_OUT in found.case.assumed else ()
    base = replace(base, problems=found.problems, assumed=(*base.assumed, *late), found=found)
    if stated_rate is not None:
        base = replace(base, against=against(found, asked.configuration, stated_rate))
    written = asked.writer(where, flags)
    single: tuple[Change, ...] = ()
    best: JsonObject = {"no_better": ended().what} if search and changes else {}
    with suppress(Unproved), limited(time_limit_s):
        single = _changes(found, written, deadline) if changes else ()
        best = _best(found, written, single, deadline, progress) if search and changes else {}
    return replace(base, changes=single, **best)


# Other plans.


def _changes(found: PlanAnswer, written: Writer, deadline: float | None) -> tuple[Change, ...]:
    """Return the single changes that gain, the largest gain first; for a plan that does not fit, only changes that make
    it fit.
    """
    question, plan = found.case.question, found.case.plan
    now = found.estimate
    limits = written.configuration.limits
    candidates = [one for one in variants_of(plan, question) if _within(one.plan, limits)]
    judged: list[tuple[bool, float, str, Plan, Runtime]] = []
    for runtime in dict.fromkeys(one.runtime for one in candidates):
        if over(deadline):
            break
        asked = replace(question, runtime=runtime)
        group = [one for one in candidates if one.runtime == runtime and is_legal(asked.problems(one.plan))]
        if not group:
            continue
        try:
            table = asked.estimate([one.plan for one in group])
        except Unproved:
            break
        for row, one in enumerate(group):
            estimate = table.estimate(row)
            judged.append((estimate.memory.fits, estimate.step_s.value, one.what, one.plan, runtime))
    judged.sort(key=lambda one: (not one[0], one[1]))
    changes = []
    for _, step_s, what, other, runtime in judged[:PREDICTED]:
        asked = replace(question, runtime=runtime)
        try:
            diff = written.diff(other, runtime)
            if not diff or over(deadline) or _surely_no_gain(asked, other, step_s, now):
                continue
            there = predict(asked, other).estimate
        except Unproved:
            break
        if now is None or _gains(there, now):
            better = Better(plan=other, runtime=runtime, estimate=there, diff=diff)
            changes.append(Change(what=what, better=better))
    return tuple(sorted(changes, key=lambda one: (one.fit_probability < SURE, one.step_s))[:SHOWN])


def _within(plan: Plan, limits: Limits) -> bool:
    """Return whether a plan's degrees are within those that a kind of file can ask for."""
    held = Bounds(stated={name: values for name, values in limits.items() if values is not None})
    return all(within(getattr(plan, axis), held.spans(axis)) for axis in DEGREES)


def _surely_no_gain(asked: Question, other: Plan, step_s: float, now: Estimate | None) -> bool:
    """Return whether a plan's account (a full allocator may only add to it) shows that it is no better than one that
    surely fits.
    """
    if now is None or now.memory.fit_probability < SURE:
        return False
    return step_s >= GAIN * now.step_s.value and not simulated_length(asked, other)


def _gains(there: Estimate, now: Estimate) -> bool:
    """Return whether a plan is better: it is surer to fit, or is faster and as sure to fit."""
    surely, surely_now = there.memory.fit_probability >= SURE, now.memory.fit_probability >= SURE
    if surely is not surely_now:
        return surely
    return there.memory.fits and (not now.memory.fits or there.step_s.value < GAIN * now.step_s.value)


def _first_written(listed: Sequence[RankedPlan], found: PlanAnswer, written: Writer) -> list[Better]:
    """Return the first of some plans that the file can express and does not state already, if there is one."""
    plan, runtime = found.case.plan, found.case.question.runtime
    for one in listed:
        other = one.plan.with_(placement=())
        if other.pp == 1 and other.reshard_after_forward and plan.reshard_after_forward is None:
            other = other.with_(reshard_after_forward=None)  # the default without a pipeline
        if diff := written.diff(other):
            return [Better(plan=other, runtime=runtime, estimate=one.estimate, diff=diff)]
    return []


def _best(
    found: PlanAnswer,
    written: Writer,
    changes: tuple[Change, ...],
    deadline: float | None,
    progress: Callable[[str], None] | None,
) -> JsonObject:
    """Return the best plan that the file can express, or why there is none. It is at least as good as every single
    change.
    """
    question, plan = found.case.question, found.case.plan
    # Fields without a key in the file keep their values.
    fixed: dict[str, Values] = {
        "recompute": (plan.recompute,),
        "micro_batch_size": exactly(plan.micro_batch_size),
        **{axis: exactly(getattr(plan, axis)) for axis in DEGREES},
    }
    stated = {name: fixed[name] if values is None else values for name, values in written.configuration.limits.items()}
    rivals: list[Better] = []
    for top in CANDIDATES:
        options = SearchOptions(
            bounds=Bounds(stated=stated, batch_step=written.configuration.batch_step),
            top=top,
            all_variants=True,
            time_limit_s=left_s(deadline),
            flips=False,
        )
        try:
            listed = suggest(question, options, progress=progress).plans
            rivals = _first_written(listed, found, written)
        except (Infeasible, Unproved) as error:
            return {"no_better": str(error)}
        if rivals or len(listed) < top or over(deadline):
            break
    singles = [change.better for change in changes]
    for rival in (*rivals, *singles[:1]) if compiles(question.runtime) else ():
        recompiled = replace(rival.runtime, compile=not rival.runtime.compile)
        asked = replace(question, runtime=recompiled)
        with suppress(Unproved):
            if (
                not over(deadline)
                and is_legal(asked.problems(rival.plan))
                and (diff := written.diff(rival.plan, recompiled))
            ):
                estimate = predict(asked, rival.plan).estimate
                rivals.append(Better(plan=rival.plan, runtime=recompiled, estimate=estimate, diff=diff))
    rivals += singles
    rivals.sort(key=lambda one: (one.estimate.memory.fit_probability < SURE, one.estimate.step_s.value))
    now = found.estimate
    for rival in rivals[:1]:
        if now is None or _gains(rival.estimate, now):
            return {"best": rival, "best_because": _because(rival, singles)}
        return {"no_better": "nothing that the search found is faster by more than half a percent"}
    return {"no_better": "the best plans cannot be said in this kind of file"}


def _because(best: Better, singles: list[Better]) -> str:
    """Return why the best plan is slower than a single change, if it is."""
    quicker = [one for one in singles if one.estimate.step_s.value < best.estimate.step_s.value]
    if not quicker:
        return ""
    fastest = min(quicker, key=lambda one: one.estimate.step_s.value)
    odds = chance(fastest.estimate.memory.fit_probability)
    return (
        f"it surely fits; the change above takes {fastest.estimate.step_s.value:.3g} s and fits with a chance of {odds}"
    )


def check_document(checked: Checked) -> JsonObject:
    """Return the JSON document of `planner check`."""
    found, best, stated = checked.found, checked.best, checked.stated
    question = None if found is None else found.case.question
    plan = found.case.plan if found is not None else stated.plan if stated is not None else None
    said = question if question is not None else stated
    return {
        "schema_version": SCHEMA_VERSION,
        "framework": checked.configuration.framework,
        "version": checked.configuration.version,
        "legal": checked.legal,
        "problems": codec.to_builtins(checked.problems),
        "unknown": list(checked.configuration.unknown),
        "did_you_mean": did_you_mean(checked.configuration),
        "questions": codec.to_builtins(checked.questions),
        "assumed": list(checked.assumed),
        "plan": None if plan is None else codec.to_builtins(plan),
        "workload": None if said is None else codec.to_builtins(said.workload),
        "runtime": None if said is None else codec.to_builtins(said.runtime),
        "model": None if question is None else question.model.name,
        "cluster": None if said is None else said.cluster.name,
        "estimate": None if found is None or found.estimate is None else codec.to_builtins(found.estimate),
        "measured": None if checked.against is None else codec.to_builtins(checked.against),
        "changes": [
            {
                "what": one.what,
                "diff": one.diff,
                "step_s": one.step_s,
                "fits": one.fits,
                "fit_probability": one.fit_probability,
            }
            for one in checked.changes
        ],
        "best": None if best is None else codec.to_builtins(best),
        "best_because": checked.best_because,
        "no_better": checked.no_better,
    }
