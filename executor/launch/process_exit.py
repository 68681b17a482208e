"""Exit codes of this package's processes, and SIGTERM handling that ends their children, too."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from topology.errors import PlannerError


def interrupt_on_sigterm() -> None:
    """Treat SIGTERM like Ctrl-C, so that the children of this process are ended, too."""
    signal.signal(signal.SIGTERM, _interrupt)


def exit_code_of(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Call `run` and return its exit code: 130 when interrupted, a PlannerError's own code when one was raised."""
    interrupt_on_sigterm()
    try:
        return run(options)
    except KeyboardInterrupt:
        return 130
    except PlannerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
