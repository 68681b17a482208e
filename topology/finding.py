"""Helpers that the checks use to write findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from topology.cluster import Finding, Severity
from topology.units import in_gib

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def finding(
    code: str,
    severity: Severity,
    what: str,
    why: str,
    consequence: str,
    remedy: str,
    *,
    gpus: Iterable[int] = (),
    **numbers: float,
) -> Finding:
    """Return a `Finding`, from its texts in reading order; `numbers` are what programs need from it."""
    return Finding(
        code=code,
        severity=severity,
        what=what,
        why=why,
        consequence=consequence,
        remedy=remedy,
        gpus=tuple(gpus),
        numbers=numbers,
    )


def gpu_names(gpus: Iterable[int]) -> str:
    """Return `GPU 2` or `GPUs 0, 1, 5`; at most 16 are listed."""
    listed = list(gpus)
    shown = ", ".join(map(str, listed[:16])) + (f" and {len(listed) - 16} more" if len(listed) > 16 else "")
    return f"GPU {shown}" if len(listed) == 1 else f"GPUs {shown}"


def describe_processes(bytes_by_pid: Mapping[int, float], owner: Callable[[int], str] | None = None) -> str:
    """Return a list of process ids with the bytes of GPU memory they hold (0: unknown) and, given `owner`, their
    user.
    """
    return ", ".join(
        f"pid {pid}" + (f" of {owner(pid)}" if owner else "") + (f" ({in_gib(held_bytes)})" if held_bytes else "")
        for pid, held_bytes in list(bytes_by_pid.items())[:8]
    )
