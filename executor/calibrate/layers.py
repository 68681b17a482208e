"""Worker, one per GPU under torchrun: training steps of one and of two layers of a real model under a real runtime.

Their difference is the cost of a layer, host and device together; their common part is the rest of a step. Full models
are never run here, so that predictions of whole steps stay out-of-sample.

Requests of the runtime `torchtitan` run in torchtitan itself (`executor.calibrate.torchtitan`), all others in the
executor.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from executor.calibrate.operators import versions
from executor.gpu.monitor import invalid_reason
from executor.gpu.sm_clock import SmClock
from executor.gpu.state import read_states
from executor.launch.garbage_collection import PausedGarbageCollection
from executor.launch.records import Deadline, Recorder, median_and_spread
from executor.measure.measurement import piece_parser
from executor.measure.rank_group import every_rank_agrees, join_ranks, rank_zero_decides, run_as_rank
from executor.parallel.meshes import meshes_for
from executor.parallel.parallelize import Setup
from executor.parallel.train_step import Trainer
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology import codec

LAYERS = (1, 2)
WARM_UP = 3
STEPS = 40
MIN_STEPS = 8
MAX_TIMED_S = 1.6  # of the timed steps of one sample together
TIMEOUT_S = 120.0

Step = Callable[[], dict[str, float]]  # runs one step; returns measurements other than its time


def main(argv: Sequence[str] | None = None) -> int:
    parser = piece_parser("executor.calibrate.layers")
    parser.add_argument("--request", required=True, help="JSON: {layers: [{model, plan, workload, runtime}]}")
    parser.add_argument("--runtime", choices=("torchtitan", "own"), required=True)
    parser.add_argument("--text", default="", help="for torchtitan: a folder with tokenizer/ and c4_test/")
    parser.add_argument("--gpu", type=int, default=0)
    return run_as_rank(run, parser.parse_args(argv))


def run(options: argparse.Namespace) -> int:
    deadline = Deadline.since_launch(options.seconds)
    if options.device == "cpu":
        torch.set_num_threads(1)
    device, recorder = join_ranks(options, timeout_s=TIMEOUT_S)
    world = dist.get_world_size()
    wanted = [
        item
        for item in codec.read_json(options.request).get("layers", [])
        if item["ranks"] == world and (item["runtime"]["name"] == "torchtitan") == (options.runtime == "torchtitan")
    ]
    builder = _builder(options)
    recorder.write("header", versions=versions(options.device))
    if options.runtime == "torchtitan":
        recorder.write("header", versions=_titan_versions())
    longest = 20.0
    for number, item in enumerate(wanted):
        # Every rank must take the same way: rank 0's clock decides.
        if not rank_zero_decides(deadline.allows(longest if item["runtime"].get("compile") else 0.4 * longest)):
            recorder.missing(f"{len(wanted) - number} layers from {describe_item(item)} on: out of time")
            break
        began = time.monotonic()
        _measure_layers(device, item, builder, recorder, options.gpu)
        longest = max(5.0, 1.5 * (time.monotonic() - began))
    recorder.close()
    dist.barrier()
    dist.destroy_process_group()
    return 0


def describe_item(item: dict[str, Any]) -> str:
    plan = {key: value for key, value in item["plan"].items() if isinstance(value, int) and value > 1}
    return f"{item['runtime']['name']} {item['model']['name']} seq {item['workload']['seq_len']} {plan}"


def _titan_versions() -> dict[str, str]:
    try:
        return {"torchtitan": importlib.metadata.version("torchtitan")}
    except importlib.metadata.PackageNotFoundError:
        return {}


def _builder(options: argparse.Namespace) -> Callable[..., Step]:
    if options.runtime == "torchtitan":
        from executor.calibrate.torchtitan import titan_step  # noqa: PLC0415 - only for runtime torchtitan

        return lambda *parts, **more: titan_step(*parts, text=options.text, **more)
    return own_step


def _measure_layers(
    device: Any,
    item: dict[str, Any],
    builder: Callable[..., Step],
    recorder: Recorder,
    gpu: int,
) -> None:
    """Record one sample for each number of layers. A failure is recorded under `missing`, and the next item is tried."""
    plan = codec.convert(item["plan"], Plan, where="request")
    workload = codec.convert(item["workload"], Workload, where="request")
    runtime = codec.convert(item["runtime"], Runtime, where="request")
    for layers in item.get("counts", LAYERS):
        model = replace(codec.convert(item["model"], Model, where="request"), layers=layers)
        problem, seen = "", None
        try:
            step = builder(model, plan, workload, runtime, device)
            with PausedGarbageCollection():
                seen = _time_steps(device, step, recorder)
        except Exception as error:  # noqa: BLE001 - another framework can raise anything
            problem = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
        step = None  # type: ignore[assignment]  # frees the model before the next one is built
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if not every_rank_agrees(not problem) or seen is None:
            recorder.missing(f"{describe_item(item)} with {layers} layers: {problem or 'another rank failed'}")
            return
        times, extra, mean_hz = seen
        mid, spread = median_and_spread(times)
        conditions = _conditions(gpu) if device.type == "cuda" and dist.get_rank() == 0 else {}
        if mean_hz is not None:
            conditions["mean_sm_clock_hz"] = mean_hz
        recorder.write(
            "layer",
            sample={
                "model": codec.to_builtins(model),
                "plan": item["plan"],
                "workload": item["workload"],
                "runtime": item["runtime"],
                "step_s": mid,
                "spread": spread,
                "count": len(times),
                **extra,
                "conditions": conditions,
                "invalid": invalid_reason(conditions),
            },
        )


def _conditions(gpu: int) -> dict[str, Any]:
    """Return the GPU's state after the steps: querying the driver during them would delay launches."""
    state = read_states().get(gpu, {})
    found = {name: state.get(name) for name in ("sm_clock_hz", "power_w", "temperature_c")}
    return {**found, "throttle": state.get("throttle") or []}


def _time_steps(device: Any, step: Step, recorder: Recorder) -> tuple[list[float], dict[str, float], float | None]:
    """Return step times, the medians of the steps' other measurements, and the mean SM clock in Hz."""
    cuda, clock = device.type == "cuda", SmClock(device)
    for _ in range(WARM_UP):
        step()
    if cuda:
        torch.cuda.synchronize(device)
    dist.barrier()
    times: list[float] = []
    seen: list[dict[str, float]] = []
    clock.stamp()
    last = time.perf_counter()
    for _ in range(STEPS):
        seen.append(step())
        if cuda:
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        times.append(now - last)
        last = now
        if not rank_zero_decides(sum(times) < MAX_TIMED_S) and len(times) >= MIN_STEPS:
            break
        last = time.perf_counter()  # the decision is not part of the step
    clock.stamp()
    if clock.missing:
        recorder.missing(clock.missing)
    extra = {name: median_and_spread([item[name] for item in seen])[0] for name in (seen[0] if seen else {})}
    return times, extra, next(iter(clock.hertz()), None)


def own_step(model: Model, plan: Plan, workload: Workload, runtime: Runtime, device: Any) -> Step:
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


if __name__ == "__main__":
    raise SystemExit(main())
