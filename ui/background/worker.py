"""The worker process of the explorer: `python -m ui.background.worker`, started by `planner.jobs.processes`."""

from planner.jobs.worker import serve
from ui.background.work import WORK

if __name__ == "__main__":
    serve(WORK)
