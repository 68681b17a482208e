"""`planner estimate`: what one plan costs, from a case file, a saved plan, or flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands import options

if TYPE_CHECKING:
    from planner.cases import Case
    from planner.legality import Problem
    from simulator.estimate import Estimate


def estimate(
    case: Annotated[str | None, typer.Option("--case", help="Case file: one case or a list; - reads stdin.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="Plan file saved by planner suggest --out.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "--config", help="Shipped model, config.json or its directory.")
    ] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Catalogue name or cluster file.")] = None,
    gpu: options.Gpu = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, max=1 << 20, help="How many GPUs of it.")] = None,
    seq_len: options.SeqLen = 8192,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", min=1, max=1 << 31, help="Sequences in a step; default 8 a GPU.")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option("--micro-batch", min=1, help="Sequences in a micro batch.")] = None,
    dp_replicate: Annotated[int | None, typer.Option("--dp-replicate", min=1, help="Replicas.")] = None,
    dp_shard: Annotated[
        int | None, typer.Option("--dp-shard", min=1, help="FSDP shards; default fills the GPUs.")
    ] = None,
    zero: Annotated[int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage over --dp-replicate.")] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel degree.")] = 1,
    sequence_parallel: Annotated[
        bool | None, typer.Option("--sequence-parallel/--no-sequence-parallel", help="Default: the framework's.")
    ] = None,
    cp: Annotated[int, typer.Option("--cp", min=1, help="Context-parallel degree.")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Expert-parallel degree.")] = 1,
    virtual_stages: Annotated[int, typer.Option("--virtual-stages", min=1, help="Stages a rank holds.")] = 1,
    schedule: Annotated[str | None, typer.Option("--schedule", help="Pipeline schedule, such as 1F1B.")] = None,
    recompute: Annotated[
        str | None, typer.Option("--recompute", help="none, selective, selective-op, full, or the runtime's own word.")
    ] = None,
    tp_overlap: Annotated[
        str | None,
        typer.Option(
            "--tp-overlap", help="none, ring, fused, async, ...; or by site: attention_in=fused,mlp_out=ring."
        ),
    ] = None,
    runtime: Annotated[str | None, typer.Option("--runtime", "--framework", help="The software that runs it.")] = None,
    compile_model: options.Compile = None,
    param_dtype: options.ParamDtype = None,
    profile: options.Profile = None,
    json: options.Json = False,
) -> None:
    """Predict step time and memory of one plan, and say whether it is legal.

    The data-parallel degree left unsaid fills the GPUs. Exit code 3 when no plan given is legal; a plan that is legal
    but does not fit is an answer, and ends with 0.
    """
    from planner import output  # noqa: PLC0415 - keeps `--help` light
    from planner.cases import case_from_flags, case_of_plan_file, load_case, read_cases  # noqa: PLC0415 - as above
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
        asked = case_from_flags(
            model=model,
            cluster=cluster,
            gpus=gpus,
            gpu=gpu,
            seq_len=seq_len,
            global_batch=global_batch,
            plan={
                "dp_replicate": dp_replicate,
                "dp_shard": dp_shard,
                "zero_stage": zero,
                "tp": tp,
                "sequence_parallel": sequence_parallel,
                "cp": cp,
                "pp": pp,
                "ep": ep,
                "virtual_stages": virtual_stages,
                "schedule": schedule,
                "micro_batch_size": micro_batch,
                "recompute": recompute,
                "tp_overlap": tp_overlap,
            },
            runtime={"name": runtime or "torchtitan", "compile": compile_model, "param_dtype": param_dtype},
        )
    asked = _with_assumed(asked, measured)
    problems, estimated = answer(asked, measured)
    if json:
        output.emit_json(document(asked, problems, estimated))
    else:
        _print(asked, problems, estimated)
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
        except UserError as error:
            documents.append(_unreadable(case_id(data), str(error)))
            output.warn(f"case {case_id(data)}: {error}")
            continue
        documents.append(document(case, problems, estimated))
        if not json:
            if index:
                print()
            _print(case, problems, estimated)
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


def document(case: Case, problems: tuple[Problem, ...], estimated: Estimate | None) -> dict[str, Any]:
    """Return the JSON document of one case, legality, what was assumed, the estimate."""
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
    }


def _with_assumed(case: Case, profile: Any) -> Case:
    """Return the case with what its overlap modes assume: rates of another machine, where no profile has measured them."""
    from simulator.overlap_samples import assumed_of  # noqa: PLC0415 - keeps `--help` light

    return replace(case, assumed=(*case.assumed, *assumed_of(case.plan.tp_overlap, profile, case.cluster)))


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


def _print(case: Case, problems: tuple[Problem, ...], estimated: Estimate | None) -> None:
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
    )
