"""Training steps of one and of two layers of a real model under a real runtime.

Their difference is the cost of a layer, host and device together; their common part is the rest of a step. Full models
are never run here, so that predictions of whole steps stay out-of-sample.

Requests of the runtime `torchtitan` run in torchtitan itself (`executor.measure.torchtitan`), those of `meshwright` in
the executor.
"""

from __future__ import annotations

import gc
import importlib.metadata
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean

import torch
import torch.distributed as dist

from executor.calibrate.processors import Processors
from executor.gpu.device import synchronize
from executor.gpu.monitor import invalid_reason
from executor.gpu.sm_clock import SmClock
from executor.gpu.state import read_states
from executor.launch.garbage_collection import PausedGarbageCollection
from executor.launch.records import Recorder, median_and_spread
from executor.measure.rank_group import rank_zero_decides
from executor.measure.torchtitan import titan_step
from executor.parallel.meshes import meshes_for
from executor.parallel.parallelize import Setup
from executor.parallel.train_step import Trainer
from simulator.calibration.items import LayerItem
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.runtimes.library import runtime_spec
from topology import codec
from topology.errors import ProbeError
from topology.profile.samples import Conditions, LayerSample

SAMPLED = frozenset({"host_s", "data_s", "reserved_bytes"})
WARM_UP, WARM_S = 3, 1.0  # least steps and seconds: a busy GPU is held to its power limit after half of them
STEPS = 40
MIN_STEPS = 5
MAX_TIMED_S = 1.0  # seconds of the timed steps of one sample together

ENDS = 0.1  # of the timed steps, that count at neither end
Step = Callable[[], dict[str, float]]  # runs one step; returns measurements other than its time


def titan_versions() -> dict[str, str]:
    try:
        return {"torchtitan": importlib.metadata.version("torchtitan")}
    except importlib.metadata.PackageNotFoundError:
        return {}


def builder_of(runtime: str, text: str) -> Callable[..., Step]:
    """Return the builder of a runtime's step; torchtitan's raises ImportError if torchtitan is not installed.

    Raises ProbeError for other runtimes, whose host and kernels differ from the executor's.
    """
    layers = runtime_spec(runtime).tools.layers
    if layers == "torchtitan":
        return lambda *parts, **more: titan_step(*parts, text=text, **more)
    if layers != "own":
        raise ProbeError(f"layers of {runtime} are not run here", remedy="ask for torchtitan's or meshwright's")
    return own_step


def record_layers(device: torch.device, item: LayerItem, recorder: Recorder, *, gpu: int, text: str = "") -> None:
    """Record one sample for each number of layers; a collective call. Raises what building or running a step raises."""
    build = builder_of(item.runtime.name, text)
    for parts in _in_turn(item):
        with _Freed(device), PausedGarbageCollection():
            times, extra, mean_hz = _time_steps(device, build(*parts, device), recorder)
        spread = median_and_spread(times)[1]
        conditions = _conditions(gpu) if device.type == "cuda" and dist.get_rank() == 0 else Conditions()
        conditions = replace(conditions, mean_sm_clock_hz=mean_hz)
        model, plan, workload, runtime = (codec.to_builtins(part) for part in parts)
        sample = LayerSample(
            model=model,
            plan=plan,
            workload=workload,
            runtime=runtime,
            step_s=_mean(times),
            spread=spread,
            count=len(times),
            host_s=extra.get("host_s"),
            data_s=extra.get("data_s"),
            reserved_bytes=extra.get("reserved_bytes"),
            conditions=conditions,
            invalid=invalid_reason(conditions),
        )
        recorder.write("layer", sample=sample)


def compile_layers(device: torch.device, item: LayerItem, *, text: str = "") -> None:
    """Run the steps of an item a few times, so that its code is compiled before it is timed."""
    build = builder_of(item.runtime.name, text)
    for parts in _in_turn(item):
        with _Freed(device):
            step = build(*parts, device)
            for _ in range(WARM_UP):
                step()
            del step


def _in_turn(item: LayerItem) -> Iterator[tuple[Model, Plan, Workload, Runtime]]:
    """Yield the parts of a run for each requested number of layers."""
    for layers in item.counts:
        yield replace(item.model, layers=layers), item.plan, item.workload, item.runtime


class _Freed:
    """Frees a model's memory after its steps, before the next model is built."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _conditions(gpu: int) -> Conditions:
    """Return the GPU's state after the steps, since querying the driver during them would delay launches."""
    state = read_states().get(gpu)
    if state is None:
        return Conditions()
    return Conditions(
        sm_clock_hz=state.sm_clock_hz,
        power_w=state.power_w,
        temperature_c=state.temperature_c,
        throttle=state.throttle or (),
    )


def _time_steps(
    device: torch.device, step: Step, recorder: Recorder
) -> tuple[list[float], dict[str, float], float | None]:
    """Return step times, the medians of the steps' other measurements, and the mean SM clock in Hz."""
    clock, began, warm = SmClock(device), time.perf_counter(), 0
    heats = device.type == "cuda"
    while warm < WARM_UP or (heats and rank_zero_decides(time.perf_counter() - began < WARM_S)):
        step()
        synchronize(device)
        warm += 1
    dist.barrier()
    times: list[float] = []
    seen: list[dict[str, float]] = []
    clock.stamp()
    with Processors(dist.get_rank()) as processors:
        while len(times) < STEPS and (len(times) < MIN_STEPS or rank_zero_decides(sum(times) < MAX_TIMED_S)):
            processors.turn()
            last = time.perf_counter()
            seen.append(step())
            synchronize(device)
            times.append(time.perf_counter() - last)
    clock.stamp()
    if clock.missing:
        recorder.missing(clock.missing)
    return times, medians(seen), next(iter(clock.hertz()), None)


def _mean(times: list[float]) -> float:
    """Return the mean without the tenths at either end: of steps on quick and on slow processors, neither is what the
    others take, and one that something disturbed says nothing.
    """
    cut = int(ENDS * len(times))
    return fmean(sorted(times)[cut : len(times) - cut])


def medians(seen: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of the steps' own measurements that are fields of a `LayerSample`."""
    names = [name for name in (seen[0] if seen else {}) if name in SAMPLED]
    return {name: median_and_spread([item[name] for item in seen])[0] for name in names}


def own_step(model: Model, plan: Plan, workload: Workload, runtime: Runtime, device: torch.device) -> Step:
    """Return a step of the executor's own decoder under the plan."""
    meshes = meshes_for(plan, device.type)
    setup = Setup(plan=plan, model=model, workload=workload, runtime=runtime, meshes=meshes, device=device)
    trainer = Trainer(setup)
    index = 0

    def step() -> dict[str, float]:
        nonlocal index
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        trainer.step(index)
        index += 1
        seen = {"host_s": time.perf_counter() - began}
        if device.type == "cuda":
            seen["reserved_bytes"] = float(torch.cuda.max_memory_reserved(device))
        return seen

    return step
