"""Worker: rates of each GPU: copies inside its memory, a large bfloat16 matmul in a burst and sustained.

The burst runs on one GPU at a time after a rest, at boost clocks. The sustained rate is measured with all GPUs busy for
seconds, as in training, under their power and thermal limits; the last chunk counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from executor.gpu.state import read_states
from executor.launch.records import Deadline, Recorder, median_and_spread
from executor.measure.measurement import load_torch, piece_parser, timed_calls
from topology.codec import to_builtins
from topology.profile.measurement import ComputeSample, GpuState
from topology.units import GIB

MATMUL = 8192
BURST = 10
COPY_BYTES = GIB
ROUNDS = 7
SUSTAIN_S = 4.0
READING_S = 1.0  # nvidia-smi answers in less time; work queued meanwhile should end soon after its answer
MOST_QUEUED = 800  # launches that fit into a stream's queue without blocking the host
CHUNK = 20  # matmuls between two clock readings, some 30 ms on an H200


def measure_cuda(indices: Sequence[int], recorder: Recorder, deadline: Deadline, sustain_s: float) -> None:
    """Record one sample per GPU. Raises whatever torch raises when a GPU cannot be used at all."""
    torch = load_torch()
    before = read_states()
    samples: dict[int, ComputeSample] = {}
    operands = []
    for ordinal, index in enumerate(indices):
        with torch.cuda.device(ordinal):
            a = torch.randn(MATMUL, MATMUL, device=f"cuda:{ordinal}", dtype=torch.bfloat16)
            b = torch.randn(MATMUL, MATMUL, device=f"cuda:{ordinal}", dtype=torch.bfloat16)
            out = torch.empty_like(a)
            operands.append((a, b, out))
            memory = _memory(torch, ordinal)
            times = _timed(partial(torch.mm, a, b, out=out), BURST)
            samples[index] = ComputeSample(
                gpu=index,
                size=MATMUL,
                before=before.get(index),
                memory_bytes_per_s=memory,
                burst_flops=2 * MATMUL**3 / median_and_spread(times)[0],
            )
    if not deadline.allows(sustain_s + 2):
        recorder.missing("sustained matmul: out of time", late=True)
    else:
        for index in indices:  # recorded early: a kill in the long part must not lose it; later records replace these
            recorder.write("compute", **to_builtins(samples[index]))
        slowest = max(2 * MATMUL**3 / (samples[index].burst_flops or 1.0) for index in indices)
        rates, during = _sustained(torch, operands, sustain_s, slowest)
        for ordinal, index in enumerate(indices):
            samples[index] = replace(samples[index], sustained_flops=rates[ordinal], during=during.get(index))
    after = read_states()
    for index in indices:
        recorder.write("compute", **to_builtins(replace(samples[index], after=after.get(index))))


def _memory(torch: Any, ordinal: int) -> float:
    """Return bytes read plus written per second by a copy inside one GPU."""
    free, _ = torch.cuda.mem_get_info(ordinal)
    nbytes = min(COPY_BYTES, free // 4)
    src = torch.empty(nbytes // 4, dtype=torch.int32, device=f"cuda:{ordinal}").zero_()
    dst = torch.empty_like(src)
    seconds, _ = median_and_spread(_timed(lambda: dst.copy_(src), ROUNDS))
    return float(2 * src.numel() * 4 / seconds)


def _timed(call: Callable[[], object], count: int) -> list[float]:
    """Return the device seconds of each of `count` calls, after two that are not timed."""
    for _ in range(2):
        call()
    return timed_calls(call, count, cuda=True)


def _sustained(
    torch: Any, operands: list[Any], seconds: float, product_s: float
) -> tuple[list[float], dict[int, GpuState]]:
    """Keep all GPUs multiplying for `seconds`; return the rate of the last part, and the clocks read meanwhile.

    `product_s` is the time of one product on the slowest GPU.
    """
    deadline, started = Deadline(seconds), time.monotonic()
    last: list[float] = [0.0] * len(operands)
    during: dict[int, GpuState] = {}
    while deadline.left_s > 0:
        marks = []
        for ordinal, (a, b, out) in enumerate(operands):
            with torch.cuda.device(ordinal):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(CHUNK):
                    torch.mm(a, b, out=out)
                end.record()
                marks.append((start, end))
        if not during and time.monotonic() - started > 0.6 * seconds:
            during = _states_under_load(torch, operands, product_s)
        for ordinal, (_, end) in enumerate(marks):
            with torch.cuda.device(ordinal):
                end.synchronize()
        last = [CHUNK * 2 * MATMUL**3 / (start.elapsed_time(end) / 1e3) for start, end in marks]
    return last, during


def _states_under_load(torch: Any, operands: list[Any], product_s: float) -> dict[int, GpuState]:
    """Read clocks while work is queued: nvidia-smi takes a while, so the queue must outlast it."""
    for ordinal, (a, b, out) in enumerate(operands):
        with torch.cuda.device(ordinal):
            for _ in range(max(1, min(MOST_QUEUED, round(READING_S / product_s)))):
                torch.mm(a, b, out=out)
    return read_states()


def measure_cpu(indices: Sequence[int], recorder: Recorder) -> None:
    """Record a matmul in pure Python: runs this module's code without a GPU."""
    size = 64
    rows = [[float(i * j % 7) for j in range(size)] for i in range(size)]
    started = time.perf_counter()
    _ = [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*rows, strict=True)] for row in rows]
    rate = 2 * size**3 / (time.perf_counter() - started)
    for index in indices:
        recorder.write("compute", gpu=index, size=size, dtype="float64", burst_flops=rate)


def main(argv: Sequence[str] | None = None) -> int:
    parser = piece_parser("executor.measure.probe_compute")
    parser.add_argument("--indices", required=True)
    options = parser.parse_args(argv)
    indices = [int(index) for index in options.indices.split(",")]
    recorder = Recorder(options.out)
    if options.device == "cpu":
        measure_cpu(indices, recorder)
    else:
        measure_cuda(indices, recorder, Deadline.since_launch(options.seconds), min(SUSTAIN_S, options.seconds / 3))
    recorder.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
