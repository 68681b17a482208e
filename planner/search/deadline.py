"""The deadline of a search: a reading of `time.monotonic`, or None without a time limit."""

from __future__ import annotations

import time

from topology.time_limit import reading

NOT_SIMULATED = "the time limit ended before plans were simulated, flip points sought and traffic counted"
NOT_EXPLAINED = "the time limit ended before flip points were sought and traffic counted"
NOT_TRIED = "the time limit ended before it was tried"


def deadline_of(limit_s: float | None) -> float | None:
    """Return the deadline of a limit that begins now; an enclosing deadline may be earlier."""
    return None if limit_s is None else min(time.monotonic() + limit_s, reading())


def over(deadline: float | None) -> bool:
    """Return whether a deadline has passed."""
    return deadline is not None and time.monotonic() >= deadline


def left_s(deadline: float | None) -> float | None:
    """Return the seconds until a deadline; 0 if it has passed."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
