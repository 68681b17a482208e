"""`planner trace`: the simulated timeline of one step, as a Chrome trace that Perfetto opens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands.flags import options
from planner.commands.flags.plan_flags import takes_plan_flags
from planner.explain.traced import write_trace
from planner.io import output
from planner.io.inputs import measurements, warn_of_doubts
from planner.question.cases import case_from_flags, case_of_plan_file, named_case
from planner.question.flags import Flags
from planner.question.overrides import with_flags
from planner.question.plan_file import refuse_overwrite
from simulator.legality.rules import is_legal
from simulator.lowering.block_code import Detail
from topology.errors import UserError


@takes_plan_flags
def trace(
    flags: Flags,
    out: Annotated[Path, typer.Option("--out", help="File to write the trace to.")],
    plan: Annotated[Path | None, typer.Option("--plan", help="Plan file saved by planner suggest --out.")] = None,
    case: Annotated[str | None, typer.Option("--case", help="Case file; of a list the first, or --id.")] = None,
    case_id: Annotated[str | None, typer.Option("--id", help="Which case of a list.")] = None,
    profile: options.Profile = None,
    strict: options.Strict = False,
    detail: Annotated[str | None, typer.Option("--detail", help="kernel or layer; default layer.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace a file.")] = False,
    json: options.Json = False,
) -> None:
    """Simulate one step and write what every rank and stream does when.

    Ranks that behave alike are drawn once. Open the file at https://ui.perfetto.dev or chrome://tracing. Exit code 3
    when the plan is not legal.
    """
    if case is not None and plan is not None:
        raise UserError("--case and --plan exclude each other", remedy="give one of them")
    refuse_overwrite(out, force=force)
    measured = measurements(profile, strict=strict)
    if plan is not None:
        loaded = with_flags(case_of_plan_file(plan, measured), flags, measured)
    elif case is not None:
        loaded = with_flags(named_case(case, case_id, measured), flags, measured)
    else:
        loaded = case_from_flags(flags, measured)
    if detail is not None and detail not in set(Detail):
        raise UserError(f"--detail {detail!r} is unknown", why=f"known: {', '.join(Detail)}")
    warn_of_doubts(measured)
    problems = loaded.question.problems(loaded.plan)
    if not is_legal(problems):
        for problem in problems:
            output.warn(problem.message)
        raise typer.Exit(3)
    written = write_trace(loaded, out, Detail(detail) if detail else Detail.LAYER)
    if json:
        output.emit_json(written)
        return
    for line in loaded.changed:
        print(f"changed: {line}")
    drawn, every = written["drawn_micro_batches"], written["micro_batches"]
    with_some = f" with {drawn} of its {every} micro batches, after which it repeats itself" if drawn < every else ""
    print(
        f"{out}: {written['spans']} spans of {len(written['drawn_ranks'])} of {written['ranks']} ranks, "
        f"a step of {written['step']}{with_some}, {written['detail']} by {written['detail']}"
    )
