"""`planner export`: a plan as the configuration of another tool."""

from __future__ import annotations

from pathlib import Path

from planner.export.job import ExportJob, export_job
from planner.export.targets.registry import README, export_all, find_target
from planner.export.targets.registry import export as written
from planner.io import output
from planner.io.printable import printable
from planner.question.cases import case_of_file
from planner.question.plan_file import refuse_overwrite
from planner.requests.tools import Export
from topology import codec
from topology.errors import BadInput, UserError


def export(asked: Export) -> None:
    """Print what `planner export` answers."""
    require_one_kind(asked)
    if asked.out is not None and not asked.every:
        refuse_overwrite(asked.out, force=asked.force)
    job = export_job(case_of_file(str(asked.plan), asked.case_id), asked.name)
    if asked.out is not None and asked.every:
        _write_all(job, asked.out, force=asked.force, json=asked.json)
        return
    done = written(job, find_target(str(asked.to), job.question.runtime.version))
    if asked.out is not None:
        codec.write_text(asked.out, done.text)
        for name, text in done.files.items():
            codec.write_text(asked.out.parent / name, text)
    if asked.json:
        document = {"schema_version": output.SCHEMA_VERSION, **codec.to_builtins(done)}
        output.emit_json(document | {"saved": str(asked.out) if asked.out else None})
        return
    if asked.out is None:
        print(done.text, end="")
        if done.files:
            output.warn(f"the file reads {', '.join(done.files)} next to it: --out FILE writes both")
        return
    for label, lines in (("not expressed", done.not_expressed), ("needed", done.needed), ("note", done.notes)):
        for line in lines:
            print(printable(f"{label}: {line}"))
    print(printable(f"saved {', '.join([str(asked.out), *(str(asked.out.parent / name) for name in done.files)])}"))


def require_one_kind(asked: Export) -> None:
    """Raise UserError unless exactly one file, or all of them, are requested."""
    if asked.every is not (asked.to is None) or (asked.every and asked.out is None):
        raise UserError(
            "say either --to TOOL or --all",
            why="--all writes a folder",
            remedy="--to with a name that planner export --help lists, or --all --out FOLDER",
        )


def _write_all(job: ExportJob, folder: Path, *, force: bool, json: bool) -> None:
    """Write a file for every tool that can run the plan. Raises BadInput if a file already exists."""
    files = export_all(job)
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is not a directory", remedy="--out with a new name")
    there = [name for name in files if (folder / name).exists()]
    if there and not force:
        raise BadInput(
            f"{folder} has {', '.join(there)}",
            why="files are not overwritten by accident",
            remedy="--force, or another name",
        )
    codec.make_folder(folder)
    for name, text in files.items():
        codec.write_text(folder / name, text)
    if json:
        output.emit_json({"schema_version": output.SCHEMA_VERSION, "saved": str(folder), "files": files})
        return
    print(printable(f"saved {len(files)} files in {folder}; {folder / README} says how to start each"))
