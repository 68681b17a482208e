"""Several ranks on one GPU, so that what four ranks compute can be checked where there is one.

NCCL refuses two ranks on one GPU, so the group is gloo's: it takes CUDA tensors for collectives, by way of host memory,
but not for sends and receives (torch 2.11, ProcessGroupGloo.cpp and ProcessGroupGlooCuda.cpp). Symmetric memory needs only
the group's store, and allows one device for all ranks when it is told so (CUDASymmetricMemory.cu). The driver lets the
processes take turns on the GPU, a few milliseconds each: whoever spins is interrupted, so waits end, but each costs turns
of all others. Results mean what they mean on several GPUs; times mean nothing, and neither NVLink nor the order in which
its traffic becomes visible is tested.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from executor import exchange_watch, symmetric

# Of the overlap modes, those that move data themselves. `nccl` and `chunked` would test gloo, `ring` sends and receives,
# and torch's own barriers wait without a limit.
MODES = ("copy_engine", "fused")
POLLS = 1 << 25  # alone on the GPU some seconds, with three others four times that
LONGEST_WAIT_S = 30.0


def join(timeout_s: float = 60.0) -> torch.device:
    """Join the group of all ranks on the first GPU; return it."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.cuda.init()  # or a mesh would take the GPU of the local rank
    symmetric.POLLS, symmetric.BARRIER_MS = POLLS, int(1e3 * LONGEST_WAIT_S)
    exchange_watch.STALL_S = LONGEST_WAIT_S
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    return device
