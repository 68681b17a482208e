"""Tensor-parallel products whose communication hides behind them: one signature, many modes.

    all_gather_matmul(x, (w1, w3), group, mode="fused")   column-parallel; tokens are cut before, the width after
    matmul_reduce_scatter(x, w2, group, mode="fused")     row-parallel; the width is cut before, tokens after
    matmul_all_reduce(x, w2, group, mode="fused")         row-parallel without sequence parallelism

Weights are as in `torch.nn.Linear`, (out, in), this rank's part of them. All functions are differentiable, in the same
mode. `nccl` is the reference; what the others need and how they do it is the first sentence of each one's file. On CPU
tensors `nccl`, `chunked` and `ring` run with gloo, and the others do what `nccl` does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.overlap.autograd import AllGatherMatmul, MatmulAllReduce, MatmulReduceScatter
from executor.overlap.chunked import Chunked
from executor.overlap.copy_engine import CopyEngine
from executor.overlap.fused import Fused
from executor.overlap.mode import Mode
from executor.overlap.nccl import Nccl
from executor.overlap.ring import Ring
from executor.overlap.torch_symm_mem import TorchSymmMem
from topology.errors import BadPlan

MODES: dict[str, Mode] = {
    mode.name: mode for mode in (Nccl(), Chunked(), Ring(), CopyEngine(), Fused(), TorchSymmMem())
}
# Modelled by the simulator at most: they reduce or broadcast in the switch, and that needs multicast objects.
NEED_MULTICAST = frozenset({"multimem", "multimem_one_shot", "multimem_two_shot", "nvls"})


def mode_named(name: str) -> Mode:
    """Return a mode. Raises BadPlan for a name that is none, and for one that needs NVLink multicast."""
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
    x: Tensor, weights: tuple[Tensor, ...], group: dist.ProcessGroup, *, mode: str, dim: int = 0
) -> tuple[Tensor, ...]:
    """Return X @ w^T for each weight (N_i, K), where X is all ranks' `x` (..., K) joined along `dim`.

    Several weights share one gather (queries, keys and values; gate and up). Gradients flow to x and the weights.
    """
    rows, rest = _to_rows(x, dim)
    run = mode_named(mode)
    if torch.is_grad_enabled():
        outs = AllGatherMatmul.apply(run, group, rows, *weights)
    else:  # autograd's own cost is that of two launches
        outs = run.gather_matmul(rows, tuple(weight.t() for weight in weights), group)[0]
    return tuple(_from_rows(out, rest, dim) for out in outs)


def matmul_reduce_scatter(x: Tensor, weight: Tensor, group: dist.ProcessGroup, *, mode: str, dim: int = 0) -> Tensor:
    """Return this rank's part along `dim` of the sum over ranks of x @ w^T, `x` (..., K), weight (N, K).

    Raises ValueError when `dim` cannot be cut into equal parts.
    """
    rows, rest = _to_rows(x, dim)
    if x.shape[dim] % dist.get_world_size(group):
        raise ValueError(f"{x.shape[dim]} rows cannot be shared out evenly among {dist.get_world_size(group)} ranks")
    run = mode_named(mode)
    if torch.is_grad_enabled():
        out = MatmulReduceScatter.apply(run, group, rows, weight)
    else:
        out = run.matmul_scatter(((rows, weight.t()),), group)
    return _from_rows(out, rest, dim)


def matmul_all_reduce(x: Tensor, weight: Tensor, group: dist.ProcessGroup, *, mode: str) -> Tensor:
    """Return the sum over ranks of x @ w^T, `x` (..., K), weight (N, K)."""
    run, rows = mode_named(mode), x.flatten(0, -2)
    if torch.is_grad_enabled():
        out = MatmulAllReduce.apply(run, group, rows, weight)
    else:
        out = run.matmul_reduce(rows, weight.t(), group)
    return out.unflatten(0, x.shape[:-1])


def captured(call: Callable[..., Any], *samples: Tensor) -> Callable[..., Any]:
    """Return `call` as CUDA graphs, one of its forward and one of its backward pass; collective.

    `call` takes tensors (all that gradients shall flow to, weights among them) and returns tensors; shapes and
    `requires_grad` are those of the samples. A replay costs the host one launch whatever the call consists of. Results lie
    in memory of the graph until the next replay. Reduce-scatters of the modes copy_engine and fused send whole
    shards there and add them up after the last product, and exchanges by copy engines begin with a barrier instead of
    taking turns with two buffers; graphs have buffers of their own.
    """
    # Graphs of before are garbage in cycles; collected in the middle of a capture, their end would spoil it.
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        return torch.cuda.make_graphed_callables(call, samples)
    finally:
        if collects:
            gc.enable()


def _to_rows(x: Tensor, dim: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return `x` as a matrix whose rows begin with `dim`, and the sizes of the other leading dimensions."""
    if x.dim() == 2 and dim == 0:
        return x, ()
    moved = x.movedim(dim, 0)
    return moved.flatten(0, -2), tuple(moved.shape[1:-1])


def _from_rows(rows: Tensor, rest: tuple[int, ...], dim: int) -> Tensor:
    return rows.unflatten(0, (-1, *rest)).movedim(0, dim) if rest else rows
