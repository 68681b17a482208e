"""Run a command that dies with its parent: `python -m executor.launch.guard PARENT_PID PROGRAM ARGUMENT...`.

A launcher that is killed with SIGKILL cannot end its children. Linux can signal a child when its parent dies, and this
setting survives exec; on other systems the command simply runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: list[str]) -> None:
    """Request SIGTERM for the parent's death, then become the command. Does not return."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # a C library without prctl: runs unguarded
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(argv[0]):  # the parent died before the request
        raise SystemExit(1)
    os.execv(argv[1], argv[1:])  # noqa: S606 - an argument list without a shell, given by our own launcher


if __name__ == "__main__":
    main(sys.argv[1:])
