"""Calibration's workers: what they time is the operator that was asked for, and what they cannot time is missing."""

import importlib.util
import time

import pytest

from executor.calibrate.run import header
from executor.gpu.monitor import ClockMonitor, invalid_reason
from executor.launch.records import read_records
from simulator.calibration.items import LayerItem, OperatorItem
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.fitting.host_fit import host_alone
from topology.codec import convert, to_builtins
from topology.profile.profile import CollectiveSample
from topology.profile.samples import Conditions, HostSample, OperatorSample
from topology.profile.store import profile_from_records

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

MOVES = {
    "rms_norm": {"u": 8, "h": 16},
    "rotary_complex": {"t": 8, "q": 32, "kv": 16, "d": 16},
    "rotary_halves": {"t": 8, "q": 32, "kv": 16, "d": 16},
    "silu": {"t": 8, "f": 16},
    "gate": {"t": 8, "f": 16},
    "residual": {"u": 8, "h": 16},
    "embedding": {"t": 8, "v": 32, "h": 16},
    "cross_entropy": {"t": 8, "v": 32},
}
MODEL = {
    "name": "m",
    "family": "llama",
    "layers": 1,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 16,
    "ffn": 64,
    "vocab": 64,
}
ONCE = {
    "copy": {"bytes": 64},
    "cast": {"elements": 64},
    "gather_pack": {"h": 16, "q": 16, "kv": 8, "f": 32, "ranks": 2},
    "gather_unpack": {"h": 16, "q": 16, "kv": 8, "f": 32, "ranks": 2},
    "reduce_pack": {"h": 16, "q": 16, "kv": 8, "f": 32, "ranks": 2},
    "adamw": {"h": 16, "q": 16, "kv": 8, "f": 32, "ranks": 2},
    "clip": {"h": 16, "q": 16, "kv": 8, "f": 32, "ranks": 2},
}


def call(**fields):
    import torch

    from executor.calibrate.kernels import operator_call

    return operator_call(torch.device("cpu"), OperatorItem(**fields))


@needs_torch
@pytest.mark.parametrize("direction", ["forward", "dgrad", "wgrad"])
def test_a_product_has_the_shape_that_was_asked_for(direction: str) -> None:
    result = call(kind="matmul", name="matmul", shape={"m": 6, "n": 4, "k": 8}, dtype="float32", direction=direction)()

    assert set(result.shape) == {6, 4}
    assert tuple(result.shape) == ((4, 6) if direction == "wgrad" else (6, 4)), "a weight is stored (out, in)"


@needs_torch
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_kernel_that_moves_memory_runs(name: str, direction: str) -> None:
    result = call(kind="move", name=name, shape=MOVES[name], dtype="bfloat16", direction=direction)()

    assert result is not None


@needs_torch
@pytest.mark.parametrize("name", ONCE)
def test_packing_and_updates_run(name: str) -> None:
    call(kind="move", name=name, shape=ONCE[name], dtype="float32", direction="forward")()


@needs_torch
def test_rotations_keep_lengths() -> None:
    """Whatever the way of writing it, a rotation changes no norm."""
    import torch

    from executor.calibrate.kernels import _MEMORY_OPERATORS, _TensorFactory

    for name in ("rotary_complex", "rotary_halves"):
        if name == "rotary_halves":
            continue  # its angles are drawn for each half apart here: only its cost matters
        forward, (q, k) = _MEMORY_OPERATORS[name](_TensorFactory(torch.device("cpu"), torch.float32), MOVES[name])
        for before, after in zip((q, k), forward(), strict=True):
            assert torch.allclose(before.norm(dim=-1), after.norm(dim=-1), rtol=1e-4)


@needs_torch
def test_attention_groups_heads() -> None:
    shape = {"b": 2, "a": 4, "kv": 2, "s": 8, "S": 8, "d": 16}
    out = call(kind="attention", name="attention", shape=shape, dtype="float32", direction="forward")()

    assert tuple(out.shape) == (2, 4, 8, 16)
    gradients = call(kind="attention", name="attention", shape=shape, dtype="float32", direction="backward")()
    assert [tuple(g.shape) for g in gradients] == [(2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)]


@needs_torch
def test_unknown_operators_are_refused() -> None:
    from executor.calibrate.kernels import Unsupported

    with pytest.raises(Unsupported):
        call(kind="move", name="gossip", shape={"t": 1}, dtype="float32", direction="forward")
    with pytest.raises(Unsupported):
        call(kind="move", name="silu", shape=MOVES["silu"], dtype="float99", direction="forward")


@needs_torch
def test_a_timing_on_the_cpu_is_a_time() -> None:
    import torch

    from executor.gpu.timing import Timer

    timing = Timer(torch.device("cpu")).measure(lambda: torch.ones(8).sum(), rounds=3)

    assert timing.seconds > 0
    assert timing.count == 3
    assert timing.ended >= timing.began


@needs_torch
def test_calls_count_once_the_power_limit_holds(monkeypatch) -> None:
    """After a rest a GPU runs for a tenth of a second at clocks that it cannot keep."""
    import torch

    from executor.gpu import timing

    now = 0.0

    def group(calls: int) -> tuple[float, float]:
        nonlocal now
        one = 0.010 if now < 0.1 else 0.012
        now += calls * one
        return one, 1e-5

    monkeypatch.setattr(timing.time, "monotonic", lambda: now)
    timer = timing.Timer(torch.device("cpu"))
    monkeypatch.setattr(timer, "cuda", True)
    monkeypatch.setattr(timer, "heat", lambda _: None)
    monkeypatch.setattr(timer, "_group", lambda call, calls, ahead: group(calls))

    assert timer.measure(lambda: None, seconds=0.05, rounds=1).seconds == 0.010
    now = 0.0
    assert timer.measure(lambda: None, seconds=0.05, settle_s=0.15).seconds == 0.012


@needs_torch
def test_calls_that_something_disturbs_are_repeated_behind_products(monkeypatch) -> None:
    """The host stalls in two of the first three groups; each group's first call waits behind products."""
    import torch

    from executor.gpu import timing

    now, waits, before = 0.0, iter([0.0, 0.0, 0.0, 0.001, 0.0013]), []

    def group(_call, calls: int, ahead_s: float) -> tuple[float, float]:
        nonlocal now
        before.append(ahead_s)
        one = 0.002 + next(waits, 0.0)
        now += calls * one
        return one, 2e-4

    monkeypatch.setattr(timing.time, "monotonic", lambda: now)
    timer = timing.Timer(torch.device("cpu"))
    monkeypatch.setattr(timer, "cuda", True)
    monkeypatch.setattr(timer, "heat", lambda _: None)
    monkeypatch.setattr(timer, "_group", group)

    assert timer.measure(lambda: None, seconds=0.05, rounds=3).seconds == 0.002
    assert min(before[2:]) >= 2e-4


@needs_torch
def test_a_layer_takes_what_it_takes_on_all_processors_in_the_mean() -> None:
    """On half of them 1.6 times as long as on the others; a step that something disturbed does not count."""
    from executor.calibrate.layers import _mean

    assert _mean([1.0] * 20 + [1.6] * 19 + [30.0]) == pytest.approx(1.3, abs=0.02)


@needs_torch
def test_what_cannot_be_measured_is_missing_and_the_rest_is_there(tmp_path) -> None:
    import torch

    from executor.calibrate.operators import OperatorTimes
    from executor.launch.records import Deadline, Recorder

    wanted = [
        OperatorItem(kind="move", name="gossip", shape={"t": 1}, dtype="float32"),
        OperatorItem(kind="move", name="silu", shape={"t": 8, "f": 16}, dtype="float32"),
    ]

    OperatorTimes(torch.device("cpu"), 0).record(wanted, Recorder(tmp_path / "r"), Deadline(60))

    records = list(read_records(tmp_path / "r"))
    assert [r["sample"]["name"] for r in records if r["kind"] == "operator"] == ["silu"]
    assert any("gossip" in r["what"] for r in records if r["kind"] == "missing")


@needs_torch
def test_a_step_may_say_more_than_a_sample_holds(tmp_path, monkeypatch) -> None:
    """Torchtitan's steps tell their loss as well, which is no part of a profile."""
    import torch

    from executor.calibrate import layers
    from executor.launch.records import Recorder

    said = {"data_s": 1e-3, "loss": 2.0, "gradient_norm": 1.0}
    item = LayerItem(
        ranks=1,
        model=convert(MODEL, Model, where="test"),
        plan=Plan(),
        workload=Workload(seq_len=8, global_batch_size=1),
        runtime=Runtime(name="torchtitan"),
    )
    monkeypatch.setattr(layers, "builder_of", lambda *_: lambda *_: lambda: time.sleep(2e-3) or dict(said))
    monkeypatch.setattr(layers, "rank_zero_decides", lambda value: value)
    monkeypatch.setattr(layers.dist, "barrier", lambda: None)
    monkeypatch.setattr(layers.dist, "get_rank", lambda: 0)

    layers.record_layers(torch.device("cpu"), item, Recorder(tmp_path / "r"), gpu=0)

    head = {"kind": "header", "machine": "m", "gpu": "h200-sxm"}
    found = profile_from_records([head, *read_records(tmp_path / "r")])
    assert [(sample.layers, sample.data_s) for sample in found.layers] == [(1, 1e-3), (2, 1e-3)]


def test_a_throttled_sample_is_invalid_and_a_power_cap_is_not() -> None:
    assert "thermal" in invalid_reason(Conditions(throttle=("hardware thermal slowdown", "software power cap")))
    assert invalid_reason(Conditions(throttle=("software power cap",))) == ""
    assert invalid_reason(Conditions()) == ""


def test_clocks_are_those_of_the_sample() -> None:
    watch = ClockMonitor(reads=False)
    watch.add(1.0, "0, 1980, 300.0, 40, 0x0000000000000000\n")
    watch.add(2.0, "0, 1410, 695.5, 55, 0x0000000000000004\n")
    watch.add(2.0, "1, 345, 90.0, 30, 0x0000000000000000\n")
    watch.add(2.1, "0, 1500, [N/A], 56, 0x0000000000000020\n")
    watch.add(9.0, "0, 345, 90.0, 40, Not Active\n")

    found = watch.between(1.9, 2.2, 0)

    assert found.sm_clock_hz == pytest.approx(1455e6)
    assert found.power_w == 695.5
    assert found.throttle == ("software power cap", "software thermal slowdown")
    assert watch.between(3.0, 3.01, 0).sm_clock_hz == 345e6, "a short sample gets the next reading"
    assert watch.between(10.0, 11.0, 0) == Conditions()


def test_a_stand_in_never_claims_a_gpu() -> None:
    from types import SimpleNamespace

    options = SimpleNamespace(device="cpu", gpu_name="h200-sxm", machine="m", command="c")
    record = {"kind": "header", **to_builtins(header(options, 2))}

    assert record["gpu"] == "cpu"
    assert profile_from_records([record]).gpu == "cpu"


@needs_torch
def test_every_sample_states_when_it_was_complete(tmp_path) -> None:
    from executor.calibrate.rank import SampleRecorder

    recorder = SampleRecorder(str(tmp_path / "r"), time.monotonic() - 3.0)
    recorder.write("host", sample=HostSample(name="eager", seconds=1e-6, spread=0.0, count=1))
    recorder.write("group", sample=CollectiveSample(op="all_reduce", ranks=2, nodes=1, nbytes=8, time_s=1e-6))
    recorder.write("operator", sample=OperatorSample(kind="move", name="copy", shape={}, dtype="f", seconds=1e-6))
    recorder.close()

    assert all(3.0 <= record["sample"]["at_s"] < 60.0 for record in read_records(tmp_path / "r"))


@needs_torch
def test_a_host_is_timed_on_the_cpu_alone(tmp_path) -> None:
    """A layer on DTensors takes longer than a plain one, and a profile of both says what a host takes."""
    from executor.calibrate.host_alone import time_host_alone
    from executor.launch.records import Recorder

    recorder = Recorder(tmp_path / "host.jsonl")
    time_host_alone(recorder, rounds=1)
    recorder.close()
    samples = [
        convert(record["sample"], HostSample, where="record") for record in read_records(tmp_path / "host.jsonl")
    ]
    plain, cut = samples

    assert 0 < plain.seconds < cut.seconds
    assert host_alone(samples) is not None
