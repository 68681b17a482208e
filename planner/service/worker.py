"""The worker process of the service: `python -m planner.service.worker`, started by `planner.jobs.processes`."""

from importlib import import_module

from planner.jobs.worker import serve
from planner.service.command import run_command

ASKED_MOST = ("suggest", "estimate")  # imported before they are asked for

if __name__ == "__main__":
    for name in ASKED_MOST:
        import_module(f"planner.commands.{name}")
    serve({"command": run_command})
