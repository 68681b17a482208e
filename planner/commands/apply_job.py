"""`planner apply --launcher`: the run as a job of a scheduler, written and where possible submitted."""

from __future__ import annotations

from pathlib import Path

from planner.io import output
from planner.question.plan_file import load_plan
from planner.runs import launchers
from planner.runs.planned_run import job_run
from topology import codec
from topology.errors import UserError


def write(
    plan: Path | None,
    *,
    launcher: str,
    nodes: int | None,
    endpoint: str | None,
    name: str,
    image: str | None,
    submit: bool,
    folder: Path,
    budget_s: float,
    steps: int,
    own_table: bool,
    dry_run: bool,
    json: bool,
) -> None:
    """Write the request and the job's file into `folder`; with `dry_run` show them instead."""
    if launcher not in launchers.LAUNCHERS:
        raise UserError(f"--launcher is {launcher!r}", remedy=f"one of {', '.join(launchers.LAUNCHERS)}")
    if plan is None:
        raise UserError(f"--launcher {launcher} needs a plan", remedy="planner suggest ... --out plan.json")
    content = load_plan(plan)
    per_node = content.cluster.gpus_per_node
    job = launchers.LauncherJob(
        name=name,
        directory=folder,
        ranks=content.plan.gpus,
        nodes=nodes or -(-content.plan.gpus // per_node),
        budget_s=budget_s,
        endpoint=endpoint,
        image=image,
    )
    written = launchers.write_job(launcher, job)
    if submit and not written.submit:
        raise UserError(f"--launcher {launcher} has nobody to submit to", remedy="; ".join(written.advice))
    request = job_run(content).request(steps=steps, budget_s=budget_s, own_table=own_table)
    if not dry_run:
        codec.write_text(folder / "request.json", codec.to_json(request) + "\n")
        codec.write_text(written.path, written.text)
    said = launchers.submit(written.submit) if submit and not dry_run else None
    if json:
        output.emit_json(
            {
                "schema_version": output.SCHEMA_VERSION,
                "dry_run": dry_run,
                "launcher": launcher,
                "nodes": job.nodes,
                "ranks_per_node": job.ranks_per_node,
                "file": str(written.path),
                "text": written.text,
                "submit": list(written.submit),
                "submitted": said,
                "advice": list(written.advice),
                "request": request,
            }
        )
        return
    if dry_run:
        print(output.printable(written.text))
    else:
        print(output.printable(f"wrote {written.path}"))
    for line in (said,) if said else written.advice:
        print(output.printable(line))
