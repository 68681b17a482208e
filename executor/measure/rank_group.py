"""Common steps of the ranks of a measurement: join a process group, and agree on what to measure next."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


def run_as_rank(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Return `run(options)`; an exception is reported with its traceback to torchrun's agent."""
    return int(record(run)(options) or 0)


def rank_zero_decides(value: bool) -> bool:
    """Return rank 0's `value` on every rank (over gloo): ranks that decide differently would wait for each other."""
    return every_rank_agrees(value if dist.get_rank() == 0 else True)


def every_rank_agrees(value: bool) -> bool:
    """Return whether `value` is true on every rank; a collective call over gloo."""
    least = torch.tensor(float(value))
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return bool(least.item())
