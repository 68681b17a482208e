"""Read a case into the simulator's types, with a list of assumptions for everything that the source leaves open.

A field that is absent, `null` or `"unknown"` was not stated: it becomes the runtime's default and a line in `assumed`.
Every assumption is listed, and an unknown key is an error, because otherwise a setting would be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.io.inputs import read_cluster
from planner.question.case_fields import (
    case_id,
    fill_gpus,
    gpus_of,
    kind_of,
    plan_value,
    refuse_unknown,
    replicas_of_stage_0,
    section_of,
    stage_of_fsdp,
    stage_of_replicas,
    stated_value,
    unsaid,
    with_modules,
)
from planner.question.case_runtime import (
    described_runtime,
    implied_runtime,
    noted_wide_layers,
    refuse_compile,
    resolve_runtime,
    runtime_section,
)
from planner.question.case_words import PLAN_KEYS, in_sections
from planner.question.flags import Flags, refuse_absent, refuse_unused
from planner.question.notes import card_memory_noted, case_workload, noted_workload, watts_noted
from planner.question.plan_file import PlanFile, load_plan, require_fresh
from planner.question.question import Question, question_of
from planner.question.recipes import (
    default_batch,
    default_length,
    published_recompute,
    recipe_settings,
    usual_framework,
)
from simulator.calibration.calibration import overlap_assumed
from simulator.calibration.distance import distance_text
from simulator.config.hf_config import load_model, model_from_config
from simulator.config.model import Model
from simulator.config.overlap_sites import USERBUFFERS
from simulator.config.plan import PLAN_FIELDS, Plan, default_schedule
from simulator.config.verify import verify_lists, verify_plan, verify_runtime, verify_workload
from simulator.config.workload import Workload
from simulator.fitting.calibrations import UNMEASURED, Calibrations
from simulator.legality.frameworks import Framework, framework_of_runtime
from simulator.runtimes.model_operators import unused_settings
from simulator.step.away import away_assumed
from simulator.step.offload import offload_assumed, paged_assumed
from topology import codec
from topology.catalog.cluster_file import load_cluster, parse_cluster
from topology.catalog.clusters import CASE_KEYS, cluster_from_case
from topology.catalog.gpus import of_memory, of_power
from topology.cluster import ASSUMED, Cluster
from topology.codec import JsonObject
from topology.errors import BadCluster, BadInput, BadModel, UserError
from topology.rates.reach import cluster_caveats

DEFAULT_MODEL, DEFAULT_CLUSTER = "llama3-8b", "dgx-h100"  # used if flags give none


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question of the form "what does this plan cost here?", and the measurement if the source has one.

    `saved` is the plan file it came from, `changed` what flags changed of a file: `tp 4 -> 2`.
    """

    id: str
    question: Question
    plan: Plan
    assumed: tuple[str, ...] = ()
    measured: JsonObject = field(default_factory=dict)
    outcome: str | None = None
    saved: PlanFile | None = None
    changed: tuple[str, ...] = ()


def read_cases(path: str | Path) -> tuple[list[JsonObject], bool]:
    """Return the raw cases of a file, and whether the file held a list of them rather than one.

    `-` reads standard input. Raises BadInput when the file is not a case or a list of cases.
    """
    text, where = codec.read_path_or_stdin(path)
    data = codec.parse_json(text, where=where)
    many = isinstance(data, list)
    cases = data if many else [data]
    for index, case in enumerate(cases):
        if not isinstance(case, dict):
            raise BadInput(
                f"{where}[{index}] is {kind_of(case)}, not a case",
                why="a case is an object with model, cluster, workload, plan and runtime",
                remedy="pass one case or a list of cases",
            )
    return cases, many


def load_case(data: Mapping[str, Any], measured: Calibrations = UNMEASURED) -> Case:
    """Return a Case from its dictionary, or from a row with names of the command line.

    Raises BadModel, BadCluster or BadPlan, naming the field.
    """
    name = case_id(data)
    data = in_sections(data, name)
    model = _model(data.get("model"), name)
    assumed = list(model.assumed)
    note = str(data.get("note") or "")
    cluster, from_cluster = _cluster(_of_card(data.get("cluster"), note, assumed), name)
    assumed += from_cluster
    stated_plan = section_of(data, "plan", name)
    stated_runtime = runtime_section(data, name, assumed)
    workload = case_workload(data.get("workload"), name)
    workload, from_note = noted_workload(workload, note, model, stated_runtime["name"])
    assumed += from_note
    if data.get("source") and unsaid(section_of(data, "runtime", name).get("version")):
        stated_plan |= published_recompute(stated_plan.get("recompute"), stated_runtime["name"], assumed)
    stated_runtime |= noted_wide_layers(stated_runtime, note, model.layers, assumed)
    framework = framework_of_runtime(stated_runtime["name"])
    if all(unsaid(stated_plan.get(axis)) for axis in ("dp_replicate", "dp_shard")):
        assumed += fill_gpus(stated_plan, framework, cluster.gpu_count)
    seen = _measured(data, name, assumed)
    outcome = data.get("outcome")
    return build_case(
        name,
        model=model,
        cluster=cluster,
        workload=workload,
        framework=framework,
        runtime=stated_runtime,
        plan=stated_plan,
        measured=measured,
        assumed=assumed,
        where=f"case {name}",
        seen=seen,
        outcome=outcome if isinstance(outcome, str) else None,
    )


def build_case(
    name: str,
    *,
    model: Model,
    cluster: Cluster,
    workload: Workload,
    framework: Framework,
    runtime: Mapping[str, Any],
    plan: Mapping[str, Any],
    measured: Calibrations,
    assumed: Sequence[str],
    where: str,
    gpus: int | None = None,
    seen: Mapping[str, Any] | None = None,
    outcome: str | None = None,
) -> Case:
    """Return the case of a stated plan and runtime; what is left open has the framework's defaults and is listed.

    `assumed` has earlier assumptions, `seen` the measurements. Raises BadPlan for impossible values; `where` begins the
    message.
    """
    runtime, plan, from_recipes = recipe_settings(runtime, plan, model, cluster, workload)
    stated, implied = implied_runtime(dict(runtime), plan, framework)
    resolved, from_runtime = resolve_runtime(stated)
    chosen, from_plan = complete_plan(plan, workload, framework, where=where, experts=model.moe is not None)
    verify_lists(chosen, where=where, layers=model.layers, gpus=max(chosen.gpus, cluster.gpu_count))
    verify_workload(workload, where=where)
    verify_runtime(resolved, where=where)
    question = question_of(
        model, cluster, workload, framework=framework, runtime=resolved, calibration=measured.on(cluster), gpus=gpus
    )
    said = all_assumed([*assumed, *from_recipes, *implied, *from_runtime, *from_plan], [chosen], question, measured)
    return Case(id=name, question=question, plan=chosen, assumed=said, measured=dict(seen or {}), outcome=outcome)


def _measured(data: Mapping[str, Any], name: str, assumed: list[str]) -> JsonObject:
    """Return the measurements; if only the note says that FLOP/s count what ran, `flops_are` becomes hardware."""
    seen = data.get("measured") or {}
    if not isinstance(seen, dict):
        raise BadInput(f"case {name}: measured is {kind_of(seen)}, not an object")
    if (
        unsaid(seen.get("flops_are"))
        and seen.get("tflops_per_gpu")
        and "hardware flop" in str(data.get("note")).lower()
    ):
        assumed.append("measured.flops_are hardware (the note says so)")
        return {**seen, "flops_are": "hardware"}
    return seen


def named_case(path: str | Path, name: str | None, measured: Calibrations = UNMEASURED) -> Case:
    """Return the case of a file whose id is `name`, the first if None. Raises UserError when the file has no such
    case.
    """
    raw, _ = read_cases(path)
    for data in raw:
        if name is None or case_id(data) == name:
            return load_case(data, measured)
    known = ", ".join(case_id(data) for data in raw[:8]) or "no case"
    raise UserError(f"no case {name!r} in {path}", why=f"it has {known}", remedy="pass one of these to --id")


def case_of_plan_file(path: Path, measured: Calibrations = UNMEASURED) -> Case:
    """Return the question that a saved plan answers. Raises the errors of `load_plan`, and Stale for a profile other
    than the one used then.
    """
    content = load_plan(path)
    if measured.profile is not None and "profile" in content.fingerprints:
        require_fresh(content, profile=measured.profile)
    question = content.question(measured.on(content.cluster))
    assumed = all_assumed([], [content.plan], question, measured)
    return Case(id=path.name, question=question, plan=content.plan, assumed=assumed, saved=content)


def case_of_file(path: str, name: str | None = None, measured: Calibrations = UNMEASURED) -> Case:
    """Return what a file is about: a saved plan's question, or a case (of a list that called `name`, else the
    first).
    """
    if str(path) != "-":
        data = codec.read_json(path)
        if isinstance(data, dict) and "fingerprints" in data:
            return case_of_plan_file(Path(path), measured)
    return named_case(path, name, measured)


def case_from_flags(flags: Flags, measured: Calibrations = UNMEASURED) -> Case:
    """Return the case that flags describe.

    An open data-parallel degree fills the GPUs; an open number of GPUs follows from the degrees if these require more
    than the cluster has.
    """
    assumed: list[str] = []
    model, cluster = flags.model or DEFAULT_MODEL, flags.cluster or DEFAULT_CLUSTER
    assumed += [] if flags.model else [f"model {model}"]
    assumed += [] if flags.cluster else [f"cluster {cluster}"]
    network = load_model(model)
    refuse_absent(flags, network)
    stated_plan = {key: value for key, value in flags.plan.items() if value is not None}
    whole = read_cluster(cluster, gpu=flags.gpu)
    named = dict(flags.runtime)
    if not named.get("name"):
        named["name"], why = usual_framework(whole, named)
        assumed += why
    named |= described_runtime(named, stated_plan, assumed)
    framework = framework_of_runtime(named["name"])
    count = max(flags.gpus) if flags.gpus else gpus_of(stated_plan, whole.gpu_count)
    machine = read_cluster(cluster, count, gpu=flags.gpu)
    if not flags.gpus and count != whole.gpu_count:
        assumed.append(f"{count} GPUs (the product of the degrees)")
    workload, whose = stated_workload(flags, network, count)
    assumed += whose
    if flags.global_batch is None and "micro_batch_size" not in stated_plan:
        stated_plan["micro_batch_size"] = 1
        assumed.append("micro batch 1")
    assumed += [*fill_gpus(stated_plan, framework, count), *replicas_of_stage_0(stated_plan, framework)]
    named |= {"name": framework.runtime_name} if named["name"] == framework.name else {}  # "any" is not a runtime
    case = build_case(
        "flags",
        model=network,
        cluster=machine,
        workload=workload,
        framework=framework,
        runtime=named,
        plan=stated_plan,
        measured=measured,
        assumed=[*assumed, *network.assumed],
        where="flags",
        gpus=count,
    )
    refuse_unused(flags, case.plan)
    refuse_compile(flags.runtime, case.question.runtime.name)
    return case


def stated_workload(flags: Flags, model: Model, gpus: int) -> tuple[Workload, list[str]]:
    """Return the workload of flags, and the source of its batch if they leave it open."""
    seq_len = flags.seq_len or default_length(model)
    recommended, whose = default_batch(model, seq_len, gpus, tuned=bool(flags.runtime.get("adapter")))
    batch = flags.global_batch or recommended
    workload = Workload(
        seq_len=seq_len,
        global_batch_size=batch,
        routing=flags.routing or "",
        document_len=flags.document_len or 0,
    )
    assumed = [whose] if flags.global_batch is None else []
    return workload, [*assumed, *([] if flags.seq_len else [f"sequence length {seq_len:,} tokens"])]


def all_assumed(
    assumed: Sequence[str], plans: Sequence[Plan], question: Question, measured: Calibrations
) -> tuple[str, ...]:
    """Return all assumptions, each once: earlier ones, and those of the machine, the profile, and features of `plans`
    that were not measured.
    """
    lines = (
        *assumed,
        *cluster_caveats(question.cluster),
        *measured.doubts(question.cluster),
        *distance_text(question.cluster, question.runtime, max((plan.gpus for plan in plans), default=1)),
        *overlap_assumed([plan.tp_overlap for plan in plans], question.calibration),
        *offload_assumed(plans, question.cluster),
        *paged_assumed(question.runtime, question.cluster, max((plan.gpus for plan in plans), default=1)),
        *away_assumed(question.runtime, plans, question.cluster),
        *unused_settings(question.model, question.runtime, question.workload),
    )
    return tuple(dict.fromkeys(lines))


def complete_plan(
    stated: Mapping[str, Any], workload: Workload, framework: Framework, *, where: str, experts: bool = False
) -> tuple[Plan, list[str]]:
    """Return the Plan that `stated` describes, with the framework's defaults for unstated fields, and the assumptions.

    An unstated micro batch is one sequence in a pipeline (torchtitan's default), else the whole share of a
    data-parallel rank, as without gradient accumulation. `experts`: the model has some.
    """
    refuse_unknown(stated, PLAN_KEYS, f"{where}: plan")
    stated, assumed = with_modules(stated, f"{where}: plan")
    values = {
        name: plan_value(known, value, f"{where}: plan.{name}")
        for name, known in PLAN_FIELDS.items()
        if (value := stated_value(stated, name)) is not None
    }
    unstated = [
        name for name, known in PLAN_FIELDS.items() if known.is_degree and name in stated and name not in values
    ]
    assumed += [f"{name} 1 (not stated)" for name in unstated]
    assumed += [*stage_of_replicas(values, framework), *stage_of_fsdp(values, framework, where)]
    tp, pp = values.get("tp", 1), values.get("pp", 1)
    if "sequence_parallel" not in values:
        needed = experts and framework.sequential_experts
        values["sequence_parallel"] = (framework.sequence_parallel_default or needed) and tp > 1
        if tp > 1:
            assumed.append(
                f"sequence parallelism {'on' if values['sequence_parallel'] else 'off'} ({framework.title}"
                + ("'s experts need it)" if needed else "'s default)")
            )
    if experts and framework.splits_experts and "etp" not in values and tp > 1:
        values["etp"], why = _expert_split(values, tp)
        assumed.append(why)
    if "schedule" in values and pp == 1:
        del values["schedule"]
        assumed.append(f"schedule {stated_value(stated, 'schedule')} changes nothing: there is no pipeline (pp 1)")
    elif "schedule" not in values and pp > 1:
        values["schedule"] = default_schedule(values.get("virtual_stages", 1))
        assumed.append(f"schedule {values['schedule']} (not stated)")
    if "recompute" not in values:
        values["recompute"] = framework.default_recompute
        assumed.append(f"recompute {values['recompute']} ({framework.title}'s default)")
    if values.get("tp_overlap") == USERBUFFERS and tp == 1:
        del values["tp_overlap"]
        assumed.append(f"tp_overlap {USERBUFFERS} changes nothing: there is no tensor parallelism (tp 1)")
    if "micro_batch_size" not in values:
        dp = values.get("dp_replicate", 1) * values.get("dp_shard", 1)
        whole = workload.global_batch_size % dp == 0
        size = workload.global_batch_size // dp if pp == 1 and whole else 1
        reason = "a pipeline's default" if pp > 1 else "the whole share of a data-parallel rank"
        values["micro_batch_size"] = size
        assumed.append(f"micro batch {size} ({reason})")
    plan = Plan(**values)
    verify_plan(plan, where=where)
    return plan, assumed


def _expert_split(values: Mapping[str, Any], tp: int) -> tuple[int, str]:
    """Return the default number of ranks that split each expert, and why: all of tensor parallelism, unless a stage has
    too few ranks.
    """
    ranks = tp
    for axis in ("dp_replicate", "dp_shard", "cp"):
        ranks *= values.get(axis, 1)
    if ranks % (tp * values.get("ep", 1)) == 0:
        return tp, f"etp {tp} (not stated: that of tensor parallelism)"
    return 1, f"etp 1 (not stated: tp {tp} x ep {values.get('ep', 1)} are more than the {ranks} ranks of a stage)"


# --- one field at a time ------------------------------------------------------------------------------------------


def _model(value: Any, name: str) -> Model:
    if isinstance(value, str):
        return load_model(value)
    if isinstance(value, dict):
        return model_from_config(value, name=str(value.get("_name_or_path") or value.get("name") or name))
    raise BadModel(
        f"case {name}: model is {kind_of(value)}",
        why="a model is a config.json dictionary or the name of a shipped one",
        remedy='for example "llama3-8b"',
    )


def _cluster(value: Any, name: str) -> tuple[Cluster, list[str]]:
    if isinstance(value, str):
        return load_cluster(value), []
    if isinstance(value, dict) and not set(value) <= set(CASE_KEYS):  # the content of a cluster file
        found = parse_cluster({k: v for k, v in value.items() if not unsaid(v)}, where=f"case {name}: cluster")
        texts = (finding.what for finding in found.findings if finding.what.startswith(ASSUMED))
        return found, [text.removeprefix(ASSUMED) for text in texts]
    if isinstance(value, dict):
        cluster, assumed = cluster_from_case(value)
        return cluster, list(assumed)
    raise BadCluster(
        f"case {name}: cluster is {kind_of(value)}",
        why="a cluster is {gpu, gpus_per_node, nodes, interconnect, nic_gbit_per_gpu} or a name or file",
        remedy='for example "dgx-h100"',
    )


def _of_card(value: Any, note: str, assumed: list[str]) -> Any:
    """Return the cluster of a case with the card of the power or memory that a note names, if the catalogue has it."""
    if not isinstance(value, dict) or not isinstance(value.get("gpu"), str):
        return value
    watts, gib = watts_noted(note), card_memory_noted(note)
    for said, unit, find, size in ((watts, "W", of_power, 1.0), (gib, "GiB", of_memory, 2.0**30)):
        if said is not None and (variant := find(value["gpu"], said * size)) is not None:
            assumed.append(f"{variant.title} (the note speaks of {said} {unit})")
            return {**value, "gpu": variant.name}
    return value
