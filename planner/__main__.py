"""The `planner` command, also as `python -m planner`."""

import gc
import sys

from planner.io.interrupts import end_at_once
from topology.time_limit import command


def main() -> int:
    """Run the command line and return its exit code."""
    end_at_once()
    with command():  # what is imported from here on is part of its time
        return _run()


def _run() -> int:
    gc.set_threshold(50_000)  # importing makes many objects that stay: looking through them as often finds nothing
    from planner.cli import main as run  # noqa: PLC0415 - an interrupt may come while this is imported
    from topology.cores import several_cores  # noqa: PLC0415 - the same

    with several_cores():
        return run()


if __name__ == "__main__":
    sys.exit(main())
