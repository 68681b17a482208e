"""A case as a source tells it, turned into what the simulator takes, with a list of everything it left unsaid.

A field that is absent, `null` or `"unknown"` was not stated: it becomes the runtime's default and a line in `assumed`.
Nothing is guessed in silence, and a key nobody knows is an error, because it would otherwise be a setting ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.case_fields import (
    flag,
    ignored_keys,
    kind_of,
    positive,
    refuse_unknown,
    section_of,
    stated_value,
    whole_number,
    whole_numbers,
    word_of,
    words_of,
)
from planner.case_runtime import implied_runtime, resolve_runtime, runtime_section, version_of_source
from planner.frameworks import Framework, framework_named, framework_of_runtime
from planner.plan_file import load_plan
from simulator.overlap_sites import canonical
from simulator.plan import Plan
from simulator.workload import Workload
from topology import codec
from topology.errors import BadCluster, BadInput, BadModel, UserError

if TYPE_CHECKING:
    from simulator.model import Model
    from simulator.runtime import Runtime
    from topology.cluster import Cluster

SEQUENCES_PER_GPU = 8  # the global batch assumed when flags give none

_CASE_KEYS = ("id", "model", "cluster", "workload", "plan", "runtime", "measured", "outcome", "source", "note", "peers")
_DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "virtual_stages")
_PLAN_KEYS = (
    *_DEGREES,
    "zero_stage",
    "sequence_parallel",
    "schedule",
    "micro_batch_size",
    "recompute",
    "tp_overlap",
    "reshard_after_forward",
    "layers_per_stage",
    "recompute_per_stage",
    "cp_method",
    "capacity_factor",
    "placement",
)
# One meaning, many spellings. A word not listed here is kept: it is the runtime's own.
_RECOMPUTE = {
    "per-op selective": "selective-op",
    "per-op": "selective-op",
    "selective_op": "selective-op",
    "op": "selective-op",
    "off": "none",
    "no": "none",
    "full-recompute": "full",
    "yes": "full",
}
_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved1f1b": "Interleaved1F1B",
    "interleaved": "Interleaved1F1B",
    "loopedbfs": "LoopedBFS",
    "interleavedzerobubble": "InterleavedZeroBubble",
    "zbvzerobubble": "ZBVZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question of the form "what does this plan cost here?", and what was measured if the source says."""

    id: str
    model: Model
    cluster: Cluster
    workload: Workload
    plan: Plan
    runtime: Runtime
    framework: Framework
    gpus: int | None = None  # None: the plan must fill the cluster
    assumed: tuple[str, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    outcome: str | None = None
    note: str = ""


def read_cases(path: str | Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the raw cases of a file, and whether the file held a list of them rather than one.

    `-` reads standard input. Raises BadInput when the file is not a case or a list of cases.
    """
    text, where = codec.read_given(path)
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


def load_case(data: Mapping[str, Any]) -> Case:
    """Return a Case from its dictionary. Raises BadModel, BadCluster or BadPlan, naming the field."""
    name = case_id(data)
    assumed = ignored_keys(data, _CASE_KEYS, f"case {name}")
    model = _model(data.get("model"), name)
    assumed += model.assumed
    cluster, from_cluster = _cluster(data.get("cluster"), name)
    assumed += from_cluster
    workload = _workload(data.get("workload"), name, assumed)
    stated_plan = section_of(data, "plan", name)
    stated_runtime = runtime_section(data, name, assumed)
    framework = framework_of_runtime(stated_runtime["name"])
    if data.get("source"):
        assumed += version_of_source(stated_runtime)
    stated_runtime, implied = implied_runtime(stated_runtime, stated_plan, framework)
    runtime, from_runtime = resolve_runtime(stated_runtime)
    assumed += [*implied, *from_runtime]
    plan, from_plan = complete_plan(stated_plan, workload, framework, where=f"case {name}")
    assumed += from_plan
    measured = data.get("measured") or {}
    if not isinstance(measured, dict):
        raise BadInput(f"case {name}: measured is {kind_of(measured)}, not an object")
    outcome = data.get("outcome")
    return Case(
        id=name,
        model=model,
        cluster=cluster,
        workload=workload,
        plan=plan,
        runtime=runtime,
        framework=framework,
        assumed=tuple(dict.fromkeys(assumed)),
        measured=measured,
        outcome=outcome if isinstance(outcome, str) else None,
        note=str(data.get("note") or ""),
    )


def named_case(path: str | Path, name: str | None) -> Case:
    """Return the case of a file whose id is `name`, the first if None. Raises UserError when the file has no such case."""
    raw, _ = read_cases(path)
    for data in raw:
        if name is None or case_id(data) == name:
            return load_case(data)
    known = ", ".join(case_id(data) for data in raw[:8]) or "no case"
    raise UserError(f"no case {name!r} in {path}", why=f"it has {known}", remedy="pass one of these to --id")


def case_of_plan_file(path: Path) -> Case:
    """Return the question that a saved plan answers. Raises what `load_plan` raises."""
    content = load_plan(path)
    return Case(
        id=path.name,
        model=content.model,
        cluster=content.cluster,
        workload=content.workload,
        plan=content.plan,
        runtime=content.runtime,
        framework=framework_named(content.framework),
        gpus=content.plan.gpus,
    )


def case_of_file(path: str, name: str | None = None) -> Case:
    """Return what a file is about: a saved plan's question, or a case (of a list that called `name`, else the first)."""
    if str(path) != "-":
        data = codec.read_json(path)
        if isinstance(data, dict) and "fingerprints" in data:
            return case_of_plan_file(Path(path))
    return named_case(path, name)


def case_from_flags(
    *,
    model: str | None,
    cluster: str | None,
    gpus: int | None,
    gpu: str | None = None,
    seq_len: int,
    global_batch: int | None,
    plan: Mapping[str, Any],
    runtime: Mapping[str, Any],
) -> Case:
    """Return the case that flags of the command line describe; None where a flag was not given.

    The data-parallel degree left unsaid fills the GPUs; a GPU count left unsaid follows from the degrees, where they
    say more than the cluster's own count.
    """
    from planner.inputs import cluster_of  # noqa: PLC0415 - keeps `--help` light
    from simulator.hf_config import load_model  # noqa: PLC0415 - keeps `--help` light

    assumed: list[str] = []
    if model is None:
        model = "llama3-8b"
        assumed.append("model llama3-8b")
    if cluster is None:
        cluster = "dgx-h100"
        assumed.append("cluster dgx-h100")
    framework = framework_of_runtime(str(runtime["name"]))
    network = load_model(model)
    stated_plan = {key: value for key, value in plan.items() if value is not None}
    whole = cluster_of(cluster, gpu=gpu)
    count = gpus or _gpus_of(stated_plan, whole.gpu_count)
    machine = cluster_of(cluster, count, gpu=gpu)
    if gpus is None and count != whole.gpu_count:
        assumed.append(f"{count} GPUs (the product of the degrees)")
    batch = global_batch or SEQUENCES_PER_GPU * count
    if global_batch is None:
        assumed.append(f"global batch {batch} sequences ({SEQUENCES_PER_GPU} a GPU)")
    workload = Workload(seq_len=seq_len, global_batch_size=batch)
    by_stage = bool(framework.zero_stages) and "zero_stage" in stated_plan
    filled = "dp_replicate" if by_stage else framework.fills
    degree = _filling(stated_plan, count)
    if degree > 1 and filled not in stated_plan and not (filled == "dp_replicate" and "dp_shard" in stated_plan):
        stated_plan[filled] = degree
        assumed.append(f"{filled} {degree} (fills {count} GPUs)")
    stated_runtime, implied = implied_runtime(dict(runtime), stated_plan, framework)
    resolved, from_runtime = resolve_runtime(stated_runtime)
    chosen, from_plan = complete_plan(stated_plan, workload, framework, where="flags")
    return Case(
        id="flags",
        model=network,
        cluster=machine,
        workload=workload,
        plan=chosen,
        runtime=resolved,
        framework=framework,
        gpus=count,
        assumed=tuple(dict.fromkeys([*assumed, *network.assumed, *implied, *from_runtime, *from_plan])),
    )


def _product(stated: Mapping[str, Any]) -> int:
    product = 1
    for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp"):
        product *= int(stated.get(axis, 1))
    return product


def _gpus_of(stated: Mapping[str, Any], available: int) -> int:
    """Return the GPUs that degrees ask for: their product where data parallelism is stated or it exceeds a cluster."""
    product = _product(stated)
    return product if {"dp_replicate", "dp_shard"} & set(stated) or product > available else available


def _filling(stated: Mapping[str, Any], gpus: int) -> int:
    """Return the degree that fills `gpus`; 1 where none does, for the world-size rule to complain."""
    product = _product(stated)
    return gpus // product if gpus % product == 0 else 1


def case_id(data: Mapping[str, Any]) -> str:
    """Return a case's id, or `case` where it has none."""
    name = data.get("id")
    return name if isinstance(name, str) and name else "case"


def complete_plan(
    stated: Mapping[str, Any], workload: Workload, framework: Framework, *, where: str
) -> tuple[Plan, list[str]]:
    """Return the Plan that `stated` describes, unstated fields at the framework's defaults, and what was assumed.

    An unstated micro batch is one sequence in a pipeline (torchtitan's default) and else the whole share of a
    data-parallel rank, which is what a run without gradient accumulation does.
    """
    refuse_unknown(stated, _PLAN_KEYS, f"{where}: plan")
    assumed: list[str] = []
    values: dict[str, Any] = {}
    for key in _DEGREES:
        value = stated_value(stated, key)
        values[key] = 1 if value is None else whole_number(value, f"{where}: plan.{key}")
        if value is None and key in stated:
            assumed.append(f"{key} 1 (not stated)")
    zero = stated_value(stated, "zero_stage")
    if zero is not None:
        values["zero_stage"] = whole_number(zero, f"{where}: plan.zero_stage", least=0, most=3)
    sp = stated_value(stated, "sequence_parallel")
    values["sequence_parallel"] = (
        framework.sequence_parallel_default and values["tp"] > 1
        if sp is None
        else flag(sp, f"{where}: plan.sequence_parallel")
    )
    if sp is None and values["tp"] > 1:
        assumed.append(f"sequence_parallel {str(values['sequence_parallel']).lower()} ({framework.title}'s default)")
    reshard = stated_value(stated, "reshard_after_forward")
    if reshard is not None:
        values["reshard_after_forward"] = flag(reshard, f"{where}: plan.reshard_after_forward")
    for key in ("layers_per_stage", "placement"):
        listed = stated_value(stated, key)
        if listed:
            values[key] = whole_numbers(listed, f"{where}: plan.{key}")
    modes = stated_value(stated, "recompute_per_stage")
    if modes:
        values["recompute_per_stage"] = words_of(modes, f"{where}: plan.recompute_per_stage")
    method = stated_value(stated, "cp_method")
    if method is not None:
        values["cp_method"] = word_of(method, f"{where}: plan.cp_method")
    factor = stated_value(stated, "capacity_factor")
    if factor is not None:
        values["capacity_factor"] = positive(factor, f"{where}: plan.capacity_factor")
    values["schedule"] = _schedule(stated, values, assumed, where)
    values["recompute"] = _recompute(stated, framework, assumed, where)
    overlap = stated_value(stated, "tp_overlap")
    if overlap is not None:
        values["tp_overlap"] = canonical(word_of(overlap, f"{where}: plan.tp_overlap", longest=128))
    values["micro_batch_size"] = _micro_batch(stated, values, workload, assumed, where)
    return Plan(**values), assumed


# --- one field at a time ------------------------------------------------------------------------------------------


def _model(value: Any, name: str) -> Model:
    from simulator.hf_config import load_model, model_from_config  # noqa: PLC0415 - keeps `--help` light

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
        from topology.cluster_file import load_cluster  # noqa: PLC0415 - keeps `--help` light

        return load_cluster(value), []
    if isinstance(value, dict):
        from topology.catalog import cluster_from_case  # noqa: PLC0415 - keeps `--help` light

        cluster, assumed = cluster_from_case(value)
        return cluster, list(assumed)
    raise BadCluster(
        f"case {name}: cluster is {kind_of(value)}",
        why="a cluster is {gpu, gpus_per_node, nodes, interconnect, nic_gbit_per_gpu} or a name or file",
        remedy='for example "dgx-h100"',
    )


def _workload(value: Any, name: str, assumed: list[str]) -> Workload:
    if not isinstance(value, dict):
        raise BadInput(f"case {name}: workload is {kind_of(value)}, not an object with seq_len and global_batch_size")
    assumed += ignored_keys(value, ("task", "seq_len", "global_batch_size"), f"case {name}: workload")
    task = value.get("task") or "train"
    if task != "train":
        raise UserError(
            f"case {name}: task {task!r} is not covered yet",
            why="only training steps are predicted in this version",
            remedy='set workload.task to "train"',
        )
    return Workload(
        task="train",
        seq_len=whole_number(value.get("seq_len"), f"case {name}: workload.seq_len"),
        global_batch_size=whole_number(value.get("global_batch_size"), f"case {name}: workload.global_batch_size"),
    )


def _schedule(stated: Mapping[str, Any], values: dict[str, Any], assumed: list[str], where: str) -> str | None:
    schedule = stated_value(stated, "schedule")
    if schedule is not None:
        word = word_of(schedule, f"{where}: plan.schedule")
        return _SCHEDULES.get(word.lower().replace("-", "").replace("_", ""), word)
    if values["pp"] == 1:
        return None
    default = "Interleaved1F1B" if values["virtual_stages"] > 1 else "1F1B"
    assumed.append(f"schedule {default} (not stated)")
    return default


def _recompute(stated: Mapping[str, Any], framework: Framework, assumed: list[str], where: str) -> str:
    value = stated_value(stated, "recompute")
    if value is None:
        default = framework.default_recompute()
        assumed.append(f"recompute {default} ({framework.title}'s default)")
        return default
    word = word_of(value, f"{where}: plan.recompute")
    return _RECOMPUTE.get(word.lower(), word)


def _micro_batch(
    stated: Mapping[str, Any], values: dict[str, Any], workload: Workload, assumed: list[str], where: str
) -> int:
    value = stated_value(stated, "micro_batch_size")
    if value is not None:
        return whole_number(value, f"{where}: plan.micro_batch_size")
    dp = values["dp_replicate"] * values["dp_shard"]
    whole = workload.global_batch_size % dp == 0
    size = workload.global_batch_size // dp if values["pp"] == 1 and whole else 1
    reason = "a pipeline's default" if values["pp"] > 1 else "the whole share of a data-parallel rank"
    assumed.append(f"micro_batch_size {size} ({reason})")
    return size
