"""The worker process of the service: `python -m planner.service.worker`, started by `planner.jobs.processes`."""

from planner.jobs.worker import serve
from planner.service.command import run_command

if __name__ == "__main__":
    serve({"command": run_command})
