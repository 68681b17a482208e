"""The `planner` command, also as `python -m planner`."""

import atexit
import gc
import os
import sys
import threading
from itertools import pairwise
from math import inf

from planner.io.interrupts import end_at_once
from topology.time_limit import command, with_alarm

LIMIT, LIMITED = "--time-limit", frozenset({"suggest", "explain", "check"})


def main() -> int:
    """Run the command line and end the process with its exit code."""
    end_at_once()
    with command(process=True), with_alarm(_limit(sys.argv[1:])):  # imports below count against its time limit
        code = _run()
    if threading.active_count() == 1:
        # Nothing is left to do but free memory object by object, which the system does at once.
        atexit._run_exitfuncs()  # noqa: SLF001 - there is no other name for it
        _flush()
        os._exit(code)
    return code


def _limit(words: list[str]) -> float | None:
    """Return the seconds that an answer may take, if the arguments state them plainly."""
    said = [
        after if word == LIMIT else word.partition("=")[2]
        for word, after in pairwise([*words, ""])
        if word.partition("=")[0] == LIMIT
    ]
    try:
        seconds = float(said[-1]) if said and words[0] in LIMITED else 0.0
    except ValueError:  # not a number, which is refused later
        return None
    return seconds if 0 < seconds < inf else None  # other values are refused later


def _run() -> int:
    gc.set_threshold(200_000)  # imports make many objects that stay: collecting more often finds nothing
    from planner.cli import main as run  # noqa: PLC0415 - an interrupt may come while this is imported
    from topology.cores import several_cores  # noqa: PLC0415 - the same

    with several_cores():
        return run()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed by its reader
            continue


if __name__ == "__main__":
    sys.exit(main())
