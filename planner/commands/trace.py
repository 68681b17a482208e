"""`planner trace`: the simulated timeline of one step, as a Chrome trace that Perfetto opens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands import options

if TYPE_CHECKING:
    from planner.cases import Case


def trace(
    out: Annotated[Path, typer.Option("--out", help="File to write the trace to.")],
    plan: Annotated[Path | None, typer.Option("--plan", help="Plan file saved by planner suggest --out.")] = None,
    case: Annotated[str | None, typer.Option("--case", help="Case file; of a list the first, or --id.")] = None,
    case_id: Annotated[str | None, typer.Option("--id", help="Which case of a list.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "--config", help="Shipped model, config.json or its directory.")
    ] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Catalogue name or cluster file.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, max=1 << 20, help="How many GPUs of it.")] = None,
    seq_len: options.SeqLen = 8192,
    global_batch: Annotated[int | None, typer.Option("--global-batch", min=1, help="Sequences in a step.")] = None,
    micro_batch: Annotated[int | None, typer.Option("--micro-batch", min=1, help="Sequences in a micro batch.")] = None,
    dp_replicate: Annotated[int | None, typer.Option("--dp-replicate", min=1, help="Replicas.")] = None,
    dp_shard: Annotated[
        int | None, typer.Option("--dp-shard", min=1, help="FSDP shards; default fills the GPUs.")
    ] = None,
    zero: Annotated[int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage over --dp-replicate.")] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel degree.")] = 1,
    cp: Annotated[int, typer.Option("--cp", min=1, help="Context-parallel degree.")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Expert-parallel degree.")] = 1,
    virtual_stages: Annotated[int, typer.Option("--virtual-stages", min=1, help="Stages a rank holds.")] = 1,
    schedule: Annotated[str | None, typer.Option("--schedule", help="Pipeline schedule, such as 1F1B.")] = None,
    recompute: Annotated[str | None, typer.Option("--recompute", help="none, selective, full, ...")] = None,
    tp_overlap: Annotated[
        str | None,
        typer.Option(
            "--tp-overlap", help="none, ring, fused, async, ...; or by site: attention_in=fused,mlp_out=ring."
        ),
    ] = None,
    runtime: Annotated[str | None, typer.Option("--runtime", "--framework", help="The software that runs it.")] = None,
    compile_model: options.Compile = None,
    param_dtype: options.ParamDtype = None,
    detail: Annotated[str | None, typer.Option("--detail", help="kernel, layer or stage; default by size.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace a file.")] = False,
    json: options.Json = False,
) -> None:
    """Simulate one step and write what every rank and stream does when.

    Ranks that behave alike are drawn once. Open the file at https://ui.perfetto.dev or chrome://tracing. Exit code 3
    when the plan is not legal.
    """
    from planner.cases import case_from_flags, case_of_plan_file, named_case  # noqa: PLC0415 - keeps `--help` light
    from planner.plan_file import refuse_overwrite  # noqa: PLC0415 - as above
    from topology.errors import UserError  # noqa: PLC0415 - as above

    if case is not None and plan is not None:
        raise UserError("--case and --plan exclude each other", remedy="give one of them")
    refuse_overwrite(out, force=force)
    if plan is not None:
        asked = case_of_plan_file(plan)
    elif case is not None:
        asked = named_case(case, case_id)
    else:
        asked = case_from_flags(
            model=model,
            cluster=cluster,
            gpus=gpus,
            seq_len=seq_len,
            global_batch=global_batch,
            plan={
                "dp_replicate": dp_replicate,
                "dp_shard": dp_shard,
                "zero_stage": zero,
                "tp": tp,
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
    _write(asked, out, detail=detail, json=json)


def _write(case: Case, out: Path, *, detail: str | None, json: bool) -> None:
    from planner import output  # noqa: PLC0415 - keeps `--help` light
    from planner.legality import check, is_legal  # noqa: PLC0415 - as above
    from simulator.chrome import to_chrome  # noqa: PLC0415 - as above
    from simulator.lowering.block_code import Detail  # noqa: PLC0415 - as above
    from simulator.simulation import simulate_plan  # noqa: PLC0415 - as above
    from topology.codec import to_json, write_text  # noqa: PLC0415 - as above
    from topology.errors import UserError  # noqa: PLC0415 - as above

    if detail is not None and detail not in set(Detail):
        raise UserError(f"--detail {detail!r} is unknown", why=f"known: {', '.join(Detail)}")
    problems = check(
        case.plan, case.model, case.cluster, case.workload, case.framework, runtime=case.runtime, gpus=case.gpus
    )
    if not is_legal(problems):
        for problem in problems:
            output.warn(problem.message)
        raise typer.Exit(3)
    simulated = simulate_plan(
        case.model,
        case.cluster,
        case.workload,
        case.plan,
        case.runtime,
        detail=Detail(detail) if detail else None,
    )
    run = simulated.run
    write_text(out, to_json(to_chrome(run.trace), indent=None))
    answer: dict[str, Any] = {
        "schema_version": output.SCHEMA_VERSION,
        "id": case.id,
        "out": str(out),
        "detail": str(simulated.detail),
        "step_s": run.step_s,
        "ranks": sum(len(c.ranks) for c in run.folding.classes),
        "drawn_ranks": list(run.trace.ranks),
        "spans": len(run.trace.spans),
        "breakdown_s": simulated.estimate.breakdown_s,
    }
    if json:
        output.emit_json(answer)
        return
    print(
        f"{out}: {len(run.trace.spans)} spans of {len(run.trace.ranks)} of {answer['ranks']} ranks, "
        f"a step of {run.step_s:.4f} s, {simulated.detail} by {simulated.detail}"
    )
