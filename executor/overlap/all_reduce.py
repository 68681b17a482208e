"""All-reduce of up to 8 MiB by our own kernels, alone or with the residual and the RMSNorm that follow it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor import symmetric

LARGEST_BYTES = 8 * 2**20
TWO_SHOT_SAVES_BYTES = 1.5 * 2**20
MAX_PROGRAMS = 256  # flags are laid out for so many
FLAGS = 2 * MAX_PROGRAMS  # of one source: two exchanges
MAX_COLUMNS = 16384  # one row is one program's registers


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a sum is cut: numbers a row, programs, warps, and one exchange or two."""

    columns: int
    programs: int
    warps: int
    shots: int


def handles(nbytes: int) -> bool:
    """Say whether a tensor of that size is ours to reduce; larger ones are NCCL's."""
    return 0 < nbytes <= LARGEST_BYTES


def all_reduce(x: Tensor, group: dist.ProcessGroup, *, launch: Launch | None = None) -> Tensor:
    """Return the sum over ranks of `x`, of any shape; the same bits on every rank."""
    flat = x.contiguous().view(-1)
    out = torch.empty_like(flat)
    launch = launch or launch_for(flat.numel(), flat.element_size(), dist.get_world_size(group), x.device)
    _run(flat, out, None, None, None, 0.0, group, launch)
    return out.view(x.shape)


def all_reduce_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, group: dist.ProcessGroup, *, eps: float, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """Return (normalized, residual') of `x` (rows, D): residual' = residual + sum over ranks; normalized by RMS, scaled.

    `weight` is (D,), D at most 16,384. What is added and normalized is kept in float32 until it is stored.
    """
    columns = x.shape[1]
    if columns > MAX_COLUMNS:
        raise ValueError(f"rows of {columns} numbers: the kernel holds at most {MAX_COLUMNS} of a row")
    out, residual_out = torch.empty_like(x), torch.empty_like(residual)
    launch = launch or launch_for(x.numel(), x.element_size(), dist.get_world_size(group), x.device, row=columns)
    _run(x.contiguous(), out, residual.contiguous(), residual_out, weight, eps, group, launch)
    return out, residual_out


@cache
def launch_for(numel: int, itemsize: int, world: int, device: torch.device, *, row: int | None = None) -> Launch:
    """Return the cut: small tensors over many small rows, large ones over rows that fill a program's load queues."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    columns = row or (1024 if numel <= 1024 * processors else 2048 if numel <= 2048 * processors else 4096)
    rows = -(-numel // columns)
    # Two exchanges pay when what they save, (W - 1)·(1 - 2/W) of the bytes, outweighs a second wait: on four H200
    # from 2 MiB on (examples/validation/overlap_4xH200.md).
    shots = 2 if (world - 1) * (1 - 2 / world) * numel * itemsize > TWO_SHOT_SAVES_BYTES else 1
    width = 1 << (columns - 1).bit_length()
    warps = min(16, max(4, width // 512))
    return Launch(columns=columns, programs=max(1, min(rows, processors)), warps=warps, shots=shots)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A compiled kernel and the arguments that stay: triton's own launch looks at every argument, for 30 µs."""

    set_bytes: int
    slots: symmetric.Allocation
    signals: symmetric.Allocation
    kernel: Any
    grid: tuple[int, int, int]
    rest: tuple[Any, ...]


def _run(
    x: Tensor,
    out: Tensor,
    residual: Tensor | None,
    residual_out: Tensor | None,
    weight: Tensor | None,
    eps: float,
    group: dist.ProcessGroup,
    launch: Launch,
) -> None:
    norm = residual is not None
    tensors = (x, out, residual, residual_out, weight) if norm else (x, out, x, x, x)
    aligned = tuple(t.data_ptr() % 16 == 0 for t in tensors) if norm else (x.data_ptr() % 16 == 0,)
    space = symmetric.workspace(group, "all_reduce", x.device)
    key = (x.numel(), tuple(t.dtype for t in tensors), aligned, eps, norm, launch)
    ready = space.prepared.get(key)
    if ready is not None:
        space.reserve(ready.set_bytes, FLAGS * space.world)
        if ready.slots is space.data and ready.signals is space.signals:
            ready.kernel[ready.grid](*tensors, *ready.rest)
            return
    space.prepared[key] = _prepare_and_run(tensors, eps, space, launch, norm=norm)


def _prepare_and_run(
    tensors: tuple[Tensor, ...], eps: float, space: symmetric.Workspace, launch: Launch, *, norm: bool
) -> _Prepared:
    from executor.kernels.all_reduce import one_shot, two_shot  # noqa: PLC0415 - triton

    x = tensors[0]
    rank, world, numel = space.rank, space.world, x.numel()
    # One shot: a slot for every source. Two shots: a share for every source, and the sums; both rounded up to rows.
    padded = (-(-numel // launch.columns) + 2 * world) * launch.columns
    set_bytes = (world if launch.shots == 1 else 2) * padded * x.element_size()
    space.reserve(set_bytes, FLAGS * world)
    rest = (
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
    grid = (min(launch.programs, MAX_PROGRAMS), 1, 1)
    kernel = (one_shot if launch.shots == 1 else two_shot)[grid](*tensors, *rest, num_warps=launch.warps)
    # Addresses as numbers: Triton asks the driver about every tensor that it is given.
    rest = tuple(value.data_ptr() if isinstance(value, Tensor) else value for value in rest)
    return _Prepared(set_bytes, space.slots, space.flags, kernel, grid, rest)
