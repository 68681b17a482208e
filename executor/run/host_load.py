"""How busy others keep the host while steps are timed: launches of small kernels wait for it."""

from __future__ import annotations

import os
import time

import psutil

WAITING = ("idle", "iowait", "guest", "guest_nice")  # guests' time is counted in `user` as well


class HostLoad:
    """The load of this node from when it is made."""

    def __init__(self) -> None:
        self._began = self._read()

    def since(self) -> dict[str, float]:
        """Return the node's cores, and how many of them on average other processes than its ranks kept busy, or its
        hypervisor gave to other machines (Linux counts it as stolen). Each rank is taken to be as busy as this one.
        """
        seconds, busy, stolen, own = (now - then for now, then in zip(self._read(), self._began, strict=True))
        ranks, passed = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), max(seconds, 1e-3)
        others = max(0.0, busy - ranks * own) / passed
        return {"cores": float(psutil.cpu_count() or 1), "others": others, "stolen": stolen / passed}

    @staticmethod
    def _read() -> tuple[float, float, float, float]:
        """Return the time, and seconds of processors: of all processes, stolen, of this rank."""
        times, own = psutil.cpu_times()._asdict(), psutil.Process().cpu_times()
        stolen = times.pop("steal", 0.0)
        busy = sum(seconds for kind, seconds in times.items() if kind not in WAITING)
        return time.monotonic(), busy, stolen, own.user + own.system
