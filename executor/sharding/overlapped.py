"""Kernels of a program that exchange pieces while they multiply: the modes of `executor.overlap`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from executor.overlap import all_gather_matmul, matmul_reduce_scatter
from executor.sharding.exchanges import Group
from simulator.overlap.modes import GATHER
from simulator.sharded.program import OVERLAPPED, Kernel


def is_overlapped(kernel: Kernel) -> bool:
    return kernel.op.startswith(OVERLAPPED)


def run_overlapped(
    kernel: Kernel, values: Mapping[str, torch.Tensor], groups: Mapping[tuple[str, ...], Group]
) -> torch.Tensor:
    """Return the rank's piece of a product whose operand is gathered, or whose result is summed, on the way.

    The mode is one that runs on this device: on the CPU, those that need copy engines run as one exchange and one product.
    """
    x, weight = (values[one["tensor"]] for one in kernel.args)
    mode, dim = kernel.kwargs["mode"], kernel.kwargs["dim"]
    group = groups[tuple(kernel.kwargs["axes"])].group
    if kernel.op == OVERLAPPED + GATHER:
        return all_gather_matmul(x, (weight,), group, mode=mode, dim=dim)[0]
    return matmul_reduce_scatter(x, weight, group, mode=mode, dim=dim)
