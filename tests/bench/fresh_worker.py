"""One rank of one fresh run: build, warm up, time steps, look at one of them, and say how it ended in a file.

The steps are the executor's own (`executor.calibrate.layers.own_step`), or torchtitan's own trainer's
(`executor.measure.torchtitan.titan_step`). A step's time is wall clock on the slowest rank, between device
synchronisations. What a file says last is how far the rank came, so that a rank that is killed is accounted for.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.calibrate.layers import own_step
from executor.gpu import symmetric_memory as symmetric
from executor.gpu.sm_clock import SmClock
from executor.launch.garbage_collection import PausedGarbageCollection
from executor.measure.torchtitan import titan_step
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology import codec

WARM_UP = 3
MORE_WARM_UP = 6  # while a step still adds memory
GROWN = 1.002
LEAST_STEPS, MOST_STEPS, STEPS_S = 5, 30, 2.5
FAILED, OUT_OF_MEMORY = 76, 77
JOIN_S = 60.0

with suppress(ImportError):  # imported once by the server that ranks are forked from: it takes seconds
    import torchtitan.train  # noqa: F401


def main(rank: int, request: dict[str, Any], folder: str, port: int) -> None:
    """Be rank `rank` of the run that `request` describes, and end the process."""
    be_rank(rank, request, Path(folder), port, f"rank{rank}.json", partial(_measure, request))


def be_rank(
    rank: int,
    request: dict[str, Any],
    here: Path,
    port: int,
    report_name: str,
    work: Callable[[Report, torch.device], None],
) -> None:
    """Join the group of all ranks, do `work`, and end the process with what its report says."""
    os.setsid()  # so that whoever kills this rank reaches the compiler's processes too
    log = os.open(here / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    world = str(request["gpus"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **request["environment"]}
    cuda = request["device"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    report = Report(here / report_name)
    try:
        if cuda:
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
        report.say("joining")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            timeout=timedelta(seconds=JOIN_S),
            device_id=device if cuda else None,
        )
        work(report, device)
        code = 0
    except torch.OutOfMemoryError as error:
        report.say("ended", status="out of memory", cause=_first_line(error))
        code = OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001 - whatever it is, the report says it
        report.say("ended", status="failed", cause=f"{type(error).__name__}: {_first_line(error)}")
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = FAILED
    os._exit(code)  # other ranks may stand in a collective: no leaving in order


class Report:
    """What a rank knows, written whenever it knows more."""

    def __init__(self, path: Path) -> None:
        self.begin(path)

    def begin(self, path: Path) -> None:
        """Begin anew in another file."""
        self.path, self.known, self.began = path, {}, time.monotonic()

    def say(self, phase: str, **more: Any) -> None:
        self.known |= {"phase": phase, **more}
        self.known.setdefault("phases_s", {})[phase] = round(time.monotonic() - self.began, 2)
        fresh = self.path.with_suffix(".part")
        fresh.write_text(json.dumps(self.known))
        fresh.replace(self.path)


def _measure(request: dict[str, Any], report: Report, device: torch.device) -> None:
    cuda = device.type == "cuda"
    shape = (
        codec.convert(request["model"], Model, where="request"),
        codec.convert(request["plan"], Plan, where="request"),
        codec.convert(request["workload"], Workload, where="request"),
        codec.convert(request["runtime"], Runtime, where="request"),
        device,
    )
    report.say("building")
    step = titan_step(*shape, text=request["text"]) if shape[3].name == "torchtitan" else own_step(*shape)
    report.say("warming up")
    with PausedGarbageCollection():
        _warm_up(step, device)
        report.say("timing")
        _timed(step, device, report)
    report.say("profiling")
    if cuda and os.environ["RANK"] == "0":
        report.say("profiled", profiled=_profiled(step, device, request.get("named", 12)))
    elif cuda:
        step()
    dist.barrier()
    report.say("done", status="ok")


def _warm_up(step: Any, device: torch.device) -> None:
    """Take steps until memory stops growing: asking the driver for more is not a cost of training."""
    held = 0
    for index in range(WARM_UP + MORE_WARM_UP):
        step()
        _synchronize(device)
        before, held = held, torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        if index + 1 >= WARM_UP and not _largest(float(held > before * GROWN)):
            break


def _timed(step: Any, device: torch.device, report: Report) -> None:
    cuda, times, highest = device.type == "cuda", [], 0
    retries = torch.cuda.memory_stats()["num_alloc_retries"] if cuda else 0
    clock = SmClock(device)
    clock.stamp()
    while len(times) < MOST_STEPS and (len(times) < LEAST_STEPS or sum(times) < STEPS_S):
        _synchronize(device)
        dist.barrier()
        _synchronize(device)
        begin = time.perf_counter()
        seen = step()
        _synchronize(device)
        times.append(_largest(time.perf_counter() - begin))
        # Our own step resets the peak when it begins, torchtitan's when it ends.
        highest = max(highest, int(seen.get("reserved_bytes", 0)))
    clock.stamp()
    found: dict[str, Any] = {"steps_s": times}
    if cuda:
        stats = torch.cuda.memory_stats()
        found |= {
            "reserved_bytes": highest + symmetric.workspace_bytes(),  # predictions have both
            "retries": stats["num_alloc_retries"] - retries,
            "mean_sm_clock_hz": next(iter(clock.hertz()), None),
        }
    report.say("timed", **found)


def _profiled(step: Any, device: torch.device, named: int) -> dict[str, Any]:
    """Return seconds of one more step in which the GPU computed, moved data between GPUs, or was idle; the `named`
    longest kernels.
    """
    from torch.profiler import ProfilerActivity, profile

    _synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begin = time.perf_counter()
        step()
        _synchronize(device)
        wall = time.perf_counter() - begin
    spans = [
        (event.time_range.start * 1e-6, event.time_range.end * 1e-6, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    moving = [span for span in spans if "nccl" in span[2].lower()]
    computing = [span for span in spans if "nccl" not in span[2].lower()]
    spent: dict[str, list[float]] = {}
    for start, end, name in spans:
        spent.setdefault(name[:100], []).append(end - start)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:named]
    return {
        "wall_s": wall,
        "computing_s": covered(computing),
        "collectives_s": covered(moving),
        "exposed_collectives_s": covered(spans) - covered(computing),
        "idle_s": wall - covered(spans),
        "kernels": len(spans),
        "longest": [{"name": name, "count": len(all_), "seconds": round(sum(all_), 6)} for name, all_ in longest],
    }


def covered(spans: list[tuple[float, float, str]]) -> float:
    """Return how long at least one of the spans lasts."""
    total, until = 0.0, float("-inf")
    for start, end, _ in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _largest(mine: float) -> float:
    """Return the largest of all ranks' values, exchanged over gloo."""
    box = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:400] if text else ""
