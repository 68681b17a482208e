"""A finding about the health of a machine, with its cost in time."""

from __future__ import annotations

from dataclasses import dataclass

from topology.cluster import Finding, Severity
from topology.health.cost import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthItem(Finding):
    """A difference between expected and found.

    `consequence` ends with the time that it costs, where rates are known; `cost` has the numbers. `source` is where it
    was found: `probe`, `links` or `measured`.
    """

    cost: Cost | None = None
    source: str = ""


def health_item(
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
    """Return a `HealthItem` from its texts in reading order."""
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
