"""Ranks of several nodes compare their software: other versions compute, pack or wait differently, and may
never meet.
"""

from __future__ import annotations

import json
import os
import socket

import torch
import torch.distributed as dist

from topology.versions import differences, driver_version, versions

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
