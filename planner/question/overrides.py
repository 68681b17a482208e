"""Flags given with a saved plan or a case override the file, and every change is listed.

The degrees keep filling the same GPUs: if a degree or the number of GPUs changes and data parallelism is not stated,
the data-parallel degree follows. Settings that only fit the original plan (layers by stage, placement) are removed, and
listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from planner.io.inputs import read_cluster
from planner.question.case_runtime import refuse_compile, resolve_runtime
from planner.question.cases import Case, all_assumed, complete_plan
from planner.question.flags import Flags, refuse_absent, refuse_unused
from planner.question.plan_file import require_fresh
from planner.question.question import Question
from simulator.config.adapter import Adapter
from simulator.config.hf_config import load_model
from simulator.config.plan import MESH_AXES, PLAN_FIELDS, Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.fitting.calibrations import UNMEASURED, Calibrations
from simulator.runtimes.called import called
from topology import codec
from topology.catalog.platform import take_gpus
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import BadCluster, UserError
from topology.rates.orders import irregular


def with_flags(case: Case, flags: Flags, measured: Calibrations = UNMEASURED) -> Case:
    """Return the case of a file as `flags` change it, with `changed` naming every setting that differs.

    Raises Stale if a saved plan is combined with another model or cluster than it was made for, UserError for what
    cannot be changed: the framework, whose rules and defaults made the plan.
    """
    question = case.question
    _same_framework(flags, question)
    model = load_model(flags.model) if flags.model else question.model
    cluster, count = _machine(case, flags)
    if case.saved is not None and flags.model:
        require_fresh(case.saved, model=model)
    workload = replace(
        question.workload,
        seq_len=flags.seq_len or question.workload.seq_len,
        global_batch_size=flags.global_batch or question.workload.global_batch_size,
        routing=flags.routing or question.workload.routing,
        document_len=flags.document_len or question.workload.document_len,
    )
    runtime = _runtime(question.runtime, flags)
    plan = _plan(case.plan, {k: v for k, v in flags.plan.items() if v is not None}, count, workload, question)
    refuse_absent(flags, model)
    refuse_unused(flags, plan)
    refuse_compile(flags.runtime, runtime.name)
    changed = [
        *_differences({"model": question.model.name}, {"model": model.name}),
        *_differences({"cluster": question.cluster.name}, {"cluster": cluster.name}),
        *_differences({"gpus": case.plan.gpus}, {"gpus": count}),
        *(line for a, b in ((question.workload, workload), (question.runtime, runtime)) for line in _between(a, b)),
        *_between(case.plan, plan),
    ]
    if not changed:
        return case
    names = {line.split(" ")[0] for line in changed}
    kept = [line for line in case.assumed if line.removeprefix("runtime.").split(" ")[0] not in names]
    asked = replace(
        question,
        model=model,
        cluster=cluster,
        workload=workload,
        runtime=runtime,
        calibration=measured.on(cluster),
        gpus=count if flags.gpus or question.gpus is not None else None,
    )
    assumed = all_assumed(kept, [plan], asked, measured)
    return replace(case, plan=plan, assumed=assumed, changed=tuple(changed), question=asked)


def _same_framework(flags: Flags, question: Question) -> None:
    said = flags.runtime.get("name")
    if said and called(said)[0] not in {question.framework.name, question.runtime.name}:
        raise UserError(
            f"the framework of a plan cannot be changed to {said}",
            why=f"the plan follows the rules and defaults of {question.framework.title}",
            remedy=f"plan again: planner suggest --framework {said}",
        )


def _machine(case: Case, flags: Flags) -> tuple[Cluster, int]:
    """Return the cluster that the flags name, else the case's, and the number of its GPUs that are used."""
    count = _count(flags, case.plan.gpus)
    if flags.cluster is None:
        if flags.gpu is not None:
            raise UserError("--gpu says which GPUs a captured text has", remedy="give the text with --cluster")
        cluster = case.question.cluster
        return (cluster if count == case.plan.gpus else _resized(cluster, count)), count
    if case.saved is not None:
        require_fresh(case.saved, cluster=read_cluster(flags.cluster, case.plan.gpus, gpu=flags.gpu))
    return read_cluster(flags.cluster, count, gpu=flags.gpu), count


def _count(flags: Flags, now: int) -> int:
    if flags.gpus is None:
        return now
    if len(flags.gpus) != 1:
        raise UserError("one plan runs on one number of GPUs", remedy="--gpus 16; planner suggest compares several")
    return flags.gpus[0]


def _resized(cluster: Cluster, gpus: int) -> Cluster:
    """Return as much of `cluster` as `gpus` need, or more nodes of its single kind."""
    node = cluster.groups[0].node
    if gpus <= cluster.gpu_count:
        return cluster if gpus <= len(node.gpus) and irregular(cluster) else take_gpus(cluster, gpus)
    if len(cluster.groups) > 1 or gpus % len(node.gpus):
        raise BadCluster(
            f"{cluster.name} cannot be extended to {gpus} GPUs",
            why=f"it has {cluster.gpu_count}, in nodes of {len(node.gpus)}",
            remedy="name a cluster of that size with --cluster",
        )
    return replace(cluster, groups=(replace(cluster.groups[0], count=gpus // len(node.gpus)),))


def _runtime(now: Runtime, flags: Flags) -> Runtime:
    said = {key: value for key, value in flags.runtime.items() if key != "name" and value is not None}
    return resolve_runtime({**codec.to_builtins(now), **said})[0] if said else now


def _plan(now: Plan, said: JsonObject, gpus: int, workload: Workload, question: Question) -> Plan:
    """Return `now` with the stated fields and those that follow from them."""
    if not said and gpus == now.gpus:
        return now
    stated: JsonObject = {**codec.to_builtins(now), **said}
    loose = [*_dependents(now, stated), "placement"]
    stated |= {key: None for key in loose if key not in said}
    if not {"dp_replicate", "dp_shard"} & set(said):
        axis = "dp_replicate" if now.dp_shard == 1 and now.dp_replicate > 1 else question.framework.fills
        rest = 1
        for other in MESH_AXES:
            rest *= int(stated[other]) if other != axis else 1
        stated[axis] = gpus // rest if gpus % rest == 0 else stated[axis]
    plan = complete_plan(stated, workload, question.framework, where="flags")[0]
    same = all(getattr(plan, axis) == getattr(now, axis) for axis in PLAN_FIELDS["placement"].follows)
    return replace(plan, placement=now.placement) if same else plan


def _dependents(now: Plan, stated: JsonObject) -> Sequence[str]:
    """Return the settings that only had a meaning with the previous degrees and modes."""
    changed = {name for name, value in stated.items() if value != getattr(now, name)}
    alone = {name for name in changed if stated[name] == 1}
    loose = [one.name for one in PLAN_FIELDS.values() if changed & set(one.follows) or one.needs in alone]
    if "tp" in changed and now.tp == 1:
        loose.append("sequence_parallel")  # which was off because there were too few ranks
    return loose


def _between(then: Plan | Workload | Runtime, now: Plan | Workload | Runtime) -> list[str]:
    names = [one.name for one in fields(then)]
    return _differences({n: getattr(then, n) for n in names}, {n: getattr(now, n) for n in names})


def _differences(then: JsonObject, now: JsonObject) -> list[str]:
    """Return `tp 4 -> 2` for every setting that differs."""
    return [f"{name} {_shown(then[name])} -> {_shown(now[name])}" for name in then if then[name] != now[name]]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}" if value else "none"
    if isinstance(value, Adapter):
        return value.title
    return "none" if value is None else str(value)
