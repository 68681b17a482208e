"""`planner export`: a plan in the words of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.commands import options

if TYPE_CHECKING:
    from planner.export.job import Job

TO = (
    "torchrun, torchtitan, megatron, deepspeed, accelerate, slurm, trainjob or skypilot; @VERSION where several are "
    "known, such as torchtitan@0.2.2."
)


def export(
    plan: Annotated[Path, typer.Argument(help="Plan file of planner suggest --out, or a case file.")],
    to: Annotated[str, typer.Option("--to", help=TO)],
    out: Annotated[Path | None, typer.Option("--out", help="File to write; default: standard output.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="What to call the run; default: the model's name.")] = None,
    case_id: Annotated[str | None, typer.Option("--id", help="Which case of a list.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace a file.")] = False,
    json: options.Json = False,
) -> None:
    """Write a plan for the tool that shall run it.

    The file says in its header which plan it is, what of it the tool cannot express, and what has to be put beside it.
    Exit code 3 when the tool cannot run such a plan at all.
    """
    from planner import output  # noqa: PLC0415 - keeps `--help` light
    from planner.export.registry import export as written  # noqa: PLC0415 - as above
    from planner.export.registry import target_named  # noqa: PLC0415 - as above
    from planner.plan_file import refuse_overwrite  # noqa: PLC0415 - as above
    from topology import codec  # noqa: PLC0415 - as above

    if out is not None:
        refuse_overwrite(out, force=force)
    job = job_of(plan, case_id, name)
    done = written(job, target_named(to, job.runtime.version))
    if out is not None:
        codec.write_text(out, done.text)
    if json:
        document = {"schema_version": output.SCHEMA_VERSION, **codec.to_builtins(done)}
        document["not_expressed"] = document.pop("unsaid")
        output.emit_json(document | {"saved": str(out) if out else None})
        return
    if out is None:
        print(done.text, end="")
        return
    for label, lines in (("not expressed", done.unsaid), ("needed", done.needed), ("note", done.notes)):
        for line in lines:
            print(output.printable(f"{label}: {line}"))
    print(output.printable(f"saved {out}"))


def job_of(path: Path, case_id: str | None, name: str | None) -> Job:
    """Return what a plan file or a case file asks to run. Raises BadInput, BadPlan or UserError (exit 2)."""
    from planner.cases import case_of_file  # noqa: PLC0415 - keeps `--help` light
    from planner.export.job import Job  # noqa: PLC0415 - as above

    case = case_of_file(str(path), case_id)
    return Job(
        name=name if name is not None else case.model.name,
        plan=case.plan,
        model=case.model,
        cluster=case.cluster,
        workload=case.workload,
        runtime=case.runtime,
        framework=case.framework.name,
    )
