"""Ctrl-C during imports: Python cannot raise KeyboardInterrupt everywhere there, so the process exits."""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_CODE = 130


def end_at_once() -> None:
    """Let an interrupt exit the process with code 130, unless it is ignored or already handled elsewhere."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Let an interrupt raise KeyboardInterrupt again, so that commands can end what they have started."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE)
