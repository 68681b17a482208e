"""`planner export`: a plan in the words of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands import serve
from planner.commands.flags import options
from planner.export.job import ExportJob, export_job
from planner.export.targets.folder import README, export_all
from planner.export.targets.registry import TARGETS, find_target
from planner.export.targets.registry import export as written
from planner.io import output
from planner.io.printable import printable
from planner.question.cases import case_of_file
from planner.question.plan_file import refuse_overwrite
from planner.serving import is_serving_file
from topology import codec
from topology.errors import BadInput, UserError

TO = (
    f"{', '.join(dict.fromkeys(target.name for target in TARGETS))}; @VERSION where several are known, such as "
    "torchtitan@0.2.2. Of a serving plan: script, compose, kubernetes, or its engine's name."
)


def export(
    plan: Annotated[Path, typer.Argument(help="Plan file of planner suggest --out, or a case file.")],
    to: Annotated[str | None, typer.Option("--to", help=TO)] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Write the folder --out: a file for every tool, and how to start each.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; default: standard output.")] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="What to call the run, or where an engine finds the weights; default: the model's name."
        ),
    ] = None,
    case_id: Annotated[str | None, typer.Option("--id", help="Which case of a list.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace a file.")] = False,
    json: options.Json = False,
) -> None:
    """Write a plan for the tool that shall run it.

    The file says in its header which plan it is, what of it the tool cannot express, and what has to be put beside it.
    Exit code 3 when the tool cannot run such a plan at all.
    """
    if every is not (to is None) or (every and out is None):
        raise UserError(
            "say either --to TOOL or --all",
            why="--all writes a folder",
            remedy="--to torchtitan, or --all --out FOLDER",
        )
    if plan.is_file() and is_serving_file(codec.read_json(plan)):
        if case_id is not None:
            raise UserError("--id: a serving plan is one", remedy="leave it out")
        serve.export_serving_plan(plan, to=to, every=every, out=out, name=name, force=force, json=json)
        return
    if out is not None and not every:
        refuse_overwrite(out, force=force)
    job = export_job(case_of_file(str(plan), case_id), name)
    if out is not None and every:
        _write_all(job, out, force=force, json=json)
        return
    done = written(job, find_target(str(to), job.question.runtime.version))
    if out is not None:
        codec.write_text(out, done.text)
        for beside, text in done.files.items():
            codec.write_text(out.parent / beside, text)
    if json:
        document = {"schema_version": output.SCHEMA_VERSION, **codec.to_builtins(done)}
        output.emit_json(document | {"saved": str(out) if out else None})
        return
    if out is None:
        print(done.text, end="")
        if done.files:
            output.warn(f"the file reads {', '.join(done.files)} beside it: --out FILE writes both")
        return
    for label, lines in (("not expressed", done.not_expressed), ("needed", done.needed), ("note", done.notes)):
        for line in lines:
            print(printable(f"{label}: {line}"))
    print(printable(f"saved {', '.join([str(out), *(str(out.parent / beside) for beside in done.files)])}"))


def _write_all(job: ExportJob, folder: Path, *, force: bool, json: bool) -> None:
    """Write a file for every tool that can run the plan. Raises BadInput where something is in the way."""
    files = export_all(job)
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is not a directory", remedy="--out with a new name")
    there = [name for name in files if (folder / name).exists()]
    if there and not force:
        raise BadInput(
            f"{folder} has {', '.join(there)}",
            why="files are not overwritten by accident",
            remedy="--force or another --out",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        codec.write_text(folder / name, text)
    if json:
        output.emit_json({"schema_version": output.SCHEMA_VERSION, "saved": str(folder), "files": files})
        return
    print(printable(f"saved {len(files)} files in {folder}; {folder / README} says how to start each"))
