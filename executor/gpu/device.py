"""The operations on a device that differ between GPU and CPU, and what torch.compile has made for it."""

from __future__ import annotations

import sys
from functools import cache

import torch

COMPILER = "torch._inductor.compile_fx"  # imported by whatever is compiled first


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


def forget_compiled() -> None:
    """Forget compiled code and the counts of it. Where nothing was compiled, the compiler is not imported for it, which
    takes 1 to 3 s.
    """
    if COMPILER not in sys.modules:
        return
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()  # noqa: SLF001 - the only count of what was compiled
