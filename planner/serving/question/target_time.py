"""Targets of latency as people write them: `500ms`, `0.5s`, or plain seconds."""

from __future__ import annotations

import re

from topology.errors import UserError

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# Plain numbers from which milliseconds may be meant: nobody waits so many seconds for a token on purpose.
UNLIKELY = {"--ttft": 100.0, "--tpot": 2.0}
_SAID = re.compile(r"([0-9]{1,15}(?:\.[0-9]{0,18})?(?:e[+-]?[0-9]{1,2})?|\.[0-9]{1,18}) ?(us|ms|s)?")


def target_s(said: str | float | None, flag: str) -> float | None:
    """Return the seconds of a target that a flag of `UNLIKELY` states; None if it states none.

    A number without a unit is seconds. Raises UserError for anything that is no time, and for a plain number so large
    that it may be meant in milliseconds.
    """
    if said is None or isinstance(said, (int, float)):
        return said
    found = _SAID.fullmatch(said.strip().lower()[:40])
    if found is None:
        raise UserError(
            f"{flag} is {said[:40]!r}",
            why="it is a time of at least 0: a number of seconds, or one with s, ms or us",
            remedy=f"{flag} 0.5 or {flag} 500ms" if flag == "--ttft" else f"{flag} 0.02 or {flag} 20ms",
        )
    value = float(found[1]) * _UNITS_S[found[2] or "s"]
    if not found[2] and value >= UNLIKELY[flag]:
        raise UserError(
            f"{flag} {said.strip()} may be meant in seconds or in milliseconds",
            why="a number without a unit is seconds",
            remedy=f"{flag} {found[1]}ms, or {flag} {found[1]}s",
        )
    return value
