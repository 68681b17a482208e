"""A plan for every tool that can run it: one folder, with a README on how to start each file."""

from __future__ import annotations

from planner.export.draft import Exported
from planner.export.job import ExportJob
from planner.export.script import comment
from planner.export.targets.registry import ALL_TARGETS, export
from topology.errors import Infeasible

README = "README.md"


def export_all(job: ExportJob) -> dict[str, str]:
    """Return the files of the folder by name. Raises Infeasible when no tool can run the plan."""
    done: list[Exported] = []
    refused: list[tuple[str, str]] = []
    for target in ALL_TARGETS:
        try:
            done.append(export(job, target))
        except Infeasible as error:
            refused.append((f"{target.title} {target.version}", f"{error.what}; {error.why}".rstrip("; ")))
    if not done:
        raise Infeasible("no tool can run this plan", why="; ".join(f"{title}: {why}" for title, why in refused))
    files = {name: text for one in done for name, text in {**one.files, one.file_name: one.text}.items()}
    return {**files, README: _readme(job, done, refused)}


def _readme(job: ExportJob, done: list[Exported], refused: list[tuple[str, str]]) -> str:
    lines = [
        f"# Plan {job.plan_hash}",
        "",
        "One command a tool, from this folder. Each file says in its header what of the plan the tool cannot express.",
        "",
    ]
    for one in done:
        lines += [f"## {one.target} {one.version}: {one.file_name}", "", "```", one.run, "```", ""]
        lines += [f"- {_plain(line)}" for line in one.needed]
        lines += [f"- not expressed: {_plain(line)}" for line in one.not_expressed]
        lines += [""]
    if refused:
        lines += ["## Tools that cannot run it", ""]
        lines += [f"- {title}: {_plain(why)}" for title, why in refused]
    return "\n".join(lines).rstrip() + "\n"


def _plain(text: str) -> str:
    """Return text on one line, with control characters escaped."""
    return comment([text]).removeprefix("# ").rstrip("\n")
