"""The small words that every check uses."""

from __future__ import annotations

from collections.abc import Iterable

from topology.cluster import Finding, Severity

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def finding(severity: Severity, what: str, why: str, consequence: str, remedy: str) -> Finding:
    return Finding(severity=severity, what=what, why=why, consequence=consequence, remedy=remedy)


def names(gpus: Iterable[int]) -> str:
    """`GPU 2` or `GPUs 0, 1, 5`; long lists are cut."""
    listed = list(gpus)
    shown = ", ".join(map(str, listed[:16])) + (f" and {len(listed) - 16} more" if len(listed) > 16 else "")
    return f"GPU {shown}" if len(listed) == 1 else f"GPUs {shown}"
