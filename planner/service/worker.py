"""What worker processes of the service have imported, and what they do (`planner.jobs.fork_server`)."""

from importlib import import_module

from planner.service.command import run_command

ASKED_MOST = ("suggest", "estimate")

for name in ASKED_MOST:
    import_module(f"planner.commands.{name}")

WORK = {"command": run_command}
