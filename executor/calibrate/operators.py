"""Times of operators on one GPU, in the requested order, and host times of launches.

The GPU is kept busy between samples, so that clocks are the sustained ones of training under the power limit. Operators
for which no time is left are listed as missing and can be requested again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from executor.calibrate.kernels import Unsupported, operator_call
from executor.gpu.device import synchronize
from executor.gpu.monitor import ClockMonitor, invalid_reason
from executor.gpu.timing import Timer, Timing
from executor.launch.records import Deadline, Recorder, median_and_spread
from simulator.calibration.items import OperatorItem
from simulator.config.runtime import TF32
from topology.profile.samples import Conditions, HostSample, OperatorSample

HEAT_S = 1.5  # seconds of large matmuls before the first sample: power and temperature take a second to settle
AGAIN_S = 0.3  # and before the first sample of a later job
BURST_SIZE = 8192
SAMPLE_S, ROUNDS = 0.05, 3
# What tensor cores run is at the power limit. After a rest of 20 ms, such as making an operator's tensors, an H200 lets
# them have 1.6 GHz for 70 ms, then 1.27 to 1.39 in turn (examples/validation/calibration_worth.md): calls are counted
# after so many seconds of them, for so many.
SETTLE_S, SETTLED_SAMPLE_S = 0.15, 0.25
LIMITED = frozenset({"matmul", "attention"})
# After a rest an H200 runs products at its highest clocks for 55 ms (examples/validation/kernels.md): three groups of
# calls take 30.
BURST_REST_S, BURST_QUEUE_S = 0.5, 0.01
LAUNCHES = 400
COMPILING_S = 20.0  # seconds that compiling a function of one kernel may take


def versions(device: str) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    if device == "cuda":
        found |= {
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


class OperatorTimes:
    """Times operators on one GPU that is kept busy between them, from the first job on."""

    def __init__(self, device: torch.device, gpu: int) -> None:
        self.device, self.gpu = device, gpu
        self.timer = Timer(device)
        self._hot = False

    def record(self, wanted: Sequence[OperatorItem], recorder: Recorder, deadline: Deadline) -> None:
        """Record a sample of each operator, in order, while there is time; operators that cannot be timed are recorded
        as missing.
        """
        try:
            with ClockMonitor(reads=self.device.type == "cuda") as watch:
                self._heat(recorder, watch)
                for number, item in enumerate(wanted):
                    if not deadline.allows(2 * (SETTLE_S + SETTLED_SAMPLE_S)):
                        recorder.missing(f"{len(wanted) - number} operators from {item} on: out of time", late=True)
                        return
                    self._record_one(item, recorder, watch)
        finally:
            _empty_cache(self.device)

    def _heat(self, recorder: Recorder, watch: ClockMonitor) -> None:
        """Bring the GPU to its sustained clocks; the first time, record its speed after a rest."""
        if not self._hot:
            _burst(self.device, Timer(self.device, hot=False), recorder, watch, self.gpu)
        self.timer.heat(AGAIN_S if self._hot else HEAT_S)
        self.timer.synchronize()
        self._hot = True

    def _record_one(self, item: OperatorItem, recorder: Recorder, watch: ClockMonitor) -> None:
        torch.set_float32_matmul_precision("high" if item.dtype == TF32 else "highest")
        try:
            limited = item.kind in LIMITED
            timing = self.timer.measure(
                operator_call(self.device, item),
                seconds=SETTLED_SAMPLE_S if limited else SAMPLE_S,
                rounds=ROUNDS,
                settle_s=SETTLE_S if limited else 0.0,
            )
        except Unsupported as error:
            recorder.missing(f"{item}: {error}")
            return
        except (RuntimeError, ValueError, TypeError) as error:  # a kernel that does not exist, or full memory
            recorder.missing(f"{item}: {str(error).splitlines()[0][:200]}")
            _empty_cache(self.device)
            return
        conditions = watch.between(timing.began, timing.ended, self.gpu)
        recorder.write("operator", sample=_sample(item, timing, conditions, "sustained", host_s=timing.host_s))


def _sample(
    item: OperatorItem, timing: Timing, conditions: Conditions, regime: str, *, host_s: float | None = None
) -> OperatorSample:
    return OperatorSample(
        **asdict(item),
        regime=regime,
        seconds=timing.seconds,
        spread=timing.spread,
        count=timing.count,
        host_s=host_s,
        conditions=conditions,
        invalid=invalid_reason(conditions),
    )


def _burst(device: torch.device, timer: Timer, recorder: Recorder, watch: ClockMonitor, gpu: int) -> None:
    """Record one large matmul after a rest, at boost clocks; against the sustained one it shows the power limit."""
    if device.type != "cuda":
        return
    size = BURST_SIZE
    item = OperatorItem(kind="matmul", name="matmul", shape={"m": size, "n": size, "k": size}, dtype="bfloat16")
    call = operator_call(device, item)
    call()
    timer.synchronize()
    time.sleep(BURST_REST_S)
    timing = timer.measure(call, seconds=0.0, rounds=3, queue_s=BURST_QUEUE_S)
    conditions = watch.between(timing.began, timing.ended, gpu)
    recorder.write("operator", sample=_sample(item, timing, conditions, "burst"))


def _empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- the host -------------------------------------------------------------------------------------------------------


def time_host(device: torch.device, recorder: Recorder, deadline: Deadline) -> None:
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
    _dtensor(device, recorder)
    if device.type == "cuda" and deadline.allows(COMPILING_S):
        _compiled(device, recorder)


def _record_host(device: torch.device, recorder: Recorder, name: str, call: Callable[[], object]) -> None:
    for _ in range(20):
        call()
    rounds = []
    for _ in range(7):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(LAUNCHES // 8):
            call()
        rounds.append((time.perf_counter() - began) / (LAUNCHES // 8))
    mid, spread = median_and_spread(rounds)
    _host_sample(recorder, name, mid, spread, 7 * (LAUNCHES // 8))


def _host_sample(recorder: Recorder, name: str, seconds: float, spread: float, count: int) -> None:
    recorder.write("host", sample=HostSample(name=name, seconds=seconds, spread=spread, count=count))


def _graph(device: torch.device, recorder: Recorder) -> None:
    """Record the device time between two tiny kernels of a graph, and the host time for launching the graph."""
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


def _dtensor(device: torch.device, recorder: Recorder) -> None:
    """Record an operator on DTensors, on a mesh of this single process, which is its own process group."""
    try:
        mesh = init_device_mesh(device.type, (1,))
        x = DTensor.from_local(torch.randn(8, 8, device=device), mesh, [Replicate()])
        _record_host(device, recorder, "dtensor", lambda: torch.add(x, x))
    except (RuntimeError, ValueError) as error:
        recorder.missing(f"host time of DTensor operators: {str(error).splitlines()[0][:200]}")


def _compiled(device: torch.device, recorder: Recorder) -> None:
    """Record the host time of calling a compiled function of one kernel."""
    x = torch.randn(8, 8, device=device)
    try:
        call = torch.compile(lambda: torch.sin(x) + x)
        call()
        _record_host(device, recorder, "compiled", call)
    except Exception as error:  # noqa: BLE001 - a compiler can raise anything
        recorder.missing(f"host time of compiled calls: {str(error).splitlines()[0][:200]}")
