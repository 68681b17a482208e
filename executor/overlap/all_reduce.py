"""All-reduce of up to 8 MiB by our own Triton kernels, alone or fused with the following residual and RMSNorm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from executor.gpu import stream_ops
from executor.gpu import symmetric_memory as symmetric
from executor.gpu.symmetric_memory import MAX_PROGRAMS
from executor.kernels import on_demand as kernels
from executor.kernels.prepared_kernel import PreparedKernel

LARGEST_BYTES = 8 * 2**20
# The additional bytes of flagged words, (W - 1)·n, that take as long as an exchange of flags: 2.2 us on two H200
# (examples/validation/overlap_2xH200.md), where NVLink carries 350 GB/s.
FLAGGED_SAVE_BYTES = 768 * 2**10
TWO_SHOT_SAVES_BYTES = 1.5 * 2**20
FLAGS = 2 * MAX_PROGRAMS  # flags per source rank, for two exchanges
MAX_COLUMNS = 16384  # one row is held in the registers of one program
WORDS = 256  # words of 4 bytes per program of the kernel with flagged words
ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch configuration: numbers per row, programs, warps; `shots` is 1 or 2 exchanges, 0 for flagged words."""

    columns: int
    programs: int
    warps: int
    shots: int


def fits_own_kernel(nbytes: int) -> bool:
    """Return whether a tensor of `nbytes` is reduced by these kernels; larger ones go to NCCL."""
    return 0 < nbytes <= LARGEST_BYTES


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, *, out: Tensor | None = None, launch: Launch | None = None
) -> Tensor:
    """Return the sum over ranks of `x`, of any shape; bitwise equal on every rank.

    `out` is a contiguous tensor like `x` for the result, and may be `x` itself.
    """
    x = x.contiguous()
    if out is None:
        out = torch.empty_like(x)
    source, target, stream = x.data_ptr(), out.data_ptr(), stream_ops.current_stream(x.device)
    space = symmetric.workspace(group, "all_reduce", x.device)
    key = (x.numel(), x.dtype, (source | target) % ALIGNMENT, launch)
    ready = space.prepared.get(key)
    if ready is None:
        ready = _prepare(space, x, out, launch)
        space.prepared[key] = ready
    space.captured |= space.is_capturing()
    ready(stream, source, target)
    return out


def all_reduce_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, group: dist.ProcessGroup, *, eps: float, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """Return (normalized, residual') of `x` (rows, D): residual' = residual + sum over ranks; normalized by RMS,
    scaled.

    `weight` is (D,), D at most 16,384. What is added and normalized is kept in float32, or float64 where `x`
    is, until it is stored.
    """
    x, residual = x.contiguous(), residual.contiguous()
    out, residual_out = torch.empty_like(x), torch.empty_like(residual)
    tensors = (x, out, residual, residual_out, weight)
    addresses = [t.data_ptr() for t in tensors]
    space = symmetric.workspace(group, "all_reduce", x.device)
    space.captured |= space.is_capturing()
    aligned = tuple(address % ALIGNMENT == 0 for address in addresses)
    key = (x.shape, tuple(t.dtype for t in tensors), aligned, eps, launch)
    ready = space.prepared.get(key)
    if ready is None:
        columns = x.shape[1]
        if columns > MAX_COLUMNS:
            raise ValueError(f"rows of {columns} numbers: the kernel holds at most {MAX_COLUMNS} of a row")
        launch = launch or launch_for(x.numel(), x.element_size(), space.world, x.device, row=columns)
        ready = space.prepared[key] = _prepare_rows(space, tensors, eps, launch)
    ready(stream_ops.current_stream(x.device), *addresses)
    return out, residual_out


@cache
def launch_for(numel: int, itemsize: int, world: int, device: torch.device, *, row: int | None = None) -> Launch:
    """Return the launch configuration: short rows for small tensors, so that many SMs take part, else longer ones."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    columns = row or (1024 if numel <= 1024 * processors else 2048 if numel <= 2048 * processors else 4096)
    rows = -(-numel // columns)
    # Two exchanges are faster when the bytes they save, (W - 1)·(1 - 2/W) of the tensor, outweigh a second wait: on
    # four H200 from 2 MiB on (examples/validation/overlap_4xH200.md).
    shots = 2 if (world - 1) * (1 - 2 / world) * numel * itemsize > TWO_SHOT_SAVES_BYTES else 1
    width = 1 << (columns - 1).bit_length()
    warps = min(16, max(4, width // 512))
    return Launch(columns=columns, programs=max(1, min(rows, processors)), warps=warps, shots=shots)


def flagged(numel: int, itemsize: int) -> Launch | None:
    """Return the configuration for flagged words; None for sizes that are too large or not a multiple of 16 bytes."""
    nbytes = numel * itemsize
    if itemsize not in {2, 4} or nbytes % ALIGNMENT or nbytes > 4 * WORDS * MAX_PROGRAMS:
        return None
    return Launch(columns=4 * WORDS // itemsize, programs=-(-nbytes // (4 * WORDS)), warps=4, shots=0)


def _prepare(space: symmetric.Workspace, x: Tensor, out: Tensor, launch: Launch | None) -> Callable[..., None]:
    aligned = (x.data_ptr() | out.data_ptr()) % ALIGNMENT == 0
    small = flagged(x.numel(), x.element_size()) if aligned else None
    if launch is None and small is not None and (space.world - 1) * x.numel() * x.element_size() <= FLAGGED_SAVE_BYTES:
        launch = small
    launch = launch or launch_for(x.numel(), x.element_size(), space.world, x.device)
    if launch.shots == 0:
        return _prepare_flagged(space, x, out, launch)
    ready = _prepare_rows(space, (x.view(-1), out.view(-1), x, x, x), 0.0, launch, norm=False)
    return lambda stream, source, target: ready(stream, source, target, source, source, source)


def _prepare_flagged(space: symmetric.Workspace, x: Tensor, out: Tensor, launch: Launch) -> PreparedKernel:
    # A separate workspace that holds flagged words only: other data could look like a flag.
    own = symmetric.workspace(space.group, "all_reduce words", x.device)
    own.reserve(8 * space.world * MAX_PROGRAMS * WORDS, 1)
    own.captured |= space.captured
    args = (
        x,
        out,
        own.slots.on(space.rank, (1,), torch.int64),
        own.slots.addresses,
        own.epochs,
        own.error,
        x.numel() * x.element_size() // 16,
        space.rank,
        space.world,
        WORDS,
        MAX_PROGRAMS,
        symmetric.POLLS,
    )
    return PreparedKernel(kernels.flagged_words, launch.programs, args, changing=(0, 1), num_warps=launch.warps)


def _prepare_rows(
    space: symmetric.Workspace, tensors: tuple[Tensor, ...], eps: float, launch: Launch, *, norm: bool = True
) -> PreparedKernel:
    x = tensors[0]
    rank, world, numel = space.rank, space.world, x.numel()
    # One shot: a slot for every source. Two shots: a share for every source, and the sums; both rounded up to rows.
    padded = (-(-numel // launch.columns) + 2 * world) * launch.columns
    space.reserve((world if launch.shots == 1 else 2) * padded * x.element_size(), FLAGS * world)
    args = (
        *tensors,
        space.slots.on(rank, (1,), x.dtype),
        space.slots.addresses,
        space.flags.on(rank, (1,), torch.int32),
        space.flags.addresses,
        space.epoch,
        space.ticket,
        space.error,
        numel,
        launch.columns,
        space.set_bytes // x.element_size(),
        eps,
        rank,
        world,
        norm,
        1 << (launch.columns - 1).bit_length(),
        MAX_PROGRAMS,
        symmetric.POLLS,
    )
    kernel = kernels.one_shot if launch.shots == 1 else kernels.two_shot
    programs = min(launch.programs, MAX_PROGRAMS)
    return PreparedKernel(kernel, programs, args, changing=range(len(tensors)), num_warps=launch.warps)
