"""Worker: times operators on one GPU until its time is up, in the order asked; then what launching costs the host.

The GPU is kept busy between samples, so that clocks are those of training and not of a GPU that has rested: power
limits decide. What does not fit into the time is listed as missing and can be asked for again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from executor.calibrate_kernels import Unsupported, operator_call
from executor.measuring import piece_parser
from executor.records import Deadline, Recorder, middle
from executor.timing import ClockWatch, Timer
from topology.codec import read_json
from topology.samples import FAULTS

HEAT_S = 2.0  # of large products before the first sample: power and heat take a second to settle
BURST_SIZE = 8192
SAMPLE_S = 0.05
BURST_REST_S = 0.5
LAUNCHES = 400


def main(argv: Sequence[str] | None = None) -> int:
    parser = piece_parser("executor.calibrate_operators")
    parser.add_argument("--request", required=True, help="JSON: {operators: [{kind, name, shape, dtype, direction}]}")
    parser.add_argument("--gpu", type=int, default=0, help="nvidia-smi's index, for the clocks")
    options = parser.parse_args(argv)
    deadline = Deadline.since_launch(options.seconds)
    import torch  # noqa: PLC0415 - only workers have it

    device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    recorder = Recorder(options.out)
    recorder.write("header", versions=versions(torch, options.device))
    watch = ClockWatch() if options.device == "cuda" else None
    try:
        wanted = read_json(options.request).get("operators", [])
        _host(torch, device, recorder, deadline)
        _operators(torch, device, wanted, recorder, deadline, watch, options.gpu)
    finally:
        if watch is not None:
            watch.close()
    recorder.close()
    return 0


def versions(torch: Any, device: str) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    if device == "cuda":
        found |= {
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def _operators(
    torch: Any,
    device: Any,
    wanted: Sequence[dict[str, Any]],
    recorder: Recorder,
    deadline: Deadline,
    watch: ClockWatch | None,
    gpu: int,
) -> None:
    timer = Timer(torch, device)
    _burst(torch, device, Timer(torch, device, hot=False), recorder, watch, gpu)
    timer.heat(min(HEAT_S, 0.1 * max(deadline.left_s, 0.0)))
    timer.synchronize()
    for number, one in enumerate(wanted):
        what = f"{one['name']} {one['direction']} {one['shape']} {one['dtype']}"
        if not deadline.has(4 * SAMPLE_S + 0.2):
            recorder.missing(f"{len(wanted) - number} operators from {what} on: out of time")
            return
        fields = {key: one[key] for key in ("kind", "name", "shape", "dtype", "direction")}
        try:
            call = operator_call(torch, device, **fields)
            timing = timer.measure(call, seconds=SAMPLE_S)
        except Unsupported as error:
            recorder.missing(f"{what}: {error}")
            continue
        except (RuntimeError, ValueError, TypeError) as error:  # a kernel that does not exist, memory that is full
            recorder.missing(f"{what}: {str(error).splitlines()[0][:200]}")
            _forget(torch, device)
            continue
        conditions = watch.between(timing.began, timing.ended, gpu) if watch is not None else {}
        recorder.write(
            "operator",
            sample={
                **fields,
                "runtime": one.get("runtime", ""),
                "regime": "sustained",
                "seconds": timing.seconds,
                "spread": timing.spread,
                "count": timing.count,
                "host_s": timing.host_s,
                "conditions": conditions,
                "invalid": invalid(conditions),
            },
        )
        del call
        if number % 64 == 63:
            _forget(torch, device)


def invalid(conditions: dict[str, Any]) -> str:
    """Return why a sample under these conditions says nothing of the machine, or nothing."""
    faults = [reason for reason in conditions.get("throttle", []) if reason in FAULTS]
    return f"the GPU was slowed down: {', '.join(faults)}" if faults else ""


def _burst(torch: Any, device: Any, timer: Timer, recorder: Recorder, watch: ClockWatch | None, gpu: int) -> None:
    """One large product after a rest, at boost clocks: with the sustained one, what the power limit takes."""
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
    call = operator_call(torch, device, **fields)
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
            "invalid": invalid(conditions),
        },
    )


def _forget(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- the host -------------------------------------------------------------------------------------------------------


def _host(torch: Any, device: Any, recorder: Recorder, deadline: Deadline) -> None:
    """Record what one call costs the host, by way of launching. Tensors are tiny, so the device keeps up."""
    x = torch.randn(8, 8, device=device)
    y = torch.randn(8, 8, device=device, requires_grad=True)
    ways: list[tuple[str, Callable[[], object]]] = [
        ("eager", lambda: torch.add(x, x)),
        ("autograd", lambda: (y * x).sum().backward()),  # six launches and an engine run
        ("linear", lambda: torch.nn.functional.linear(x, y)),
    ]
    for name, call in ways:
        _record_host(torch, device, recorder, name, call)
    _graph(torch, device, recorder)
    if deadline.has(8.0):
        _dtensor(torch, device, recorder)
    if device.type == "cuda" and deadline.has(30.0):
        _compiled(torch, device, recorder)


def _record_host(torch: Any, device: Any, recorder: Recorder, name: str, call: Callable[[], object]) -> None:
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
    mid, spread = middle(rounds)
    _host_sample(recorder, name, mid, spread, 7 * (LAUNCHES // 8))


def _host_sample(recorder: Recorder, name: str, seconds: float, spread: float, count: int) -> None:
    recorder.write("host", sample={"name": name, "seconds": seconds, "spread": spread, "count": count})


def _graph(torch: Any, device: Any, recorder: Recorder) -> None:
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
    _record_host(torch, device, recorder, "graph", graph.replay)
    timer = Timer(torch, device, hot=False)
    timing = timer.measure(graph.replay, seconds=0.02)
    _host_sample(recorder, "graph_kernel", timing.seconds / 100, timing.spread, timing.count)
    z = torch.randn(8, 8, device=device)
    timing = timer.measure(lambda: torch.add(z, z), seconds=0.02)
    _host_sample(recorder, "eager_kernel", timing.seconds, timing.spread, timing.count)


def _dtensor(torch: Any, device: Any, recorder: Recorder) -> None:
    """Record an operator on DTensors, on a mesh of this one process."""
    try:
        import torch.distributed as dist  # noqa: PLC0415 - only where torch is
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - as above
        from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415 - as above

        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        mesh = init_device_mesh(device.type, (1,))
        x = DTensor.from_local(torch.randn(8, 8, device=device), mesh, [Replicate()])
        _record_host(torch, device, recorder, "dtensor", lambda: torch.add(x, x))
        dist.destroy_process_group()
    except (ImportError, RuntimeError, ValueError) as error:
        recorder.missing(f"host time of DTensor operators: {str(error).splitlines()[0][:200]}")


def _compiled(torch: Any, device: Any, recorder: Recorder) -> None:
    """Record calling a compiled function of one kernel."""
    x = torch.randn(8, 8, device=device)
    try:
        call = torch.compile(lambda: torch.sin(x) + x)
        call()
        _record_host(torch, device, recorder, "compiled", call)
    except Exception as error:  # noqa: BLE001 - a compiler fails in any way it likes
        recorder.missing(f"host time of compiled calls: {str(error).splitlines()[0][:200]}")


if __name__ == "__main__":
    raise SystemExit(main())
