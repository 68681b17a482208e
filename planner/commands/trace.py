"""`planner trace`: the simulated timeline of one step, as a Chrome trace that Perfetto opens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands import options
from planner.commands import plan_flags as flags

if TYPE_CHECKING:
    from planner.cases import Case
    from topology.profile import Profile


def trace(
    out: Annotated[Path, typer.Option("--out", help="File to write the trace to.")],
    plan: Annotated[Path | None, typer.Option("--plan", help="Plan file saved by planner suggest --out.")] = None,
    case: Annotated[str | None, typer.Option("--case", help="Case file; of a list the first, or --id.")] = None,
    case_id: Annotated[str | None, typer.Option("--id", help="Which case of a list.")] = None,
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
    detail: Annotated[str | None, typer.Option("--detail", help="kernel, layer or stage; default by size.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace a file.")] = False,
    json: options.Json = False,
) -> None:
    """Simulate one step and write what every rank and stream does when.

    Ranks that behave alike are drawn once. Open the file at https://ui.perfetto.dev or chrome://tracing. Exit code 3
    when the plan is not legal.
    """
    given = locals()  # first of all, so that it holds the arguments and nothing else
    from planner.cases import case_of_plan_file, named_case  # noqa: PLC0415 - keeps `--help` light
    from planner.inputs import profile_of  # noqa: PLC0415 - as above
    from planner.plan_file import load_plan, refuse_overwrite, require_fresh  # noqa: PLC0415 - as above
    from topology.errors import UserError  # noqa: PLC0415 - as above

    if case is not None and plan is not None:
        raise UserError("--case and --plan exclude each other", remedy="give one of them")
    refuse_overwrite(out, force=force)
    measured = profile_of(profile)
    if plan is not None:
        asked = case_of_plan_file(plan)
        content = load_plan(plan)
        if measured is not None and "profile" in content.fingerprints:
            require_fresh(content, profile=measured)
    elif case is not None:
        asked = named_case(case, case_id)
    else:
        asked = flags.spelled(given)
    _write(asked, out, measured, detail=detail, json=json)


def _write(case: Case, out: Path, profile: Profile | None, *, detail: str | None, json: bool) -> None:
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
        profile=profile,
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
