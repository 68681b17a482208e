"""Common steps of the ranks of a measurement: report errors, and agree on numbers and on what to do next."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


def run_as_rank(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Return `run(options)`; an exception is reported with its traceback to torchrun's agent."""
    return int(record(run)(options) or 0)


def rank_zero_decides(value: bool) -> bool:
    """Return rank 0's `value` on every rank (over gloo): ranks that decide differently would wait for each other."""
    return every_rank_agrees(value if dist.get_rank() == 0 else True)


def every_rank_agrees(
    value: bool, *, device: torch.device | None = None, group: dist.ProcessGroup | None = None
) -> bool:
    """Return whether `value` is true on every rank; a collective call, over gloo unless `device` is a GPU."""
    (most,) = max_over_ranks([float(not value)], device=device, group=group)
    return not most


def max_over_ranks(
    mine: Iterable[float], *, device: torch.device | None = None, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Return the largest of each value over all ranks; a collective call."""
    box = torch.tensor(list(mine), dtype=torch.float64, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX, group=group)
    return [float(value) for value in box]
