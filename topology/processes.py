"""Whose process holds a GPU. The driver names processes by the host's numbers, which mean others inside a container."""

from __future__ import annotations

import pwd
from pathlib import Path

HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of linux/proc_ns.h


def owner(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Return the user name of a host's process, its user number where it has no name; None where that cannot be known."""
    try:
        if str((proc / "self" / "ns" / "pid").readlink()) != HOST_PID_NAMESPACE:
            return None
        uid = (proc / str(pid)).stat().st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
