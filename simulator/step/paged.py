"""States of a paged optimizer, in managed memory that the driver moves to the host when the GPU is full.

bitsandbytes allocates states of parameters with 100,000 numbers or more by cudaMallocManaged, and prefetches those of
each parameter to the GPU before its update (bitsandbytes/optim/optimizer.py: get_state_buffer, prefetch_state); scales
of 8-bit blocks and smaller parameters' states are torch's. When memory is short, also for cudaMalloc, NVIDIA's driver
evicts the 2 MiB block that came to the GPU first (kernel-open/nvidia-uvm/uvm_pmm_gpu.c: va_block_used,
uvm_pmm_gpu_pma_evict_pages). An update visits all parameters in the same order, so if there is not enough room for all
states, each has been evicted when its turn comes. So in a step either all states move in and out, one copy after the
other, or none do.
"""

from __future__ import annotations

from simulator.config.optimizers import OPTIMIZERS
from simulator.config.runtime import Runtime

PAGED_ELEMENTS = 1e5  # least elements of a parameter whose states are paged


def paged_width(runtime: Runtime) -> float:
    """Return the bytes per element of paged states, for parameters that are large enough; 0 for an unknown optimizer,
    which is refused elsewhere.
    """
    known = OPTIMIZERS.get(runtime.optimizer)
    return known.paged if known is not None else 0.0


def paged_bytes(runtime: Runtime, elements: float) -> float:
    """Return the bytes of paged states for a parameter with `elements` on a rank."""
    return elements * paged_width(runtime) if elements >= PAGED_ELEMENTS else 0.0
