"""States of a paged optimizer: in memory that GPU and host share, which the driver moves where the GPU is full.

bitsandbytes has states of parameters of 100,000 numbers or more made by cudaMallocManaged, and asks for those of each
parameter on the GPU before it updates it (bitsandbytes/optim/optimizer.py: get_state_buffer, prefetch_state); scales of
8-bit blocks and smaller parameters' states are torch's. Where memory is short, also for cudaMalloc, NVIDIA's driver
moves the 2 MiB to the host that came to the GPU first (kernel-open/nvidia-uvm/uvm_pmm_gpu.c: va_block_used,
uvm_pmm_gpu_pma_evict_pages). An update goes through all parameters in one order: where all states have not enough room
together, each has been moved away when its turn comes. So all of them come in and go out in a step, one copy after the
other, or none does.
"""

from __future__ import annotations

from simulator.config.optimizers import OPTIMIZERS
from simulator.config.runtime import Runtime

PAGED_ELEMENTS = 1e5  # of a parameter, from which its states are paged


def paged_width(runtime: Runtime) -> float:
    """Return the bytes of a parameter's states that are paged, of parameters that are large enough: none of an
    optimizer that is not known, which is refused elsewhere.
    """
    known = OPTIMIZERS.get(runtime.optimizer)
    return known.paged if known is not None else 0.0


def paged_bytes(runtime: Runtime, elements: float) -> float:
    """Return those of a parameter of so many elements on a rank."""
    return elements * paged_width(runtime) if elements >= PAGED_ELEMENTS else 0.0
