"""`planner estimate`: what one plan costs, from a case file, a saved plan, or flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands import options
from planner.commands import plan_flags as flags

if TYPE_CHECKING:
    from planner.cases import Case
    from planner.headroom import Room
    from planner.legality import Problem
    from simulator.estimate import Estimate


def estimate(
    case: Annotated[str | None, typer.Option("--case", help="Case file: one case or a list; - reads stdin.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="Plan file saved by planner suggest --out.")] = None,
    model: flags.Model = None,
    cluster: flags.Cluster = None,
    gpu: options.Gpu = None,
    gpus: flags.Gpus = None,
    seq_len: options.SeqLen = 8192,
    global_batch: flags.GlobalBatch = None,
    micro_batch: flags.MicroBatch = None,
    dp_replicate: flags.DpReplicate = None,
    dp_shard: flags.DpShard = None,
    zero: flags.Zero = None,
    tp: flags.Tp = 1,
    sequence_parallel: flags.SequenceParallel = None,
    cp: flags.Cp = 1,
    pp: flags.Pp = 1,
    ep: flags.Ep = 1,
    virtual_stages: flags.VirtualStages = 1,
    schedule: flags.Schedule = None,
    recompute: flags.Recompute = None,
    tp_overlap: flags.TpOverlap = None,
    runtime: flags.Runtime = None,
    compile_model: options.Compile = None,
    param_dtype: options.ParamDtype = None,
    profile: options.Profile = None,
    json: options.Json = False,
) -> None:
    """Predict step time and memory of one plan, and say whether it is legal.

    The data-parallel degree left unsaid fills the GPUs. Exit code 3 when no plan given is legal; a plan that is legal
    but does not fit is an answer, and ends with 0.
    """
    given = locals()  # first of all, so that it holds the arguments and nothing else
    from planner import output  # noqa: PLC0415 - keeps `--help` light
    from planner.cases import case_of_plan_file, load_case, read_cases  # noqa: PLC0415 - as above
    from planner.inputs import cluster_of, profile_of  # noqa: PLC0415 - as above
    from planner.plan_file import load_plan, require_fresh  # noqa: PLC0415 - as above
    from topology.errors import UserError  # noqa: PLC0415 - as above

    measured = profile_of(profile)
    if case is not None and plan is not None:
        raise UserError("--case and --plan exclude each other", remedy="give one of them")
    if case is not None:
        raw, many = read_cases(case)
        if many:
            _answer_list(raw, measured, json=json)
            return
        asked = load_case(raw[0])
    elif plan is not None:
        asked = case_of_plan_file(plan)
        content = load_plan(plan)
        if cluster is not None:
            require_fresh(content, cluster=cluster_of(cluster, gpus or asked.plan.gpus, gpu=gpu))
        if measured is not None and "profile" in content.fingerprints:
            require_fresh(content, profile=measured)
    else:
        asked = flags.spelled(given)
    asked = _with_assumed(asked, measured)
    problems, estimated = answer(asked, measured)
    room = room_of(asked, estimated, measured)
    if json:
        output.emit_json(document(asked, problems, estimated, room))
    else:
        _print(asked, problems, estimated, room)
    if estimated is None:
        raise typer.Exit(3)


def _answer_list(raw: list[dict[str, Any]], profile: Any, *, json: bool) -> None:
    """Answer every case of a list; one that cannot be read is answered with what is wrong. Exit 3 if none is legal."""
    from planner import output  # noqa: PLC0415 - keeps `--help` light
    from planner.cases import case_id, load_case  # noqa: PLC0415 - as above
    from topology.errors import UserError  # noqa: PLC0415 - as above

    documents = []
    for index, data in enumerate(raw):
        try:
            case = _with_assumed(load_case(data), profile)
            problems, estimated = answer(case, profile)
            room = room_of(case, estimated, profile)
        except UserError as error:
            documents.append(_unreadable(case_id(data), str(error)))
            output.warn(f"case {case_id(data)}: {error}")
            continue
        documents.append(document(case, problems, estimated, room))
        if not json:
            if index:
                print()
            _print(case, problems, estimated, room)
    if json:
        output.emit_json(documents)
    if documents and not any(one["legal"] for one in documents):
        raise typer.Exit(3)


def _unreadable(name: str, message: str) -> dict[str, Any]:
    from planner.output import SCHEMA_VERSION  # noqa: PLC0415 - keeps `--help` light

    problem = {"rule": "input", "grade": "illegal", "message": message, "nearest": [], "nearest_of": ""}
    return {
        "schema_version": SCHEMA_VERSION,
        "id": name,
        "legal": False,
        "problems": [problem],
        "assumed": [],
        "estimate": None,
    }


def document(
    case: Case, problems: tuple[Problem, ...], estimated: Estimate | None, room: Room | None = None
) -> dict[str, Any]:
    """Return the JSON document of one case, legality, what was assumed, the estimate, what would give room in memory."""
    from planner.output import SCHEMA_VERSION  # noqa: PLC0415 - keeps `--help` light
    from topology import codec  # noqa: PLC0415 - as above

    return {
        "schema_version": SCHEMA_VERSION,
        "id": case.id,
        "legal": estimated is not None,
        "problems": codec.to_builtins(problems),
        "assumed": list(case.assumed),
        "framework": case.framework.name,
        "plan": codec.to_builtins(case.plan),
        "workload": codec.to_builtins(case.workload),
        "runtime": codec.to_builtins(case.runtime),
        "estimate": None if estimated is None else codec.to_builtins(estimated),
        "room": codec.to_builtins(room),
    }


def _with_assumed(case: Case, profile: Any) -> Case:
    """Return the case with what its overlap modes assume: rates of another machine, where no profile has measured them."""
    from simulator.overlap_samples import assumed_of  # noqa: PLC0415 - keeps `--help` light

    return replace(case, assumed=(*case.assumed, *assumed_of([case.plan.tp_overlap], profile, case.cluster)))


def answer(case: Case, profile: Any) -> tuple[tuple[Problem, ...], Estimate | None]:
    """Return what the rules say of the plan, and its estimate where it is legal."""
    from planner.costs import cost_table  # noqa: PLC0415 - keeps `--help` light
    from planner.legality import check, is_legal  # noqa: PLC0415 - as above

    problems = check(
        case.plan, case.model, case.cluster, case.workload, case.framework, runtime=case.runtime, gpus=case.gpus
    )
    if not is_legal(problems):
        return problems, None
    table = cost_table(case.model, case.cluster, case.workload, [case.plan], case.runtime, profile)
    return problems, table.estimate(0)


def room_of(case: Case, estimated: Estimate | None, profile: Any) -> Room | None:
    """Return what would give the plan room in memory, where it has little or none."""
    if estimated is None:
        return None
    from planner.costs import cost_table  # noqa: PLC0415 - keeps `--help` light
    from planner.headroom import more_room  # noqa: PLC0415 - as above
    from planner.legality import check, is_legal  # noqa: PLC0415 - as above

    question = (case.model, case.cluster, case.workload)
    return more_room(
        case.plan,
        estimated,
        case.framework,
        lambda plans: cost_table(*question, plans, case.runtime, profile),
        lambda plan: is_legal(check(plan, *question, case.framework, runtime=case.runtime, gpus=case.gpus)),
    )


def _print(case: Case, problems: tuple[Problem, ...], estimated: Estimate | None, room: Room | None) -> None:
    from planner.tables import print_estimate  # noqa: PLC0415 - keeps `--help` light

    print_estimate(
        name=case.id,
        plan=case.plan,
        model=case.model,
        cluster=case.cluster,
        workload=case.workload,
        runtime=case.runtime,
        framework=case.framework.title,
        assumed=case.assumed,
        problems=problems,
        estimate=estimated,
        room=room,
    )
