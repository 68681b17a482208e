"""`planner doctor --launcher`: check that the scheduler has what a job needs."""

from __future__ import annotations

from pathlib import Path

from click.exceptions import Exit

from planner.io import output
from planner.io.printable import printable
from planner.requests.machines import Doctor
from planner.runs.schedulers.node_answers import ERROR
from planner.runs.schedulers.ray import check_ray
from planner.runs.schedulers.slurm import check_slurm
from topology import codec
from topology.errors import UserError

CHECKS = {"slurm": check_slurm, "ray": check_ray}
NODES = 2  # two at least, so that they have to find each other
OF_JOBS = frozenset({"launcher", "nodes", "gpus_per_node", "json"})


def doctor_jobs(asked: Doctor) -> None:
    """Print the findings, faults first. Exit code 1 if a job would fail."""
    check = CHECKS.get(str(asked.launcher))
    if check is None:
        remedy = f"{' or '.join(CHECKS)}; without it this machine is checked"
        raise UserError(f"--launcher is {asked.launcher!r}", remedy=remedy)
    if others := sorted(asked.said - OF_JOBS):
        named = ", ".join(f"--{name.replace('_', '-')}".replace("--sources", "--from") for name in others)
        raise UserError(f"{named} not with --launcher", why="it checks a scheduler, no machine", remedy="leave it out")
    output.progress(f"asking {str(asked.launcher).title()} ...")
    found = check(asked.nodes or NODES, asked.gpus_per_node, folder=Path.cwd())
    output.end_progress()
    healthy = not any(one.severity == ERROR for one in found)
    if asked.json:
        document = {"schema_version": output.SCHEMA_VERSION, "launcher": asked.launcher, "healthy": healthy}
        output.emit_json({**document, "items": codec.to_builtins(found)})
    else:
        for one in found:
            print(printable(f"{one.severity:<8}  {one.what}"))
            for name, text in (("why", one.why), ("do", one.remedy)):
                if text:
                    print(printable(f"          {name}: {text}"))
        print("a job can run" if healthy else "a job would fail")
    if not healthy:
        raise Exit(1)
