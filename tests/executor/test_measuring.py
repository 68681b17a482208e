"""What is read back of a run: settings that took effect, clocks while steps were timed, and the profile that is
kept.
"""

import json
import time
from dataclasses import replace

import pytest

from executor.gpu.monitor import GpuMonitor, GpuSummary, summarise
from executor.gpu.state import Nvml, read_states
from executor.parallel.facts import MeshFacts, ModelFacts
from executor.run.apply import report
from executor.run.effects import operator_table, read_back
from executor.run.step_summary import slow_ranks
from planner.runs.apply_report import lines
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.program import trace as tr
from simulator.program.chrome_trace import from_kineto
from simulator.program.trace import Span, Trace
from tests.executor.test_apply_run import DONE, REQUEST, step, summary, write
from topology.codec import to_builtins
from topology.profile.measurement import GpuState

BUILT = ModelFacts(
    most_shards=2,
    stored="float32",
    blocks=32,
    recomputed_blocks=0,
    compiled_graphs=0,
    graph_breaks=0,
    schedule=None,
    micro_batches=1,
    tp_overlap={"attention_in": "none", "attention_out": "none", "mlp_in": "none", "mlp_out": "none"},
    cp_method="none",
)
MESH = MeshFacts(axes={"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}, ranks=[], as_requested=True)


def request(**changes):
    return replace(REQUEST, **changes)


def wrong(asked, **found) -> list[str]:
    return [e.what for e in read_back(asked, replace(BUILT, **found), None, None) if not e.ok]


def test_what_took_effect_as_requested_is_ok() -> None:
    found = read_back(REQUEST, BUILT, MESH, None)

    assert all(effect.ok for effect in found)
    assert found[0].effective == "dp_shard 2"


@pytest.mark.parametrize(
    ("asked", "found", "what"),
    [
        ({}, {"most_shards": 1}, "largest weights cut into"),
        ({"runtime": Runtime(compile=True)}, {}, "compile"),
        ({}, {"compiled_graphs": 3}, "compile"),
        ({"runtime": Runtime(param_dtype="bfloat16")}, {}, "parameters stored in"),
        ({}, {"recomputed_blocks": 32}, "recompute"),
        ({"plan": Plan(tp=2, tp_overlap="fused")}, {}, "tp_overlap"),
        (
            {"plan": Plan(tp=2, tp_overlap="attention_in=fused,mlp_out=chunked")},
            {"tp_overlap": {"attention_in": "fused", "attention_out": "none", "mlp_in": "none", "mlp_out": "fused"}},
            "tp_overlap",
        ),
        ({"plan": Plan(cp=2, cp_method="ring")}, {"cp_method": "all_gather"}, "cp_method"),
        ({"plan": Plan(pp=2)}, {"schedule": "Schedule1F1B", "micro_batches": 4, "most_shards": 1}, "pipeline"),
    ],
)
def test_a_setting_that_was_ignored_is_found(asked, found, what) -> None:
    assert wrong(request(**asked), **found) == [what]


def test_a_run_that_was_not_as_requested_has_failed(tmp_path) -> None:
    for rank in range(2):
        write(
            tmp_path,
            rank,
            step(0, 1.0),
            {"kind": "effects", **to_builtins(replace(BUILT, most_shards=1))},
            {"kind": "timed"},
            {"kind": "done"},
        )

    found = report(REQUEST, DONE, tmp_path, [])

    assert (found["status"], found["exit_code"], found["complete"]) == ("not_as_requested", 1, False)
    assert found["failure"]["message"] == "largest weights cut into: requested 2, took effect 1"


def test_kernels_prove_what_ran() -> None:
    names = ("pytorch_flash::flash_fwd_kernel<x>", "FusedAdamMathFunctor<float>", "ncclDevKernel_AllGather_RING_LL(a)")
    kinds = (tr.COMPUTE, tr.COMPUTE, tr.COMMUNICATION)
    spans = [Span(0, "stream 7", n, float(i), i + 0.5, k) for i, (n, k) in enumerate(zip(names, kinds, strict=True))]

    found = {e.what: e for e in read_back(REQUEST, None, None, Trace(spans=tuple(spans)))}
    assert found["attention kernels"].ok
    assert found["optimizer kernels"].effective == "1 launches"
    assert found["NCCL"].effective == "AllGather_RING_LL"

    without = {e.what: e for e in read_back(REQUEST, None, None, Trace(spans=tuple(spans[1:])))}
    assert not without["attention kernels"].ok
    assert not without["attention kernels"].certain


def test_operators_are_listed_by_the_time_they_took_together() -> None:
    spans = [
        Span(0, "s", "a", 0, 3),
        Span(0, "s", "b", 3, 5),
        Span(0, "s", "b", 5, 8),
        Span(0, "h", "c", 0, 99, tr.HOST),
    ]

    assert operator_table(Trace(spans=tuple(spans))) == [
        {"name": "b", "calls": 2, "seconds": 5, "median_s": 2.5},
        {"name": "a", "calls": 1, "seconds": 3, "median_s": 3},
    ]


def ranks_trace(rank: int, compute_s: float, waiting_s: float) -> Trace:
    kernel = Span(rank, "stream 7", "gemm", 0.0, compute_s, tr.COMPUTE)
    wait = Span(rank, "stream 9", "ncclDevKernel", compute_s, compute_s + waiting_s, tr.COMMUNICATION)
    return Trace(spans=(kernel, wait))


@pytest.mark.parametrize(("slow_s", "cause"), [(0.9, "kernels took 1.29 times"), (0.7, "its host was late")])
def test_a_slow_rank_is_named_by_who_waits_for_it(slow_s: float, cause: str) -> None:
    """A rank whose kernels are slow computes longer; one whose host is late launches its collectives late."""
    traces = {rank: ranks_trace(rank, 0.7, 0.3) for rank in range(4)} | {2: ranks_trace(2, slow_s, 0.1)}

    (line,) = slow_ranks(Plan(dp_shard=4), traces)

    assert line.startswith("rank 2 kept others waiting: 0.3 s")
    assert cause in line
    even = {rank: ranks_trace(rank, 0.7, 0.3 - 0.02 * rank) for rank in range(4)}
    assert slow_ranks(Plan(dp_shard=4), even) == []
    assert slow_ranks(Plan(pp=4), traces) == []  # stages do different work


# --- clocks -----------------------------------------------------------------------------------------------------------


def state(gpu: int, clock: float, *throttle: str) -> GpuState:
    return GpuState(gpu=gpu, sm_clock_hz=clock, power_w=600.0, temperature_c=60.0, throttle=throttle)


def test_only_clocks_while_steps_were_timed_count() -> None:
    samples = [
        (10.0, {0: state(0, 345e6)}),  # idle, before
        (20.0, {0: state(0, 1980e6), 1: state(1, 1700e6, "software power cap")}),
        (22.0, {0: state(0, 1900e6), 1: state(1, 1500e6)}),
        (30.0, {0: state(0, 345e6, "hardware slowdown")}),  # after
    ]

    zero, one = summarise(samples, [0, 1], 15.0, 25.0)

    assert zero == GpuSummary(
        gpu=0, samples=2, sm_clock_hz={"lowest": 1900e6, "median": 1940e6}, power_w=600.0, throttle=()
    )
    assert one.throttle == ("software power cap",)
    assert summarise([], [0], 0, 1)[0].sm_clock_hz is None


def timed(*clocks_hz: float) -> list[dict]:
    return [{**step(index, 1.0), "sm_clock_hz": clock} for index, clock in enumerate(clocks_hz)]


def test_clocks_that_changed_in_a_run_are_told_with_the_step(tmp_path) -> None:
    """As by `nvidia-smi -lgc` of another user, between two steps; the power cap's own swing is no change."""
    steady, changed = timed(*[1.98e9] * 8), timed(*[1.95e9] * 5, *[1.2e9] * 3)

    found = summary(steady, changed)

    assert found["sm_clock_change"] == {"step": 5.0, "before_hz": 1.95e9, "after_hz": 1.2e9}
    for rank, records in enumerate((steady, changed)):
        write(tmp_path, rank, *records, {"kind": "timed"}, {"kind": "done"})
    reported = "\n".join(lines(report(REQUEST, DONE, tmp_path, []), None))
    assert "changed from 1.95 to 1.20 GHz at step 5" in reported
    swing = timed(1.98e9, 1.9e9, 1.95e9, 1.88e9, 1.92e9, 1.87e9)
    assert summary(swing, swing)["sm_clock_change"] is None
    assert summary(*[[step(0, 1.0)] * 5] * 2)["sm_clock_change"] is None


def test_the_watch_asks_until_it_is_stopped(monkeypatch) -> None:
    monkeypatch.setattr("executor.gpu.monitor.PERIOD_S", 0.01)
    assert first_clock(GpuMonitor(lambda: {0: state(0, 1e9)}, open_nvml=no_driver)) == 1e9


def test_the_watch_rather_asks_the_open_library(monkeypatch) -> None:
    monkeypatch.setattr("executor.gpu.monitor.NVML_PERIOD_S", 0.01)
    library = FakeNvml()

    watch = GpuMonitor(lambda: pytest.fail("nvidia-smi was started"), open_nvml=lambda: Nvml(library))

    assert first_clock(watch) == 1755e6
    assert library.began == library.ended == 1


def test_the_library_says_what_nvidia_smi_says() -> None:
    library = FakeNvml()

    said = Nvml(library).read()

    lines = "0, 1755, 698.512, 61, 0x4\n1, 345, 71.2, 30, 0x1\n"
    assert said == read_states(lambda _: lines)
    library.broken = True
    assert Nvml(library).read() == {gpu: GpuState(gpu=gpu) for gpu in (0, 1)}


def first_clock(watch: GpuMonitor) -> float:
    watch.start()
    end = time.monotonic() + 20
    while not watch._samples and time.monotonic() < end:
        time.sleep(0.01)
    return watch.stop()[0][1][0].sm_clock_hz


def no_driver() -> Nvml:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


class FakeNvml:
    """Two GPUs, the first under its power cap, of a driver that knows the old name of the reasons only."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.began = self.ended = 0
        self.broken = False

    def nvmlInit(self) -> None:  # noqa: N802 - the library's names
        self.began += 1

    def nvmlShutdown(self) -> None:  # noqa: N802 - as above
        self.ended += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - as above
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802 - as above
        return index

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:  # noqa: N802 - as above
        return self.known((1755, 345)[handle], clock == self.NVML_CLOCK_SM)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802 - as above
        return self.known((61, 30)[handle], sensor == self.NVML_TEMPERATURE_GPU)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802 - as above
        return self.known((698_512, 71_200)[handle])

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802 - as above
        return self.known((0x4, 0x1)[handle])

    def known(self, value: int, asked_rightly: bool = True) -> int:
        if self.broken or not asked_rightly:
            raise self.NVMLError
        return value


# --- the profile ------------------------------------------------------------------------------------------------------


def event(category: str, name: str, ts: float, dur: float, tid: int = 1, **arguments) -> dict:
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur, "args": arguments}


def test_the_profile_keeps_kernels_and_outermost_operators() -> None:
    profile_step = pytest.importorskip("executor.measure.profile_step", reason="torch is not installed")
    raw = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 9},
            event("cpu_op", "aten::linear", 0, 10, External=4),
            event("cpu_op", "aten::mm", 2, 5),
            event("cuda_runtime", "cudaLaunchKernel", 3, 1),
            event("cpu_op", "aten::silu", 10, 2),
            event("cuda_runtime", "cudaDeviceSynchronize", 12, 50),
            event("user_annotation", "step", 0, 90),
            event("cpu_op", "autograd", 1, 4, tid=2),
            event("kernel", "sm90_gemm", 5, 30, tid=7, stream=7, registers=255),
            event("gpu_user_annotation", "step", 5, 30, tid=7, stream=7),
        ]
    }

    short = profile_step.trimmed(raw, rank=3)

    assert sorted(e["name"] for e in short["traceEvents"]) == ["aten::linear", "aten::silu", "autograd", "sm90_gemm"]
    trace = from_kineto(json.loads(json.dumps(short)))
    assert trace.ranks == (3,)
    assert trace.busy_s(3, tr.COMPUTE) == pytest.approx(30e-6)
    assert trace.busy_s(3, tr.HOST, "host 1") == pytest.approx(12e-6)


def test_a_step_is_taken_even_if_the_profiler_cannot(monkeypatch, tmp_path) -> None:
    """Other ranks wait in its collectives."""
    profile_step = pytest.importorskip("executor.measure.profile_step", reason="torch is not installed")
    import torch

    class Broken:
        def __init__(self, **_: object) -> None:
            pass

        def start(self) -> None:
            raise RuntimeError("no counters")

    monkeypatch.setattr(profile_step, "profile", Broken)
    taken = []

    said, _ = profile_step.profile_step(lambda: taken.append(1), torch.device("cpu"), tmp_path / "t.json", rank=0)

    assert (said, taken) == ("no counters", [1])
    assert not (tmp_path / "t.json").exists()


def test_a_real_profile_is_a_trace(tmp_path) -> None:
    profile_step = pytest.importorskip("executor.measure.profile_step", reason="torch is not installed")
    import torch

    ones = torch.ones(64, 64)
    path = tmp_path / "t.json"

    assert profile_step.profile_step(lambda: ones @ ones, torch.device("cpu"), path, rank=1) == ("", [])

    trace = from_kineto(json.loads(path.read_text()))
    assert any("matmul" in span.name or "mm" in span.name for span in trace.of(1))


# --- fewer GPUs than planned ------------------------------------------------------------------------------------------


def test_a_node_that_shows_fewer_gpus_than_the_plan_needs_says_so(monkeypatch) -> None:
    """A scheduler may give a job less than was asked for."""
    worker = pytest.importorskip("executor.run.worker", reason="torch is not installed")
    monkeypatch.setattr(worker.torch.cuda, "device_count", lambda: 4)
    for name, value in {"RANK": "13", "LOCAL_RANK": "5", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(RuntimeError, match="shows 4 GPUs to this job; the plan's rank here needs GPU 5"):
        worker._device(request(plan=Plan(dp_shard=16)))
