"""The ranks of a measurement: how they join one group, and how they agree what comes next. Torch is imported on call."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from typing import Any

from executor.records import Recorder


def join(options: argparse.Namespace, *, timeout_s: float) -> tuple[Any, Recorder]:
    """Join the group of all ranks; return this rank's torch.device and a recorder, which writes on rank 0 only.

    `options` are those of `executor.measuring.piece_parser`. A collective that waits longer than `timeout_s` fails.
    """
    import torch  # noqa: PLC0415 - only workers have it
    import torch.distributed as dist  # noqa: PLC0415 - as above

    cuda, local = options.device == "cuda", int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_s))
    return torch.device(f"cuda:{local}" if cuda else "cpu"), Recorder(options.out if dist.get_rank() == 0 else None)


def agreed(torch: Any, dist: Any, *, mine: bool, leader: bool = True) -> bool:
    """Whether rank 0 (or, without `leader`, every rank) says so; told over gloo.

    Ranks that disagree about what comes next would wait for each other for ever.
    """
    box = torch.tensor(float(mine if dist.get_rank() == 0 or not leader else True))
    dist.all_reduce(box, op=dist.ReduceOp.MIN)
    return bool(box.item())
