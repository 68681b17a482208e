"""Ctrl-C while modules are imported: Python cannot raise it everywhere there, so it ends the process by itself."""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_CODE = 130


def end_at_once() -> None:
    """Let an interrupt end the process with exit code 130, unless it is ignored or somebody else's already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Let an interrupt raise KeyboardInterrupt again, so that commands can end what they have started."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE)
