"""The question of a configuration: its model, machine, plan, workload and runtime, and what it leaves open."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from planner.configs.formats.configuration import CheckFlags, Configuration
from planner.configs.formats.kinds import read_configuration
from planner.configs.written_back import Writer
from planner.export.mapping import PLAN_FACTS, RUNTIME_FACTS, Facts, NotStated, read
from planner.io.inputs import read_cluster
from planner.question.case_runtime import implied_runtime, resolve_runtime
from planner.question.cases import DEFAULT_CLUSTER, Case, build_case, complete_plan
from planner.question.question import rule_facts
from planner.question.recipes import SEQ_LEN, default_length
from simulator.config.hf_config import load_model
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.fitting.calibrations import UNMEASURED, Calibrations
from simulator.legality.frameworks import Framework, framework_of_runtime
from simulator.legality.rule import UNKNOWN_MODEL, Grade, Problem
from simulator.legality.rules import problems_without_model
from topology.cluster import Cluster, NodeGroup
from topology.errors import BadInput, PlannerError, Unproved, UserError
from topology.rates.reach import require_plannable

MOST_NODES = 2048  # most nodes tried if a configuration leaves its number of GPUs open
# Flags, and the facts of a configuration that must not contradict them.
GIVEN = {"gpus": "gpus", "seq_len": "seq_len", "global_batch": "global_batch_size", "micro_batch": "micro_batch_size"}
# Rules of ours that no framework has.
OURS = frozenset({"ep-overlap-sharding", "ep-overlap-reshard"})
# Frameworks whose version is a launcher's, not that of the software that runs.
LAUNCHERS = frozenset({"accelerate", "transformers", "megatron-bridge"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Something that a configuration leaves open and that an answer needs; `remedy` says how to state it."""

    what: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A configuration without its model: enough for the rules that need no model, but not for costs."""

    plan: Plan
    workload: Workload
    runtime: Runtime
    framework: Framework
    cluster: Cluster
    gpus: int

    def problems(self) -> tuple[Problem, ...]:
        """Return the problems found by the rules that need no model."""
        facts = rule_facts(UNKNOWN_MODEL, self.cluster, self.workload, self.framework, self.runtime, self.gpus)
        found = problems_without_model(self.plan, facts)
        return tuple(problem for problem in found if problem.message != self.runtime.not_modelled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The question that a configuration asks: `facts` are the facts of its plan, `given` the inputs of its reader.
    `open_length` is the tokens of a sequence that it is judged at, where it does not say them.

    `case` is None if it contradicts itself (`problems`) or leaves something open (`questions`). If only the model is
    open, `stated` has the rest.
    """

    configuration: Configuration
    assumed: tuple[str, ...]
    given: Facts = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    open_length: int | None = None
    case: Case | None = None
    stated: Stated | None = None
    problems: tuple[Problem, ...] = ()
    questions: tuple[Open, ...] = ()

    def writer(self, where: str, flags: CheckFlags) -> Writer:
        """Return the writer of other plans into the configuration, which must have a case."""
        if self.case is None:
            raise ValueError("a configuration without a case has no plan to write over")
        return Writer(
            configuration=self.configuration,
            asked=self.case,
            facts=self.facts,
            given=self.given,
            where=where,
            flags=flags,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    """The machine of a configuration; `open_gpus`: it does not state how many of its GPUs are used."""

    cluster: Cluster
    name: str
    gpus: int
    open_gpus: bool


def ask(text: str, where: str, flags: CheckFlags, *, measured: Calibrations = UNMEASURED) -> Asked:
    """Return the question of a configuration, without its answer.

    Raises BadInput (exit 2) for a text that cannot be read or an unknown model or cluster, Stale (exit 1) for a profile
    in doubt if it is refused.
    """
    configuration = read_configuration(text, where, flags)
    assumed = list(configuration.assumed)
    model, unknown = _model(configuration, flags, assumed)
    machine = _machine(configuration, flags, assumed)
    measured.check(machine.cluster)
    found = Asked(configuration=configuration, assumed=tuple(assumed), questions=unknown)
    try:
        given, facts, machine = _facts(configuration, flags, model, machine, assumed)
        assumed += facts.pop("unused", ())
        if facts.get("seq_len") is None:
            facts["seq_len"] = default_length(model) if model else SEQ_LEN
            assumed.append(f"sequence length {facts['seq_len']:,} tokens (the file does not say it)")
            found = replace(found, open_length=facts["seq_len"])
        if facts.get("global_batch_size") is None:
            facts |= _open_batch(facts, assumed)
        stated, defaults = _stated(configuration, facts, machine.cluster, where)
        case = None
        if model is not None:
            case = _case(configuration, stated, facts, model, measured, where, assumed)
    except NotStated as error:
        question = Open(what="; ".join(filter(None, (error.what, error.why))), remedy=error.remedy)
        return replace(found, assumed=tuple(assumed), questions=(*unknown, question))
    except Unproved:  # the time is over, which says nothing of the file
        raise
    except PlannerError as error:
        problem = Problem(rule="configuration", grade=Grade.ILLEGAL, message=str(error).replace("\n ", ";"))
        if configuration.elsewhere:
            return replace(found, assumed=tuple(assumed), questions=(*unknown, _unless(problem, configuration)))
        return replace(found, assumed=tuple(assumed), problems=(problem,))
    _agree(facts, flags)
    said = tuple(dict.fromkeys((*assumed, *defaults))) if case is None else case.assumed
    if reason := stated.runtime.not_modelled:  # a limit of ours, not an error in the file
        case, unknown = None, (*unknown, Open(what=reason, remedy="bfloat16 and AdamW in the file have a prediction"))
    if doubts := _doubts(configuration, stated, case):
        return replace(found, assumed=said, questions=(*unknown, *doubts))
    rest = None if case is not None else stated
    return replace(found, assumed=said, questions=unknown, given=given, facts=facts, case=case, stated=rest)


def _doubts(configuration: Configuration, stated: Stated, case: Case | None) -> tuple[Open, ...]:
    """Return why it is open whether the framework refuses the plan: a rule is ours alone, or another file decides."""
    problems = stated.problems() if case is None else case.question.problems(case.plan)
    refused = [problem for problem in problems if problem.grade is Grade.ILLEGAL]
    ours = [problem for problem in refused if problem.rule in OURS]
    if refused and configuration.elsewhere:
        return (_unless(refused[0], configuration),)
    return tuple(Open(what=problem.message, remedy="without it there is a prediction") for problem in ours[:1])


def _unless(problem: Problem, configuration: Configuration) -> Open:
    elsewhere = ", ".join(configuration.elsewhere)[:200]
    what = f"{problem.message}, unless it is otherwise by what is not read: {elsewhere}"
    return Open(what=what, remedy="check the configuration that the tool prints or saves when it starts")


# What the file describes.


def _model(
    configuration: Configuration, flags: CheckFlags, assumed: list[str]
) -> tuple[Model | None, tuple[Open, ...]]:
    """Return the model, or the question about it, or why its cost is not modelled."""
    if configuration.no_cost:
        return None, (
            Open(what=configuration.no_cost, remedy="planner suggest --model of the whole for full training"),
        )
    model = load_model(flags.model) if flags.model else configuration.model
    if model is not None:
        assumed[:0] = model.assumed
        return model, ()
    which = configuration.unknown_model or "the file does not say which model it trains"
    return None, (Open(what=f"which model? {which}", remedy="--model with its name on the Hub or its config.json"),)


def _machine(configuration: Configuration, flags: CheckFlags, assumed: list[str]) -> _Machine:
    """Return the cluster and the number of GPUs; assumptions are listed."""
    name = flags.cluster or configuration.cluster or DEFAULT_CLUSTER
    if not flags.cluster:
        assumed.append(f"cluster {name}" + (" (the file's own comment)" if configuration.cluster else ""))
    whole = read_cluster(name, gpu=flags.gpu)
    require_plannable(whole)  # errors of the machine before those of the plan
    gpus = flags.gpus or configuration.gpus
    if gpus and not flags.gpus and configuration.in_a_comment:
        assumed.append(f"{gpus} GPUs (the file's own comment)")
    count = gpus or whole.gpu_count
    if not gpus and configuration.machines and configuration.machines > whole.node_count:
        each = whole.gpus_per_node // len({gpu.tray for gpu in whole.groups[0].node.gpus})
        count = gpus = configuration.machines * each
        assumed.append(f"{count} GPUs: {each} on each of the {configuration.machines} nodes that the file states")
    cluster = read_cluster(name, count, gpu=flags.gpu)
    if gpus and configuration.machines:
        cluster = _spread(cluster, name, count, configuration.machines, flags)
    return _Machine(cluster=cluster, name=name, gpus=count, open_gpus=not gpus)


def _spread(cluster: Cluster, name: str, gpus: int, machines: int, flags: CheckFlags) -> Cluster:
    """Return `gpus` GPUs on the stated number of machines, if that is more than they need.

    A machine is a host: a node, or a tray of one that spans a rack.
    """
    each = gpus // machines
    hosts = {gpu.tray for gpu in cluster.groups[0].node.gpus}
    if gpus % machines or machines <= cluster.node_count * len(hosts) or each * len(hosts) >= cluster.gpus_per_node:
        return cluster
    several = read_cluster(name, machines * read_cluster(name, gpu=flags.gpu).gpus_per_node, gpu=flags.gpu)
    node = read_cluster(name, each, gpu=flags.gpu).groups[0].node
    return replace(several, groups=(NodeGroup(node=node, count=machines),))


def _facts(
    configuration: Configuration, flags: CheckFlags, model: Model | None, machine: _Machine, assumed: list[str]
) -> tuple[Facts, Facts, _Machine]:
    """Return the inputs of a configuration's reader and the facts that it reads, for the machine's GPUs.

    If their number is not stated, they are the cluster's, or as few whole nodes as the stated degrees fill.
    """
    given = _given(configuration, flags, model, machine)
    if not machine.open_gpus:
        return given, read(configuration.table, configuration.settings, given), machine
    count, facts = _filled(configuration, given, machine.gpus)
    whose = "the cluster's" if count == machine.gpus else "as few as the stated degrees fill"
    assumed.append(f"{count} GPUs ({whose}; say another number with --gpus)")
    if count != machine.gpus:
        machine = replace(machine, cluster=read_cluster(machine.name, count, gpu=flags.gpu), gpus=count)
    return {**given, "gpus": count}, facts, machine


def _filled(configuration: Configuration, given: Facts, each: int) -> tuple[int, Facts]:
    """Return the smallest number of GPUs that the stated degrees fill, in whole nodes of `each` if a degree is open,
    and the facts for it. Raises BadInput where the file cannot be read on any number.
    """

    def facts_on(count: int) -> tuple[int, Facts]:
        return count, read(configuration.table, configuration.settings, {**given, "gpus": count})

    first: BadInput | None = None
    for nodes in range(1, MOST_NODES + 1):
        try:
            count, facts = facts_on(nodes * each)
            product = math.prod(facts.get(axis) or 1 for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp"))
            if product != count:  # all degrees are stated
                count, facts = facts_on(product)
        except NotStated:
            raise
        except BadInput as error:
            first = first or error
            continue
        if (count // (facts.get("pp") or 1)) % (facts.get("ep") or 1) == 0:
            return count, facts
    if first is not None:
        raise first
    return facts_on(each)


def _given(configuration: Configuration, flags: CheckFlags, model: Model | None, machine: _Machine) -> Facts:
    facts: Facts = {**configuration.given, "gpus": machine.gpus, "gpus_per_node": machine.cluster.gpus_per_node}
    if model is not None:
        facts |= {"layers": model.layers, "moe": model.moe is not None, "max_positions": model.max_positions}
    given = {"batch_beside": flags.global_batch, "micro_beside": flags.micro_batch}
    facts |= {name: value for name, value in given.items() if value}
    return ({"seq_len": flags.seq_len} if flags.seq_len else {}) | facts


def _agree(facts: Facts, flags: CheckFlags) -> None:
    """Raise UserError where a flag and the configuration disagree, since one of the two would be ignored."""
    for name, fact in GIVEN.items():
        asked = getattr(flags, name)
        if asked and asked != facts[fact]:
            raise UserError(
                f"--{name.replace('_', '-')} {asked}, but the configuration says {facts[fact]}",
                remedy="leave the flag out, or write its value into the configuration",
            )


def _open_batch(facts: Facts, assumed: list[str]) -> Facts:
    """Return the batch of a file without a key for it, from the inputs; without a statement, gradients are not
    accumulated.
    """
    dp, steps = facts["dp_replicate"] * facts["dp_shard"], facts.get("steps")
    batch, micro = facts.get("batch_beside"), facts.get("micro_beside")
    if not micro:
        micro = batch // (dp * steps) or 1 if batch and steps else 1
        assumed.append(f"micro batches of {micro} (the file does not say it)")
    if not batch and steps:
        batch = micro * steps * dp
    if not batch:
        batch = micro * dp
        assumed.append(f"global batch {batch} (the file does not say it; nothing is accumulated)")
    if steps and batch != micro * steps * dp:
        raise BadInput(
            f"global batch {batch} != {micro} a GPU x {steps} accumulated x {dp} data-parallel ranks",
            remedy="leave one of the three open",
        )
    return {"micro_batch_size": micro, "global_batch_size": batch}


def _runtime(configuration: Configuration, facts: Facts) -> dict[str, Any]:
    """Return a runtime in the form of a case."""
    launcher = configuration.framework in LAUNCHERS
    return {
        "name": configuration.runtime or configuration.rules,
        "version": None if launcher else configuration.behaves_as or configuration.version,
        **{name: facts[name] for name in RUNTIME_FACTS if name in facts},
    }


def _plan(facts: Facts) -> dict[str, Any]:
    """Return a plan's facts in the form of a case; several numbers as a list."""
    return {name: list(v) if isinstance(v := facts[name], tuple) else v for name in PLAN_FACTS if name in facts}


def _stated(configuration: Configuration, facts: Facts, cluster: Cluster, where: str) -> tuple[Stated, list[str]]:
    """Return everything that a configuration states except its model, and the assumptions. Raises BadPlan for
    impossible values.
    """
    rules = framework_of_runtime(configuration.rules)
    workload = Workload(
        seq_len=facts["seq_len"],
        global_batch_size=facts["global_batch_size"],
        document_len=facts.get("document_len", 0),
        routing=facts.get("routing", ""),
    )
    stated, implied = implied_runtime(_runtime(configuration, facts), _plan(facts), rules)
    runtime, from_runtime = resolve_runtime(stated)
    plan, from_plan = complete_plan(_plan(facts), workload, rules, where=where)
    found = Stated(plan=plan, workload=workload, runtime=runtime, framework=rules, cluster=cluster, gpus=facts["gpus"])
    return found, [*implied, *from_runtime, *from_plan]


def _case(
    configuration: Configuration,
    stated: Stated,
    facts: Facts,
    model: Model,
    measured: Calibrations,
    where: str,
    assumed: list[str],
) -> Case:
    """Return the question of a configuration."""
    return build_case(
        where,
        model=model,
        cluster=stated.cluster,
        workload=stated.workload,
        framework=stated.framework,
        runtime=_runtime(configuration, facts),
        plan=_plan(facts),
        measured=measured,
        assumed=assumed,
        where=where,
        gpus=facts["gpus"],
    )
