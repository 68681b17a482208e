"""The end of the time that an answer may take: long computations look at it now and then, wherever they are.

    with limited(asked.time_limit):   # in a command
        ...
    check_time()                      # in a loop

A computation that is over raises `Unproved`; whoever has found something by then ends with that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf

from topology.errors import Unproved

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)
_began: ContextVar[float | None] = ContextVar("began", default=None)


@contextmanager
def command() -> Iterator[None]:
    """Count the time of all limits inside from here on, or from where a command around it began: what a command loads
    first is part of it.
    """
    token = _began.set(_began.get() or time.monotonic())
    try:
        yield
    finally:
        _began.reset(token)


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """End what is done inside after so many seconds; None is no limit."""
    began = _began.get()
    with until(None if seconds is None else (time.monotonic() if began is None else began) + seconds):
        yield


@contextmanager
def until(deadline: float | None) -> Iterator[None]:
    """End what is done inside at a reading of `time.monotonic`; None is no limit."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


def reading() -> float:
    """Return the reading of `time.monotonic` at which the time is over."""
    deadline = _deadline.get()
    return inf if deadline is None else deadline


def check_time() -> None:
    """Raise Unproved where the time is over."""
    if time.monotonic() >= reading():
        raise ended()


def ended() -> Unproved:
    """Return what says that the time is over and nothing was found."""
    return Unproved(
        "the time limit ended before there was an answer",
        why="no plan was found by then, and it was not shown that there is none",
        remedy="a longer --time-limit",
    )
