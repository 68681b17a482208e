"""Worker, one per GPU under torchrun: training steps of one and of two layers of a real model under a real runtime.

The difference of the two is what a layer costs there, host and device together; what they have in common is the rest of
a step. Only these are ever run: a calibration that had seen the step it is to predict would prove nothing.

`torchtitan` is used where it can be imported (`executor.calibrate_titan`); anything else that the executor can run is
run by the executor itself.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from executor.calibrate_operators import invalid, versions
from executor.collector import NoCollection
from executor.gpu_state import read_states
from executor.joined import agreed, join
from executor.measuring import ended_as_rank, piece_parser
from executor.records import Deadline, Recorder, middle
from simulator.model import Model
from simulator.plan import Plan
from simulator.runtime import Runtime
from simulator.workload import Workload
from topology import codec

LAYERS = (1, 2)
WARM_UP = 3
STEPS = 40
LEAST_STEPS = 8
LONGEST_S = 1.6  # of timed steps of one sample
TIMEOUT_S = 120.0

Step = Callable[[], dict[str, float]]  # takes one step; returns what it saw besides the time


def main(argv: Sequence[str] | None = None) -> int:
    parser = piece_parser("executor.calibrate_layers")
    parser.add_argument("--request", required=True, help="JSON: {layers: [{model, plan, workload, runtime}]}")
    parser.add_argument("--runtime", choices=("torchtitan", "own"), required=True)
    parser.add_argument("--text", default="", help="for torchtitan: a folder with tokenizer/ and c4_test/")
    parser.add_argument("--gpu", type=int, default=0)
    return ended_as_rank(run, parser.parse_args(argv))


def run(options: argparse.Namespace) -> int:
    import torch  # noqa: PLC0415 - only workers have it
    import torch.distributed as dist  # noqa: PLC0415 - as above

    deadline = Deadline.since_launch(options.seconds)
    if options.device == "cpu":
        torch.set_num_threads(1)
    device, recorder = join(options, timeout_s=TIMEOUT_S)
    world = dist.get_world_size()
    wanted = [
        one
        for one in codec.read_json(options.request).get("layers", [])
        if one["ranks"] == world and (one["runtime"]["name"] == "torchtitan") == (options.runtime == "torchtitan")
    ]
    builder = _builder(options)
    recorder.write("header", versions=versions(torch, options.device))
    if options.runtime == "torchtitan":
        recorder.write("header", versions=_titan_versions())
    longest = 20.0
    for number, one in enumerate(wanted):
        # Every rank must take the same way: rank 0's clock decides.
        if not agreed(torch, dist, mine=deadline.has(longest if one["runtime"].get("compile") else 0.4 * longest)):
            recorder.missing(f"{len(wanted) - number} layers from {label(one)} on: out of time")
            break
        began = time.monotonic()
        _sample(torch, dist, device, one, builder, recorder, options.gpu)
        longest = max(5.0, 1.5 * (time.monotonic() - began))
    recorder.close()
    dist.barrier()
    dist.destroy_process_group()
    return 0


def label(one: dict[str, Any]) -> str:
    plan = {key: value for key, value in one["plan"].items() if isinstance(value, int) and value > 1}
    return f"{one['runtime']['name']} {one['model']['name']} seq {one['workload']['seq_len']} {plan}"


def _titan_versions() -> dict[str, str]:
    import importlib.metadata  # noqa: PLC0415 - used here alone

    try:
        return {"torchtitan": importlib.metadata.version("torchtitan")}
    except importlib.metadata.PackageNotFoundError:
        return {}


def _builder(options: argparse.Namespace) -> Callable[..., Step]:
    if options.runtime == "torchtitan":
        from executor.calibrate_titan import titan_step  # noqa: PLC0415 - torchtitan may be absent

        return lambda *parts, **more: titan_step(*parts, text=options.text, **more)
    return own_step


def _sample(
    torch: Any,
    dist: Any,
    device: Any,
    one: dict[str, Any],
    builder: Callable[..., Step],
    recorder: Recorder,
    gpu: int,
) -> None:
    """Record one sample for each number of layers. A failure is one line under `missing`, and the next one is tried."""
    plan = codec.convert(one["plan"], Plan, where="request")
    workload = codec.convert(one["workload"], Workload, where="request")
    runtime = codec.convert(one["runtime"], Runtime, where="request")
    for layers in one.get("counts", LAYERS):
        model = replace(codec.convert(one["model"], Model, where="request"), layers=layers)
        problem, seen = "", None
        try:
            step = builder(model, plan, workload, runtime, device)
            with NoCollection():
                seen = _timed(torch, dist, device, step, recorder)
        except Exception as error:  # noqa: BLE001 - somebody else's framework fails in any way it likes
            problem = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
        step = None  # type: ignore[assignment]  # the model goes before the next one comes
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if not agreed(torch, dist, mine=not problem, leader=False) or seen is None:
            recorder.missing(f"{label(one)} with {layers} layers: {problem or 'another rank failed'}")
            return
        times, extra, mean_hz = seen
        mid, spread = middle(times)
        conditions = _conditions(gpu) if device.type == "cuda" and dist.get_rank() == 0 else {}
        if mean_hz is not None:
            conditions["mean_sm_clock_hz"] = mean_hz
        recorder.write(
            "layer",
            sample={
                "model": codec.to_builtins(model),
                "plan": one["plan"],
                "workload": one["workload"],
                "runtime": one["runtime"],
                "step_s": mid,
                "spread": spread,
                "count": len(times),
                **extra,
                "conditions": conditions,
                "invalid": invalid(conditions),
            },
        )


def _conditions(gpu: int) -> dict[str, Any]:
    """Read the GPU once the steps are over: asking the driver during them would hold up launches, which are measured."""
    state = read_states().get(gpu, {})
    found = {name: state.get(name) for name in ("sm_clock_hz", "power_w", "temperature_c")}
    return {**found, "throttle": state.get("throttle") or []}


def _timed(
    torch: Any, dist: Any, device: Any, step: Step, recorder: Recorder
) -> tuple[list[float], dict[str, float], float | None]:
    """Return step times from one end to the next, the medians of what steps saw besides, and the mean clock meanwhile."""
    from executor.sm_clock import SmClock  # noqa: PLC0415 - imports torch

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
        if not agreed(torch, dist, mine=sum(times) < LONGEST_S) and len(times) >= LEAST_STEPS:
            break
        last = time.perf_counter()  # agreeing is ours, not the step's
    clock.stamp()
    if clock.missing:
        recorder.missing(clock.missing)
    extra = {name: middle([one[name] for one in seen])[0] for name in (seen[0] if seen else {})}
    return times, extra, next(iter(clock.hertz()), None)


def own_step(model: Model, plan: Plan, workload: Workload, runtime: Runtime, device: Any) -> Step:
    """Return a step of the executor's own decoder under the plan."""
    import torch  # noqa: PLC0415 - only workers have it

    from executor.meshes import build_meshes  # noqa: PLC0415 - imports torch
    from executor.train_step import Trainer  # noqa: PLC0415 - as above

    meshes = _MESHES.setdefault(codec.fingerprint(plan), None) or build_meshes(plan, device.type)
    _MESHES[codec.fingerprint(plan)] = meshes
    trainer = Trainer(plan, model, workload, runtime, meshes, device=device)
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


# Process groups cost a second each and cannot be handed back while others use them.
_MESHES: dict[str, Any] = {}


if __name__ == "__main__":
    raise SystemExit(main())
