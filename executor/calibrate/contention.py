"""Measures how much a collective and a concurrent kernel slow each other down; all ranks call it.

Each is timed alone and with the other running continuously on another stream: NCCL's kernels occupy SMs, both use
memory bandwidth, and both draw power. Only calls that ran entirely during the other's calls count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise

import torch
import torch.distributed as dist

from executor.calibrate.kernels import operator_call
from executor.gpu.monitor import ClockMonitor, invalid_reason
from executor.gpu.timing import WARM_S, Timer
from executor.launch.records import median_and_spread
from executor.measure.measurement import record_events, timed_calls
from executor.measure.rank_group import max_over_ranks
from simulator.calibration.items import ContentionItem, OperatorItem
from topology.profile.samples import ContentionSample

CALLS = 12  # number of calls of the shorter of the two; the other one runs at least as long


def measure_pair(device: torch.device, item: ContentionItem, watch: ClockMonitor, gpu: int) -> ContentionSample | str:
    """Return the sample, or the reason why there is none."""
    began = time.monotonic()
    kind = "matmul" if item.compute == "matmul" else "move"
    operator = OperatorItem(kind=kind, name=item.compute, shape=item.shape, dtype=item.dtype)
    compute = operator_call(device, operator)
    transfer = collective(device, item.op, item.nbytes)
    alone = max_over_ranks([_time_alone(device, compute), _time_alone(device, transfer)])
    concurrent = max_over_ranks(_time_concurrently(device, compute, transfer, alone))
    ended = time.monotonic()
    conditions = watch.between(began, ended, gpu)
    if not all(concurrent):
        return f"{item.compute} {item.shape} with {item.op} {item.nbytes}: no overlap seen"
    return ContentionSample(
        **asdict(item),
        ranks=dist.get_world_size(),
        compute_alone_s=alone[0],
        collective_alone_s=alone[1],
        compute_beside_s=concurrent[0],
        collective_beside_s=concurrent[1],
        count=CALLS,
        conditions=conditions,
        invalid=invalid_reason(conditions),
    )


def collective(device: torch.device, op: str, nbytes: int) -> Callable[[], object]:
    """Return the collective on all ranks; `nbytes` is nccl-tests' size column (the larger buffer)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ranks = dist.get_world_size()
    count = max(ranks, nbytes // dtype.itemsize // ranks * ranks)
    whole = torch.zeros(count, dtype=dtype, device=device)
    part = torch.zeros(count // ranks, dtype=dtype, device=device)
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    return lambda: dist.all_reduce(whole)


def _time_alone(device: torch.device, call: Callable[[], object]) -> float:
    Timer(device).heat(WARM_S)
    for _ in range(2):
        call()
    return median_and_spread(timed_calls(call, CALLS, cuda=device.type == "cuda"))[0]


def _time_concurrently(
    device: torch.device, compute: Callable[[], object], transfer: Callable[[], object], alone: Sequence[float]
) -> tuple[float, float]:
    """Return the median times of the calls that ran entirely during the other's; zero if there are none."""
    if device.type != "cuda":
        return _time_alone(device, compute), _time_alone(device, transfer)
    longest = max(CALLS * min(alone), 4 * max(alone))
    counts = [max(6, int(2 * longest / seconds)) for seconds in alone]
    counts = [min(count, 400) for count in counts]
    stream = torch.cuda.Stream(device, priority=-1)
    torch.cuda.synchronize(device)
    # Both queues fill behind matmuls before either starts, so that both run at the clocks of a busy GPU.
    Timer(device).heat(60e-6 * max(counts))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        transfer_events = record_events(transfer, counts[1])
    compute_events = record_events(compute, counts[0])
    torch.cuda.synchronize(device)

    def within(marks: Sequence[torch.cuda.Event], others: Sequence[torch.cuda.Event]) -> float:
        seconds = [
            a.elapsed_time(b) / 1e3
            for a, b in pairwise(marks)
            if others[0].elapsed_time(a) >= 0 and b.elapsed_time(others[-1]) >= 0
        ]
        return median_and_spread(seconds)[0] if seconds else 0.0

    return within(compute_events, transfer_events), within(transfer_events, compute_events)
