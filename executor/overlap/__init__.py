"""Tensor-parallel matmuls overlapped with their collective, in interchangeable modes.

    all_gather_matmul(x, (w1, w3), group, mode="fused")   column-parallel; input sharded by tokens, output by width
    matmul_reduce_scatter(x, w2, group, mode="fused")     row-parallel; input sharded by width, output by tokens
    matmul_all_reduce(x, w2, group, mode="fused")         row-parallel without sequence parallelism

Weights are as in `torch.nn.Linear`, (out, in), this rank's shard of them. All functions are differentiable; the
backward pass uses the same mode. `nccl` is the reference; each mode's module says how it overlaps. On CPU tensors
`nccl` and `chunked` run with gloo, and the other modes run as `nccl`.

May import `gpu`, `kernels` (where Triton is installed) and `launch`, `topology` and `simulator`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from executor.overlap.autograd import AllGatherMatmul, MatmulAllReduce, MatmulReduceScatter
from executor.overlap.chunked import Chunked
from executor.overlap.copy_engine import CopyEngine
from executor.overlap.fused import Fused
from executor.overlap.mode import Mode
from executor.overlap.nccl import Nccl
from topology.errors import BadPlan

MODES: dict[str, Mode] = {mode.name: mode for mode in (Nccl(), Chunked(), CopyEngine(), Fused())}
# Not implemented, since they need NVLink multicast objects; the simulator may model them.
NEED_MULTICAST = frozenset({"multimem", "multimem_one_shot", "multimem_two_shot", "nvls"})


def mode_named(name: str | Mode) -> Mode:
    """Return a mode; `name` may be one already. Raises BadPlan for a name that is none or that needs NVLink
    multicast.
    """
    if isinstance(name, Mode):
        return name
    if name in MODES:
        return MODES[name]
    modes = ", ".join(MODES)
    if name in NEED_MULTICAST:
        raise BadPlan(
            f"the overlap mode {name} is not run",
            why="it needs NVLink multicast, which stays off: creating its objects can hang the GPUs of a shared host",
            remedy=f"choose one of {modes}; fused is the nearest",
        )
    raise BadPlan(f"there is no overlap mode {name}", remedy=f"choose one of {modes}")


def all_gather_matmul(
    x: Tensor, weights: tuple[Tensor, ...], group: dist.ProcessGroup, *, mode: str | Mode, dim: int = 0
) -> tuple[Tensor, ...]:
    """Return X @ w^T for each weight (N_i, K), where X concatenates the `x` (..., K) of all ranks along `dim`.

    Several weights share one all-gather (queries, keys and values; gate and up).
    """
    rows, rest = _to_rows(x, dim)
    run = mode_named(mode)
    if torch.is_grad_enabled():
        outs: tuple[Tensor, ...] = AllGatherMatmul.apply(run, group, rows, *weights)
    else:  # autograd alone costs as much as two launches
        outs = run.gather_matmul(rows, tuple(weight.t() for weight in weights), group)[0]
    return tuple(_from_rows(out, rest, dim) for out in outs)


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, group: dist.ProcessGroup, *, mode: str | Mode, dim: int = 0
) -> Tensor:
    """Return this rank's part along `dim` of the sum over ranks of x @ w^T, `x` (..., K), weight (N, K).

    Raises ValueError when `dim` cannot be cut into equal parts.
    """
    rows, rest = _to_rows(x, dim)
    if x.shape[dim] % dist.get_world_size(group):
        raise ValueError(f"{x.shape[dim]} rows cannot be shared out evenly among {dist.get_world_size(group)} ranks")
    run = mode_named(mode)
    if torch.is_grad_enabled():
        out: Tensor = MatmulReduceScatter.apply(run, group, rows, weight)
    else:
        out = run.matmul_scatter(((rows, weight.t()),), group)
    return _from_rows(out, rest, dim)


def matmul_all_reduce(x: Tensor, weight: Tensor, group: dist.ProcessGroup, *, mode: str | Mode) -> Tensor:
    """Return the sum over ranks of x @ w^T, `x` (..., K), weight (N, K)."""
    run, rows = mode_named(mode), x.flatten(0, -2)
    if torch.is_grad_enabled():
        out: Tensor = MatmulAllReduce.apply(run, group, rows, weight)
    else:
        out = run.matmul_reduce(rows, weight.t(), group)
    total: Tensor = out.unflatten(0, x.shape[:-1])
    return total


def _to_rows(x: Tensor, dim: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return `x` as a matrix whose rows begin with `dim`, and the sizes of the other leading dimensions."""
    if x.dim() == 2 and dim == 0:
        return x, ()
    moved = x.movedim(dim, 0)
    return moved.flatten(0, -2), tuple(moved.shape[1:-1])


def _from_rows(rows: Tensor, rest: tuple[int, ...], dim: int) -> Tensor:
    return rows.unflatten(0, (-1, *rest)).movedim(0, dim) if rest else rows
