"""Worker: times the host cost of launches, then operators on one GPU in the requested order until its time is up.

The GPU is kept busy between samples, so that clocks are the sustained ones of training under the power limit. Operators
for which no time is left are listed as missing and can be requested again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from executor.calibrate.kernels import Unsupported, operator_call
from executor.gpu.monitor import ClockMonitor, invalid_reason
from executor.gpu.timing import Timer
from executor.launch.records import Deadline, Recorder, median_and_spread
from executor.measure.measurement import piece_parser
from topology.codec import read_json

HEAT_S = 2.0  # of large matmuls before the first sample: power and temperature take a second to settle
BURST_SIZE = 8192
SAMPLE_S = 0.05
BURST_REST_S = 0.5
LAUNCHES = 400


def main(argv: Sequence[str] | None = None) -> int:
    parser = piece_parser("executor.calibrate.operators")
    parser.add_argument("--request", required=True, help="JSON: {operators: [{kind, name, shape, dtype, direction}]}")
    parser.add_argument("--gpu", type=int, default=0, help="nvidia-smi's index, for the clocks")
    options = parser.parse_args(argv)
    deadline = Deadline.since_launch(options.seconds)

    device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    recorder = Recorder(options.out)
    recorder.write("header", versions=versions(options.device))
    watch = ClockMonitor() if options.device == "cuda" else None
    try:
        wanted = read_json(options.request).get("operators", [])
        _time_host(device, recorder, deadline)
        _time_operators(device, wanted, recorder, deadline, watch, options.gpu)
    finally:
        if watch is not None:
            watch.close()
    recorder.close()
    return 0


def versions(device: str) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    if device == "cuda":
        found |= {
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def _time_operators(
    device: Any,
    wanted: Sequence[dict[str, Any]],
    recorder: Recorder,
    deadline: Deadline,
    watch: ClockMonitor | None,
    gpu: int,
) -> None:
    timer = Timer(device)
    _burst(device, Timer(device, hot=False), recorder, watch, gpu)
    timer.heat(min(HEAT_S, 0.1 * max(deadline.left_s, 0.0)))
    timer.synchronize()
    for number, item in enumerate(wanted):
        what = f"{item['name']} {item['direction']} {item['shape']} {item['dtype']}"
        if not deadline.allows(4 * SAMPLE_S + 0.2):
            recorder.missing(f"{len(wanted) - number} operators from {what} on: out of time")
            return
        fields = {key: item[key] for key in ("kind", "name", "shape", "dtype", "direction")}
        try:
            call = operator_call(device, **fields)
            timing = timer.measure(call, seconds=SAMPLE_S)
        except Unsupported as error:
            recorder.missing(f"{what}: {error}")
            continue
        except (RuntimeError, ValueError, TypeError) as error:  # a kernel that does not exist, memory that is full
            recorder.missing(f"{what}: {str(error).splitlines()[0][:200]}")
            _empty_cache(device)
            continue
        conditions = watch.between(timing.began, timing.ended, gpu) if watch is not None else {}
        recorder.write(
            "operator",
            sample={
                **fields,
                "runtime": item.get("runtime", ""),
                "regime": "sustained",
                "seconds": timing.seconds,
                "spread": timing.spread,
                "count": timing.count,
                "host_s": timing.host_s,
                "conditions": conditions,
                "invalid": invalid_reason(conditions),
            },
        )
        del call
        if number % 64 == 63:
            _empty_cache(device)


def _burst(device: Any, timer: Timer, recorder: Recorder, watch: ClockMonitor | None, gpu: int) -> None:
    """Record one large matmul after a rest, at boost clocks; against the sustained one it shows the power limit."""
    if device.type != "cuda":
        return
    size = BURST_SIZE
    fields: dict[str, Any] = {
        "kind": "matmul",
        "name": "matmul",
        "shape": {"m": size, "n": size, "k": size},
        "dtype": "bfloat16",
        "direction": "forward",
    }
    call = operator_call(device, **fields)
    call()
    timer.synchronize()
    time.sleep(BURST_REST_S)
    timing = timer.measure(call, seconds=0.0, rounds=3)
    conditions = watch.between(timing.began, timing.ended, gpu) if watch is not None else {}
    recorder.write(
        "operator",
        sample={
            **fields,
            "regime": "burst",
            "seconds": timing.seconds,
            "spread": timing.spread,
            "count": timing.count,
            "conditions": conditions,
            "invalid": invalid_reason(conditions),
        },
    )


def _empty_cache(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- the host -------------------------------------------------------------------------------------------------------


def _time_host(device: Any, recorder: Recorder, deadline: Deadline) -> None:
    """Record the host time of one call, by launch mode. Tensors are tiny, so that the device keeps up."""
    x = torch.randn(8, 8, device=device)
    y = torch.randn(8, 8, device=device, requires_grad=True)
    ways: list[tuple[str, Callable[[], object]]] = [
        ("eager", lambda: torch.add(x, x)),
        ("autograd", lambda: (y * x).sum().backward()),  # six launches and an engine run
        ("linear", lambda: torch.nn.functional.linear(x, y)),
    ]
    for name, call in ways:
        _record_host(device, recorder, name, call)
    _graph(device, recorder)
    if deadline.allows(8.0):
        _dtensor(device, recorder)
    if device.type == "cuda" and deadline.allows(30.0):
        _compiled(device, recorder)


def _record_host(device: Any, recorder: Recorder, name: str, call: Callable[[], object]) -> None:
    for _ in range(20):
        call()
    rounds = []
    for _ in range(7):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(LAUNCHES // 8):
            call()
        rounds.append((time.perf_counter() - began) / (LAUNCHES // 8))
    mid, spread = median_and_spread(rounds)
    _host_sample(recorder, name, mid, spread, 7 * (LAUNCHES // 8))


def _host_sample(recorder: Recorder, name: str, seconds: float, spread: float, count: int) -> None:
    recorder.write("host", sample={"name": name, "seconds": seconds, "spread": spread, "count": count})


def _graph(device: Any, recorder: Recorder) -> None:
    """Record the device time between two tiny kernels of a graph, and the host's for launching the graph."""
    if device.type != "cuda":
        return
    x = torch.randn(8, 8, device=device)
    graph = torch.cuda.CUDAGraph()
    torch.add(x, x)
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        for _ in range(100):
            x = torch.add(x, x)
    _record_host(device, recorder, "graph", graph.replay)
    timer = Timer(device, hot=False)
    timing = timer.measure(graph.replay, seconds=0.02)
    _host_sample(recorder, "graph_kernel", timing.seconds / 100, timing.spread, timing.count)
    z = torch.randn(8, 8, device=device)
    timing = timer.measure(lambda: torch.add(z, z), seconds=0.02)
    _host_sample(recorder, "eager_kernel", timing.seconds, timing.spread, timing.count)


def _dtensor(device: Any, recorder: Recorder) -> None:
    """Record an operator on DTensors, on a mesh of this one process."""
    try:
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        mesh = init_device_mesh(device.type, (1,))
        x = DTensor.from_local(torch.randn(8, 8, device=device), mesh, [Replicate()])
        _record_host(device, recorder, "dtensor", lambda: torch.add(x, x))
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        recorder.missing(f"host time of DTensor operators: {str(error).splitlines()[0][:200]}")


def _compiled(device: Any, recorder: Recorder) -> None:
    """Record calling a compiled function of one kernel."""
    x = torch.randn(8, 8, device=device)
    try:
        call = torch.compile(lambda: torch.sin(x) + x)
        call()
        _record_host(device, recorder, "compiled", call)
    except Exception as error:  # noqa: BLE001 - a compiler can raise anything
        recorder.missing(f"host time of compiled calls: {str(error).splitlines()[0][:200]}")


if __name__ == "__main__":
    raise SystemExit(main())
