"""A tensor-parallel matmul with its collective in every overlap mode, and its parts.

All calls of a shape alternate for several rounds, so that all run at the same clocks, and medians are taken. Each call
is issued several times in a row, as by layers, and the slowest rank counts. The host time to issue a call is measured
separately, since it limits small shapes. `simulator.overlap.modes` predicts from the times of the parts alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from executor import overlap
from executor.gpu import symmetric_memory as symmetric
from executor.gpu.device import synchronize
from executor.gpu.monitor import ClockMonitor, invalid_reason
from executor.gpu.timing import WARM_S, Timer
from executor.launch.records import median_and_spread
from executor.measure.rank_group import max_over_ranks
from simulator.calibration.items import OverlapItem
from simulator.overlap.modes import GATHER, SLICES
from topology.profile.samples import OverlapSample

ROUNDS = 5
CALL_S = 8e-3  # about the seconds of the calls in a row that are timed together
MOST_CALLS = 100
HOST_CALLS = 3

Call = Callable[[], object]


def measure_shape(device: torch.device, item: OverlapItem, watch: ClockMonitor, gpu: int) -> OverlapSample:
    """Return the sample, equal on every rank except for conditions."""
    began = time.monotonic()
    modes, parts = calls_by_mode_and_part(device, item)
    times_by_call = _time_calls(device, modes | parts)
    symmetric.check_delivered()
    conditions = watch.between(began, time.monotonic(), gpu)
    return OverlapSample(
        **asdict(item),
        seconds={mode: times_by_call[mode][0] for mode in modes},
        spread={mode: times_by_call[mode][1] for mode in modes},
        host_s={mode: times_by_call[mode][2] for mode in modes},
        product_s=times_by_call["product"][0],
        shard_product_s=times_by_call["shard_product"][0],
        slice_product_s=times_by_call["slice_product"][0],
        first_s=times_by_call["first"][0],
        collective_s=times_by_call["collective"][0],
        slice_collective_s=times_by_call["slice_collective"][0],
        count=ROUNDS,
        conditions=conditions,
        invalid=invalid_reason(conditions),
    )


def calls_by_mode_and_part(device: torch.device, item: OverlapItem) -> tuple[dict[str, Call], dict[str, Call]]:
    """Return the calls by mode, and the calls by part, on new random operands."""
    ranks, group = dist.get_world_size(), cast("dist.ProcessGroup", dist.group.WORLD)
    rows, columns, depth = item.rows // ranks * ranks, item.columns, item.depth
    dtype = getattr(torch, item.dtype)
    gathers = item.operation == GATHER
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    whole = draw(rows, depth)
    # With gradients, as in a layer: autograd's bookkeeping is part of issuing a call.
    weights = tuple(draw(width, depth).requires_grad_() for width in columns)
    plain = tuple(weight.detach() for weight in weights)
    own = whole[: rows // ranks].clone()

    def in_mode(mode: str) -> Call:
        if gathers:
            return lambda: overlap.all_gather_matmul(own, weights, group, mode=mode)
        return lambda: overlap.matmul_reduce_scatter(whole, weights[0], group, mode=mode)

    def products(x: Tensor) -> Call:
        return lambda: [x @ weight.t() for weight in plain]

    sliced = whole.unflatten(0, (ranks, -1))[:, : max(1, rows // ranks // SLICES)].contiguous()
    wide = [weight.t().expand(ranks, -1, -1) for weight in plain]
    parts: dict[str, Call] = {
        "product": products(whole),
        "shard_product": products(own),
        "slice_product": lambda: [torch.bmm(sliced, weight) for weight in wide],
        "first": lambda: whole @ plain[0].t(),
        "collective": _collective(draw, item, rows),
        "slice_collective": _collective(draw, item, max(ranks, rows // SLICES // ranks * ranks)),
    }
    return {mode: in_mode(mode) for mode in overlap.MODES}, parts


def _collective(draw: Callable[..., Tensor], item: OverlapItem, rows: int) -> Call:
    """Return the operation's collective on `rows` rows of all ranks."""
    ranks = dist.get_world_size()
    width = item.depth if item.operation == GATHER else item.columns[0]
    everything, part = draw(rows, width), draw(rows // ranks, width)
    if item.operation == GATHER:
        return lambda: dist.all_gather_into_tensor(everything, part)
    return lambda: dist.reduce_scatter_tensor(part, everything)


def _time_calls(device: torch.device, calls: dict[str, Call]) -> dict[str, tuple[float, float, float]]:
    """Return (seconds, spread, host seconds) of each call, the largest over ranks."""
    Timer(device).heat(WARM_S)
    counts = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        seconds = max_over_ranks([_time_in_a_row(device, call, 2)])[0]
        counts[name] = max(2, min(MOST_CALLS, round(CALL_S / max(seconds, 1e-6)))) if device.type == "cuda" else 2
    times: dict[str, list[float]] = {name: [] for name in calls}
    hosts: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(_time_in_a_row(device, call, counts[name]))
            hosts[name].append(_host_time(device, call))
    found = {}
    for name in calls:
        (mid, spread), (host_s, _) = median_and_spread(times[name]), median_and_spread(hosts[name])
        mid, spread, host_s = max_over_ranks([mid, spread, host_s])
        found[name] = mid, spread, host_s
    return found


def _time_in_a_row(device: torch.device, call: Call, count: int) -> float:
    """Return the seconds per call of `count` calls in a row, after one call that aligns the ranks."""
    _synchronize_ranks(device)
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(count):
            call()
        return max(time.perf_counter() - began, 1e-9) / count
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def _host_time(device: torch.device, call: Call) -> float:
    """Return the host seconds to issue one call while the launch queue has room, so that the host does not block."""
    _synchronize_ranks(device)
    began = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    return max(time.perf_counter() - began, 1e-9) / HOST_CALLS


def _synchronize_ranks(device: torch.device) -> None:
    """Wait for the device and for the other ranks."""
    synchronize(device)
    max_over_ranks([0.0])
