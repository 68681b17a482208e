"""The common part of calibration pieces that run on all GPUs at once: samples one after another while time is left."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from executor.calibrate.operators import versions
from executor.gpu.monitor import ClockMonitor
from executor.launch.records import Deadline
from executor.measure.rank_group import join_ranks, rank_zero_decides

TIMEOUT_S = 60.0
Measure = Callable[[torch.device, dict[str, Any], ClockMonitor | None], dict[str, Any] | str]


def sample_in_turn(
    options: argparse.Namespace,
    kind: str,
    wanted: Sequence[dict[str, Any]],
    measure: Measure,
    *,
    least_s: float,
    name: Callable[[dict[str, Any]], str],
) -> None:
    """Join the other ranks and record a sample of `kind` for each wanted item, as long as `least_s` seconds are left.

    `measure` is a collective call that returns the fields of the sample, or why there is none. Items for which no time
    is left are recorded as missing, by the `name` of the first.
    """
    deadline = Deadline.since_launch(options.seconds)
    device, recorder = join_ranks(options, timeout_s=TIMEOUT_S)
    watch = ClockMonitor() if device.type == "cuda" and dist.get_rank() == 0 else None
    recorder.write("header", versions=versions(options.device))
    items = [item for item in wanted if item.get("ranks", dist.get_world_size()) == dist.get_world_size()]
    with closing(watch) if watch is not None else nullcontext():
        for number, item in enumerate(items):
            if not rank_zero_decides(deadline.allows(least_s if device.type == "cuda" else 0.0)):
                recorder.missing(f"{kind}: {len(items) - number} from {name(item)} on: out of time")
                break
            sample = measure(device, item, watch)
            if isinstance(sample, str):
                recorder.missing(f"{kind} of {sample}")
            else:
                recorder.write(kind, sample=sample)
    recorder.close()
