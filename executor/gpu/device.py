"""The operations on a device that differ between GPU and CPU."""

from __future__ import annotations

from functools import cache

import torch


def synchronize(device: torch.device) -> None:
    """Block the host until the GPU is done; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
