"""Worker, one per GPU under torchrun: what a collective and a kernel beside it cost each other.

Each is timed alone and then with the other running all the time on another stream: NCCL's kernels hold SMs that the
product lacks, both draw on memory bandwidth, and both heat the chip. Only what lies inside the other's run counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from executor.calibrate_kernels import operator_call
from executor.calibrate_operators import invalid, versions
from executor.joined import agreed, join
from executor.measuring import ended_as_rank, piece_parser
from executor.records import Deadline, Recorder, middle
from executor.timing import WARM_S, ClockWatch, Timer

CALLS = 12  # of the shorter of the two; the other runs at least as long
OPS = ("all_gather", "reduce_scatter", "all_reduce")
TIMEOUT_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = piece_parser("executor.calibrate_contention")
    parser.add_argument("--request", required=True, help="JSON: {contention: [{compute, shape, dtype, op, nbytes}]}")
    parser.add_argument("--gpu", type=int, default=0)
    return ended_as_rank(run, parser.parse_args(argv))


def run(options: argparse.Namespace) -> int:
    import torch  # noqa: PLC0415 - only workers have it
    import torch.distributed as dist  # noqa: PLC0415 - as above

    from topology.codec import read_json  # noqa: PLC0415 - after the check for torch

    deadline = Deadline.since_launch(options.seconds)
    device, recorder = join(options, timeout_s=TIMEOUT_S)
    watch = ClockWatch() if device.type == "cuda" and dist.get_rank() == 0 else None
    wanted = read_json(options.request).get("contention", [])
    recorder.write("header", versions=versions(torch, options.device))
    try:
        for number, one in enumerate(wanted):
            if not agreed(torch, dist, mine=deadline.has(3.0)):
                recorder.missing(
                    f"contention: {len(wanted) - number} pairs from {one['op']} {one['nbytes']} on: out of time"
                )
                break
            _pair(torch, dist, device, one, recorder, watch, options.gpu)
    finally:
        if watch is not None:
            watch.close()
    recorder.close()
    dist.destroy_process_group()
    return 0


def _pair(
    torch: Any, dist: Any, device: Any, one: dict[str, Any], recorder: Recorder, watch: ClockWatch | None, gpu: int
) -> None:
    import time  # noqa: PLC0415 - used here alone

    began = time.monotonic()
    dtype = one.get("dtype", "bfloat16")
    kind = "matmul" if one["compute"] == "matmul" else "move"
    direction = one.get("direction", "forward")
    compute = operator_call(
        torch, device, kind=kind, name=one["compute"], shape=one["shape"], dtype=dtype, direction=direction
    )
    transfer = collective(torch, dist, device, one["op"], int(one["nbytes"]))
    alone = _alone(torch, device, compute), _alone(torch, device, transfer)
    alone = _slowest(torch, dist, alone)
    beside = _slowest(torch, dist, _beside(torch, device, compute, transfer, alone))
    ended = time.monotonic()
    conditions = watch.between(began, ended, gpu) if watch is not None else {}
    if not all(beside):
        recorder.missing(
            f"contention of {one['compute']} {one['shape']} with {one['op']} {one['nbytes']}: no overlap seen"
        )
        return
    recorder.write(
        "contention",
        sample={
            "compute": one["compute"],
            "shape": one["shape"],
            "dtype": dtype,
            "op": one["op"],
            "ranks": dist.get_world_size(),
            "nbytes": int(one["nbytes"]),
            "compute_alone_s": alone[0],
            "collective_alone_s": alone[1],
            "compute_beside_s": beside[0],
            "collective_beside_s": beside[1],
            "count": CALLS,
            "conditions": conditions,
            "invalid": invalid(conditions),
        },
    )


def _slowest(torch: Any, dist: Any, mine: tuple[float, float]) -> tuple[float, float]:
    box = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box[0]), float(box[1])


def collective(torch: Any, dist: Any, device: Any, op: str, nbytes: int) -> Callable[[], object]:
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


def _alone(torch: Any, device: Any, call: Callable[[], object]) -> float:
    Timer(torch, device).heat(WARM_S)
    for _ in range(2):
        call()
    return middle(_spans(torch, device, call, CALLS))[0]


def _spans(torch: Any, device: Any, call: Callable[[], object], count: int) -> list[float]:
    import time  # noqa: PLC0415 - used here and in _pair

    if device.type != "cuda":
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            call()
            seconds.append(max(time.perf_counter() - began, 1e-9))
        return seconds
    marks = _marks(torch, call, count)
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def _marks(torch: Any, call: Callable[[], object], count: int) -> list[Any]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    return marks


def _beside(
    torch: Any, device: Any, compute: Callable[[], object], transfer: Callable[[], object], alone: tuple[float, float]
) -> tuple[float, float]:
    """Return the medians of the calls that lay wholly inside the other's run; zero where none did."""
    if device.type != "cuda":
        return _alone(torch, device, compute), _alone(torch, device, transfer)
    longest = max(CALLS * min(alone), 4 * max(alone))
    counts = [max(6, int(2 * longest / seconds)) for seconds in alone]
    counts = [min(count, 400) for count in counts]
    beside = torch.cuda.Stream(device, priority=-1)
    torch.cuda.synchronize(device)
    # Both queues fill before either begins, behind products: neither runs at the clocks of a rested GPU.
    Timer(torch, device).heat(60e-6 * max(counts))
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        there = _marks(torch, transfer, counts[1])
    here = _marks(torch, compute, counts[0])
    torch.cuda.synchronize(device)

    def within(marks: list[Any], others: list[Any]) -> float:
        seconds = [
            a.elapsed_time(b) / 1e3
            for a, b in pairwise(marks)
            if others[0].elapsed_time(a) >= 0 and b.elapsed_time(others[-1]) >= 0
        ]
        return middle(seconds)[0] if seconds else 0.0

    return within(here, there), within(there, here)


if __name__ == "__main__":
    raise SystemExit(main())
