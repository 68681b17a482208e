"""A configuration judged: legal or why not, what it costs, the one change that gains most, and the best plan, as
diffs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from planner.configs.formats.configuration import CheckFlags, Configuration, Limits
from planner.configs.formats.kinds import read_configuration
from planner.configs.variants import variants_of
from planner.configs.written_back import Writer
from planner.explain.plan_answer import PlanAnswer, answer_plan
from planner.export.mapping import PLAN_FACTS, RUNTIME_FACTS, Facts, read
from planner.io.inputs import read_cluster
from planner.question.cases import DEFAULT_CLUSTER, DEFAULT_MODEL, SEQ_LEN, Case, build_case
from planner.question.prediction import predict
from planner.search.deadline import deadline_of, left_s, over
from planner.search.plan_space.candidates import Bounds
from planner.search.plan_space.stated import Values, exactly, within
from planner.search.search import SearchOptions, suggest
from simulator.config.estimate import SURE, Estimate
from simulator.config.hf_config import load_model
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.fitting.calibrations import UNMEASURED, Calibrations
from simulator.legality.frameworks import framework_named
from simulator.legality.rule import Grade, Problem
from simulator.legality.rules import is_legal
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import BadInput, Infeasible, PlannerError, UserError
from topology.rates.known import require_plannable

SEQUENCES_PER_GPU = 8  # of a step whose configuration states no batch: enough to accumulate, quick to run
SHOWN = 5  # changes that are listed
PREDICTED = 8  # changes, best first by the analytical model, that are predicted as the plan itself is
CANDIDATES = 24  # best plans of which the first that the file can say is the answer
# Flags, and the facts of a configuration that they must not contradict.
STATED_WITH_FILE = {
    "gpus": "gpus",
    "seq_len": "seq_len",
    "global_batch": "global_batch_size",
    "micro_batch": "micro_batch_size",
}
GAIN = 0.995  # of the step: what gains less than half a percent is within any prediction's noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """Another plan, with the unified diff of the file that makes it."""

    plan: Plan
    runtime: Runtime
    estimate: Estimate
    diff: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a configuration; `what` says it in words: `tp 8 -> 4, dp_shard 4 -> 8`."""

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
class Asked:
    """The question that a configuration asks: `facts` are how it says its plan, `given` what its reader was given.

    `case` is None where it contradicts itself: see `problems`.
    """

    configuration: Configuration
    assumed: tuple[str, ...]
    given: Facts = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    case: Case | None = None
    problems: tuple[Problem, ...] = ()

    def writer(self, where: str, flags: CheckFlags) -> Writer:
        """Return what writes other plans into the configuration, which has a case."""
        if self.case is None:
            raise ValueError("a configuration that contradicts itself has no plan to write over")
        return Writer(
            configuration=self.configuration,
            asked=self.case,
            facts=self.facts,
            given=self.given,
            where=where,
            flags=flags,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What there is to say about a configuration. `found` is None where it contradicts itself: see `problems`."""

    configuration: Configuration
    problems: tuple[Problem, ...]
    assumed: tuple[str, ...]
    found: PlanAnswer | None = None
    changes: tuple[Change, ...] = ()
    best: Better | None = None
    no_better: str = ""

    @property
    def legal(self) -> bool:
        return self.found is not None and self.found.estimate is not None


def check_text(
    text: str,
    where: str,
    flags: CheckFlags | None = None,
    *,
    measured: Calibrations = UNMEASURED,
    changes: bool = True,
    search: bool = True,
    time_limit_s: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Checked:
    """Judge the configuration `text`; `where` is its file's name, in messages and diffs.

    `flags` is what is known besides the file. Without `changes` only the plan is judged, and without `search` only
    plans one change away are tried. After `time_limit_s` there is what was found until then. Raises BadInput (exit 2)
    for a text that cannot be read or whose model or cluster is not known, and Stale (exit 1) for a profile in doubt
    where it is refused.
    """
    flags, deadline = flags or CheckFlags(), deadline_of(time_limit_s)
    asked = ask(text, where, flags, measured=measured)
    configuration, case = asked.configuration, asked.case
    if case is None:
        return Checked(configuration=configuration, problems=asked.problems, assumed=asked.assumed)
    found = answer_plan(case, deadline=deadline)
    base = Checked(configuration=configuration, problems=found.problems, assumed=case.assumed, found=found)
    written = asked.writer(where, flags)
    single = _changes(found, written, deadline) if changes else ()
    return replace(
        base, changes=single, **(_best(found, written, single, deadline, progress) if search and changes else {})
    )


def ask(text: str, where: str, flags: CheckFlags, *, measured: Calibrations = UNMEASURED) -> Asked:
    """Return the question that a configuration asks, without its answer. Raises BadInput as `check_text` does."""
    configuration = read_configuration(text, where, flags)
    model, cluster, gpus, assumed = _inputs(configuration, flags)
    measured.check(cluster)
    try:
        given = _given(configuration, flags, model, cluster, gpus)
        facts = read(configuration.table, configuration.settings, given)
        case = _case(configuration, facts, model, cluster, measured, where, assumed)
    except PlannerError as error:
        problem = Problem(rule="configuration", grade=Grade.ILLEGAL, message=str(error).replace("\n ", ";"))
        return Asked(configuration=configuration, assumed=tuple(assumed), problems=(problem,))
    _agree(facts, flags)
    return Asked(configuration=configuration, assumed=case.assumed, given=given, facts=facts, case=case)


# What the file is about.


def _inputs(configuration: Configuration, flags: CheckFlags) -> tuple[Model, Cluster, int, list[str]]:
    """Return the model, the cluster and the number of GPUs; what nobody stated is assumed, and listed."""
    assumed = list(configuration.assumed)
    model = load_model(flags.model) if flags.model else configuration.model
    if isinstance(model, str):
        model = load_model(model)
    if model is None:
        model = load_model(DEFAULT_MODEL)
        assumed.append(f"model {DEFAULT_MODEL} (the file names none that is known: say it with --model)")
    name = flags.cluster or configuration.cluster or DEFAULT_CLUSTER
    if not flags.cluster:
        assumed.append(f"cluster {name}" + (" (the file's own comment)" if configuration.cluster else ""))
    whole = read_cluster(name, gpu=flags.gpu)
    require_plannable(whole)  # of the machine, before what is said of the plan
    gpus = flags.gpus or configuration.gpus
    if gpus and not flags.gpus and configuration.in_a_comment:
        assumed.append(f"{gpus} GPUs (the file's own comment)")
    if not gpus:
        gpus = whole.gpu_count
        assumed.append(f"{gpus} GPUs (the cluster's; say another number with --gpus)")
    return model, read_cluster(name, gpus, gpu=flags.gpu), gpus, [*model.assumed, *assumed]


def _given(configuration: Configuration, flags: CheckFlags, model: Model, cluster: Cluster, gpus: int) -> Facts:
    facts: Facts = {
        **configuration.given,
        "gpus": gpus,
        "gpus_per_node": cluster.gpus_per_node,
        "layers": model.layers,
        "moe": model.moe is not None,
        "max_positions": model.max_positions,
    }
    stated = {"batch_beside": flags.global_batch, "micro_beside": flags.micro_batch}
    facts |= {name: value for name, value in stated.items() if value}
    return ({"seq_len": flags.seq_len} if flags.seq_len else {}) | facts


def _agree(facts: Facts, flags: CheckFlags) -> None:
    """Raise UserError where a flag and the configuration say different things: one of the two would be dropped."""
    for name, fact in STATED_WITH_FILE.items():
        asked = getattr(flags, name)
        if asked and asked != facts[fact]:
            raise UserError(
                f"--{name.replace('_', '-')} {asked}, but the configuration says {facts[fact]}",
                remedy="leave the flag out, or write its value into the configuration",
            )


def _case(
    configuration: Configuration,
    facts: Facts,
    model: Model,
    cluster: Cluster,
    measured: Calibrations,
    where: str,
    assumed: list[str],
) -> Case:
    """Return the question that a configuration asks."""
    rules = framework_named(configuration.rules)
    if facts.get("seq_len") is None:
        facts["seq_len"] = min(SEQ_LEN, model.max_positions or SEQ_LEN)
        assumed.append(f"sequence length {facts['seq_len']} tokens (the file does not say it)")
    if facts.get("global_batch_size") is None:
        facts |= _open_batch(facts, assumed)
    workload = Workload(seq_len=facts["seq_len"], global_batch_size=facts["global_batch_size"])
    of_launcher = configuration.framework in {
        "accelerate",
        "transformers",
        "megatron-bridge",
    }  # whose version it states
    version = None if of_launcher else configuration.behaves_as or configuration.version
    return build_case(
        where,
        model=model,
        cluster=cluster,
        workload=workload,
        framework=rules,
        runtime={
            "name": rules.runtime_name,
            "version": version,
            **{name: facts[name] for name in RUNTIME_FACTS if name in facts},
        },
        plan=_stated(facts),
        measured=measured,
        assumed=assumed,
        where=where,
        gpus=facts["gpus"],
    )


def _open_batch(facts: Facts, assumed: list[str]) -> Facts:
    """Return the batch of a file that has no key for it, from the flags."""
    dp, steps = facts["dp_replicate"] * facts["dp_shard"], facts.get("steps")
    batch, micro = facts.get("batch_beside"), facts.get("micro_beside")
    if not micro:
        micro = batch // (dp * steps) or 1 if batch and steps else 1
        assumed.append(f"micro batches of {micro} (the file does not say it)")
    if not batch and steps:
        batch = micro * steps * dp
    if not batch:
        batch = max(1, SEQUENCES_PER_GPU * facts["gpus"] // (dp * micro)) * dp * micro
        assumed.append(f"global batch {batch} (the file does not say it)")
    if steps and batch != micro * steps * dp:
        raise BadInput(
            f"global batch {batch} != {micro} a GPU x {steps} accumulated x {dp} data-parallel ranks",
            remedy="leave one of the three open",
        )
    return {"micro_batch_size": micro, "global_batch_size": batch}


def _stated(facts: Facts) -> JsonObject:
    """Return a plan's facts as a case states them: several numbers as a list."""
    return {name: list(v) if isinstance(v := facts[name], tuple) else v for name in PLAN_FACTS if name in facts}


# Other plans.


def _changes(found: PlanAnswer, written: Writer, deadline: float | None) -> tuple[Change, ...]:
    """Return the single changes that gain, most first: what does not fit first has to fit."""
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
        table = asked.estimate([one.plan for one in group])
        for row, one in enumerate(group):
            estimate = table.estimate(row)
            judged.append((estimate.memory.fits, estimate.step_s.value, one.what, one.plan, runtime))
    judged.sort(key=lambda one: (not one[0], one[1]))
    changes = []
    for _, _, what, other, runtime in judged[:PREDICTED]:
        diff = written.diff(other, runtime)
        if not diff or over(deadline):
            continue
        there = predict(replace(question, runtime=runtime), other).estimate
        if now is None or _gains(there, now):
            better = Better(plan=other, runtime=runtime, estimate=there, diff=diff)
            changes.append(Change(what=what, better=better))
    return tuple(sorted(changes, key=lambda one: (one.fit_probability < SURE, one.step_s))[:SHOWN])


def _within(plan: Plan, limits: Limits) -> bool:
    """Return whether a plan's degrees are within those that a kind of file can ask for."""
    held = Bounds(stated={name: values for name, values in limits.items() if values is not None})
    return all(within(getattr(plan, axis), held.spans(axis)) for axis in ("tp", "cp", "pp", "ep"))


def _gains(there: Estimate, now: Estimate) -> bool:
    """Return whether a plan is better: it fits more surely, or is faster and fits as surely."""
    surely, surely_now = there.memory.fit_probability >= SURE, now.memory.fit_probability >= SURE
    if surely is not surely_now:
        return surely
    return there.memory.fits and (not now.memory.fits or there.step_s.value < GAIN * now.step_s.value)


def _best(
    found: PlanAnswer,
    written: Writer,
    changes: tuple[Change, ...],
    deadline: float | None,
    progress: Callable[[str], None] | None,
) -> JsonObject:
    """Return the best plan that the file can say, or why there is none. It is at least as good as every single
    change.
    """
    question, plan = found.case.question, found.case.plan
    # What the file has no key for stays as it is.
    fixed: dict[str, Values] = {
        "recompute": (plan.recompute,),
        "micro_batch_size": exactly(plan.micro_batch_size),
    }
    stated = {name: fixed[name] if values is None else values for name, values in written.configuration.limits.items()}
    try:
        options = SearchOptions(
            bounds=Bounds(stated=stated), top=CANDIDATES, all_variants=True, time_limit_s=left_s(deadline)
        )
        listed = suggest(question, options, progress=progress).plans
    except Infeasible as error:
        return {"no_better": str(error)}
    rivals: list[Better] = []
    for one in listed:
        other = one.plan.with_(placement=())
        if other.pp == 1 and other.reshard_after_forward and plan.reshard_after_forward is None:
            other = other.with_(reshard_after_forward=None)  # the default without stages
        if diff := written.diff(other):
            rivals.append(Better(plan=other, runtime=question.runtime, estimate=one.estimate, diff=diff))
            break
    for rival in (*rivals, *(change.better for change in changes[:1])):
        recompiled = replace(rival.runtime, compile=not rival.runtime.compile)
        asked = replace(question, runtime=recompiled)
        if (
            not over(deadline)
            and is_legal(asked.problems(rival.plan))
            and (diff := written.diff(rival.plan, recompiled))
        ):
            estimate = predict(asked, rival.plan).estimate
            rivals.append(Better(plan=rival.plan, runtime=recompiled, estimate=estimate, diff=diff))
        rivals.append(rival)
    rivals.sort(key=lambda one: (one.estimate.memory.fit_probability < SURE, one.estimate.step_s.value))
    now = found.estimate
    for rival in rivals[:1]:
        if now is None or _gains(rival.estimate, now):
            return {"best": rival}
        return {"no_better": "nothing that the search found is faster by more than half a percent"}
    return {"no_better": "the best plans cannot be said in this kind of file"}
