"""What the ranks of a measurement do together: join one process group, and decide what comes next."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from executor.launch.records import Recorder


def run_as_rank(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Return `run(options)`; an exception is reported with its traceback to torchrun's agent."""
    return int(record(run)(options))


def join_ranks(options: argparse.Namespace, *, timeout_s: float) -> tuple[torch.device, Recorder]:
    """Join the process group of all ranks; return this rank's device and a recorder, which writes on rank 0 only.

    `options` are those of `executor.measure.measurement.piece_parser`. A collective that waits longer than `timeout_s`
    fails.
    """
    cuda, local = options.device == "cuda", int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_s))
    return torch.device(f"cuda:{local}" if cuda else "cpu"), Recorder(options.out if dist.get_rank() == 0 else None)


def rank_zero_decides(value: bool) -> bool:
    """Return rank 0's `value` on every rank (over gloo): ranks that decide differently would wait for each other."""
    return every_rank_agrees(value if dist.get_rank() == 0 else True)


def every_rank_agrees(value: bool) -> bool:
    """Return whether `value` is true on every rank; a collective call over gloo."""
    least = torch.tensor(float(value))
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return bool(least.item())
