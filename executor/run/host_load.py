"""The hosts of a run: their load by other processes while steps are timed, which delays launches of small kernels; and
whether all have the same software, since other versions compute, pack or wait differently, and may never meet.
"""

from __future__ import annotations

import json
import os
import socket
import time

import psutil
import torch
import torch.distributed as dist

from topology.versions import differences, driver_version, versions

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


LARGEST_BYTES = 1024


def require_same_software(device: torch.device) -> None:
    """Raise RuntimeError if ranks of other nodes have other versions of a package. A collective call.

    Python's own version may differ.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return
    mine = {**versions(), "torch": torch.__version__}
    del mine["python"]
    if device.type == "cuda":
        mine |= {"GPU": torch.cuda.get_device_name(device), "driver": driver_version() or "unknown"}
    text = json.dumps({f"{socket.gethostname()} (rank {dist.get_rank()})": mine}).encode()[:LARGEST_BYTES]
    sent = torch.zeros(LARGEST_BYTES, dtype=torch.uint8)
    sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sent = sent.to(device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent)
    by_node: dict[str, dict[str, str]] = {}
    for one in received:
        by_node |= json.loads(bytes(one.tolist()).rstrip(b"\0"))
    if lines := differences(by_node):
        raise RuntimeError(f"the nodes do not run the same software: {'; '.join(lines)}")
