"""How a process of ours ends: everything that it started goes with it, and its exit code says how it went."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from topology.errors import PlannerError


def stop_at_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does: whoever sends it wants our children gone, too."""
    signal.signal(signal.SIGTERM, _interrupt)


def ended(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run, and return the exit code: 130 when interrupted, that of the error when one of ours was raised."""
    stop_at_sigterm()
    try:
        return run(options)
    except KeyboardInterrupt:
        return 130
    except PlannerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
