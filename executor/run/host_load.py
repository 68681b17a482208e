"""Load of the host by other processes while steps are timed, which delays launches of small kernels."""

from __future__ import annotations

import os
import time

import psutil

WAITING = ("idle", "iowait", "guest", "guest_nice")  # guest time is counted in `user` as well


class HostLoad:
    """The load of this node since the object was created."""

    def __init__(self) -> None:
        self._began = self._read()

    def since(self) -> dict[str, float]:
        """Return the node's cores, and how many of them on average were busy with processes other than its ranks, or
        given to other machines by the hypervisor (Linux counts that as stolen time). Each rank is assumed to be as busy
        as this one.
        """
        seconds, busy, stolen, own = (now - then for now, then in zip(self._read(), self._began, strict=True))
        ranks, passed = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), max(seconds, 1e-3)
        others = max(0.0, busy - ranks * own) / passed
        return {"cores": float(psutil.cpu_count() or 1), "others": others, "stolen": stolen / passed}

    @staticmethod
    def _read() -> tuple[float, float, float, float]:
        """Return the time, and the processor seconds of all processes, stolen ones, and those of this rank."""
        times, own = psutil.cpu_times()._asdict(), psutil.Process().cpu_times()
        stolen = times.pop("steal", 0.0)
        busy = sum(seconds for kind, seconds in times.items() if kind not in WAITING)
        return time.monotonic(), busy, stolen, own.user + own.system
