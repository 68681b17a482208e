"""Worker, one per GPU under torchrun: a tensor-parallel product with its collective in every overlap mode, and the parts.

All calls of a shape take turns for some rounds and the median counts, so that all see the same clocks; each is issued
several times in a row, as layers do, and the slowest rank counts. What issuing a call costs the host is timed apart: with
small shapes that is what a mode takes. Parts alone are what the model of overlap predicts from (`simulator.overlap_modes`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from executor.calibrate_operators import invalid, versions
from executor.joined import agreed, join
from executor.measuring import ended_as_rank, piece_parser
from executor.records import Deadline, middle
from executor.timing import WARM_S, ClockWatch, Timer
from simulator.overlap_modes import GATHER, SLICES

if TYPE_CHECKING:
    from torch import Tensor

ROUNDS = 5
CALL_S = 8e-3  # of calls in a row for one time
MOST_CALLS = 100
HOST_CALLS = 3
SHAPE_S = 4.0  # that a shape may take: kernels of a mode are compiled when it is first met
TIMEOUT_S = 60.0
PARTS = ("product", "shard_product", "slice_product", "first", "collective", "slice_collective")

Call = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> int:
    parser = piece_parser("executor.calibrate_overlap")
    parser.add_argument(
        "--request", required=True, help="JSON: {overlap: [{operation, ranks, rows, columns, depth, dtype}]}"
    )
    parser.add_argument("--gpu", type=int, default=0)
    return ended_as_rank(run, parser.parse_args(argv))


def run(options: argparse.Namespace) -> int:
    import torch  # noqa: PLC0415 - only workers have it
    import torch.distributed as dist  # noqa: PLC0415 - as above

    from topology.codec import read_json  # noqa: PLC0415 - after the check for torch

    deadline = Deadline.since_launch(options.seconds)
    device, recorder = join(options, timeout_s=TIMEOUT_S)
    watch = ClockWatch() if device.type == "cuda" and dist.get_rank() == 0 else None
    recorder.write("header", versions=versions(torch, options.device))
    wanted = [one for one in read_json(options.request).get("overlap", []) if one["ranks"] == dist.get_world_size()]
    try:
        for number, one in enumerate(wanted):
            if not agreed(torch, dist, mine=deadline.has(SHAPE_S if device.type == "cuda" else 0.0)):
                recorder.missing(f"overlap: {len(wanted) - number} shapes from {one['operation']} on: out of time")
                break
            sample = measured(torch, dist, device, one, watch, options.gpu)
            recorder.write("overlap", sample=sample)
    finally:
        if watch is not None:
            watch.close()
    recorder.close()
    _leave(dist)
    return 0


def _leave(dist: Any) -> None:
    from executor import symmetric  # noqa: PLC0415 - imports torch

    symmetric.release()
    dist.destroy_process_group()


def measured(
    torch: Any, dist: Any, device: Any, one: dict[str, Any], watch: ClockWatch | None, gpu: int
) -> dict[str, Any]:
    """Return the fields of a `topology.samples.OverlapSample`, the same on every rank but for conditions."""
    from executor import symmetric  # noqa: PLC0415 - imports torch

    began = time.monotonic()
    modes, parts = calls_of(torch, dist, device, one)
    taken = _taken(torch, dist, device, modes | parts)
    symmetric.check_delivered()
    conditions = watch.between(began, time.monotonic(), gpu) if watch is not None else {}
    return {
        **one,
        "seconds": {mode: taken[mode][0] for mode in modes},
        "spread": {mode: taken[mode][1] for mode in modes},
        "host_s": {mode: taken[mode][2] for mode in modes},
        **{f"{part}_s": taken[part][0] for part in parts},
        "count": ROUNDS,
        "conditions": conditions,
        "invalid": invalid(conditions),
    }


def calls_of(torch: Any, dist: Any, device: Any, one: dict[str, Any]) -> tuple[dict[str, Call], dict[str, Call]]:
    """Return calls by mode and by part, on fresh operands."""
    from executor import overlap  # noqa: PLC0415 - imports torch

    ranks, group = dist.get_world_size(), dist.group.WORLD
    rows, columns, depth = int(one["rows"]) // ranks * ranks, tuple(map(int, one["columns"])), int(one["depth"])
    dtype = getattr(torch, one["dtype"])
    gathers = one["operation"] == GATHER
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    whole = draw(rows, depth)
    # As in a layer: what autograd keeps and records is part of issuing a call.
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
        "collective": _collective(dist, draw, one, rows),
        "slice_collective": _collective(dist, draw, one, max(ranks, rows // SLICES // ranks * ranks)),
    }
    return {mode: in_mode(mode) for mode in overlap.MODES}, parts


def _collective(dist: Any, draw: Callable[..., Tensor], one: dict[str, Any], rows: int) -> Call:
    """Return the operation's collective on so many rows of all ranks."""
    ranks = dist.get_world_size()
    width = int(one["depth"]) if one["operation"] == GATHER else int(one["columns"][0])
    everything, part = draw(rows, width), draw(rows // ranks, width)
    if one["operation"] == GATHER:
        return lambda: dist.all_gather_into_tensor(everything, part)
    return lambda: dist.reduce_scatter_tensor(part, everything)


def _taken(torch: Any, dist: Any, device: Any, calls: dict[str, Call]) -> dict[str, tuple[float, float, float]]:
    """Return (seconds, spread, host seconds) of each call, of the slowest rank."""
    Timer(torch, device).heat(WARM_S)
    counts = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        one = _slowest(torch, dist, [_together(torch, dist, device, call, 2)])[0]
        counts[name] = max(2, min(MOST_CALLS, round(CALL_S / max(one, 1e-6)))) if device.type == "cuda" else 2
    times: dict[str, list[float]] = {name: [] for name in calls}
    hosts: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(_together(torch, dist, device, call, counts[name]))
            hosts[name].append(_issued(torch, dist, device, call))
    found = {}
    for name in calls:
        (mid, spread), (host_s, _) = middle(times[name]), middle(hosts[name])
        found[name] = tuple(_slowest(torch, dist, [mid, spread, host_s]))
    return found  # type: ignore[return-value]  # three numbers each


def _together(torch: Any, dist: Any, device: Any, call: Call, count: int) -> float:
    """Return seconds of one of `count` calls in a row; one before them brings the ranks together."""
    _meet(torch, dist, device)
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


def _issued(torch: Any, dist: Any, device: Any, call: Call) -> float:
    """Return host seconds of one call while the queue has room: a full one would make the host wait for the device."""
    _meet(torch, dist, device)
    began = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    return max(time.perf_counter() - began, 1e-9) / HOST_CALLS


def _meet(torch: Any, dist: Any, device: Any) -> None:
    """Wait for what was issued, and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _slowest(torch, dist, [0.0])


def _slowest(torch: Any, dist: Any, mine: list[float]) -> list[float]:
    box = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return [float(value) for value in box]


if __name__ == "__main__":
    raise SystemExit(main())
