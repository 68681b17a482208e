"""One thing that a person should know about the health of a machine."""

from __future__ import annotations

from dataclasses import dataclass

from topology.cluster import Severity
from topology.health_cost import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthItem:
    """A difference between expected and found.

    `code` is a stable word for programs. `consequence` ends with the time it costs where rates are known; `cost` has
    the same as numbers. `source` is who saw it: `probe`, `links` or `measured`.
    """

    code: str
    severity: Severity
    what: str
    why: str
    consequence: str
    remedy: str
    gpus: tuple[int, ...] = ()
    cost: Cost | None = None
    source: str = ""


def item_of(
    source: str,
    code: str,
    severity: Severity,
    what: str,
    why: str,
    consequence: str,
    remedy: str,
    gpus: tuple[int, ...] = (),
    cost: Cost | None = None,
) -> HealthItem:
    """Return an item as its check writes it: in the order in which it is read."""
    return HealthItem(
        code=code,
        severity=severity,
        what=what,
        why=why,
        consequence=consequence,
        remedy=remedy,
        gpus=gpus,
        cost=cost,
        source=source,
    )
