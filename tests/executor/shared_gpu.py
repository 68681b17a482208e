"""Several ranks on one GPU, so that what four ranks compute can be checked where there is one.

NCCL refuses two ranks on one GPU, so the group is gloo's: it takes CUDA tensors for collectives, by way of host memory,
but not for sends and receives (torch 2.11, ProcessGroupGloo.cpp and ProcessGroupGlooCuda.cpp). Symmetric memory needs
only the group's store, and allows one device for all ranks when it is set so (CUDASymmetricMemory.cu). The driver lets
the processes take turns on the GPU, a few milliseconds each: whoever spins is interrupted, so waits end, but each costs
turns of all others. Results mean what they mean on several GPUs; times mean nothing, and neither NVLink nor the order
in which its traffic becomes visible is tested.

Two things are otherwise than between GPUs. Copies are kernels: a persistent product that leaves no room on any
multiprocessor and waits for such a copy waits for ever (one H200, four ranks, reduce-scatter at 16384 x 6152 x 136:
large tiles, and every program waits at some). So products leave a quarter of the multiprocessors alone. And gloo's
all-gather of several tensors, by which torch's functional one is carried out, reads device addresses on the host
(SIGSEGV; the class AsyncAllgatherCoalescedWork has no counterpart for CUDA), so that of one tensor takes its place.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from executor.gpu import exchange_watch
from executor.gpu import symmetric_memory as symmetric
from executor.gpu.device import processors
from executor.overlap import fused

# Of the overlap modes, those that move data themselves. `nccl` and `chunked` would test gloo, and torch's own
# barriers wait without a limit.
MODES = ("copy_engine", "fused")
POLLS = 1 << 25  # alone on the GPU some seconds, with three others four times that
LONGEST_WAIT_S = 30.0
UNUSED_SHARE = 0.25  # of the multiprocessors


def join(timeout_s: float = 60.0) -> torch.device:
    """Join the group of all ranks on the first GPU; return it."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.cuda.init()  # or a mesh would take the GPU of the local rank
    symmetric.POLLS, symmetric.BARRIER_MS = POLLS, int(1e3 * LONGEST_WAIT_S)
    exchange_watch.STALL_S = LONGEST_WAIT_S
    fused.UNUSED_PROCESSORS = int(UNUSED_SHARE * processors(device))
    gather_plainly("CUDA")
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    return device


def gather_plainly(devices: str) -> torch.library.Library:
    """Have torch's functional all-gather carried out by the plain one, for tensors of a dispatch key such as CUDA.

    For good: torch takes the way back where the library that is returned is destroyed.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _gathered, devices)
    _libraries.append(library)
    return library


_libraries: list[torch.library.Library] = []  # what nobody holds is undone


def _gathered(x: torch.Tensor, ranks: int, name: str) -> torch.Tensor:
    whole = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(whole, x, group=_resolve_process_group(name))
    return whole
