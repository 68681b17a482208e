"""One rank of a run: check the numbers, then take steps and time them. Started by `executor.apply_run`.

Everything measured is written as it is measured (`rank<r>.jsonl`), so that a run cut short leaves what it had. Several
requests of as many ranks run one after the other (`executor.apply_many`): starting processes and joining them takes
longer than a plan's steps.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import resource
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from executor import symmetric
from executor.built import built
from executor.checks import check_numbers
from executor.collector import NoCollection
from executor.heartbeat import Heartbeat
from executor.meshes import Meshes, build_meshes, effective, entered, set_timeout
from executor.profile_step import profile_step
from executor.records import OUT_OF_MEMORY, WRONG_NUMBERS, Deadline, Recorder
from executor.request import Request
from executor.shards import local
from executor.sm_clock import SmClock
from executor.train_step import Trainer
from simulator.plan import MESH_AXES, Plan
from topology import codec

PROFILE_S = 10.0
MORE_WARM_UP = 6  # steps at most, while a step still adds memory
GROWN = 1.002


@record
def main(argv: Sequence[str] | None = None) -> None:
    """Run this rank. Ends the process with a code of its own when memory is full or numbers are wrong."""
    parser = argparse.ArgumentParser(prog="executor.worker")
    parser.add_argument("--request", required=True, action="append", help="may be repeated, each with an --out")
    parser.add_argument("--out", required=True, action="append", type=Path)
    parser.add_argument("--until", type=float, default=float("inf"), help="take no step after this time of the clock")
    options = parser.parse_args(argv)
    deadline = Deadline(options.until - time.time())
    rank = int(os.environ["RANK"])
    for path, out in zip(options.request, options.out, strict=True):
        beat = Heartbeat(out, rank)
        recorder = Recorder(out / f"rank{rank}.jsonl")
        request = codec.convert(codec.read_json(path), Request, where=path)
        try:
            run(request, deadline, recorder, beat, out)
        except BaseException as error:
            beat.end()
            if not _is_full_memory(error):
                raise
            recorder.write("out_of_memory", message=str(error)[:2000], phase=beat.phase, **_memory(request.device))
            recorder.close()
            # Not an exception: unwinding would run collectives that the other ranks never join.
            os._exit(OUT_OF_MEMORY)
        recorder.close()
        beat.close()
        _forget(request.device)
    # Only when all went well: after a failure others may be gone, and leaving the group would wait for them.
    dist.destroy_process_group()


def run(request: Request, deadline: Deadline, recorder: Recorder, beat: Heartbeat, out: Path) -> None:
    """Join the others, verify, warm up, measure."""
    device = _device(request)
    if device.type == "cpu":
        torch.set_num_threads(1)
    beat.enter("joining the process group")
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=request.start_timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    _run_joined(request, device, deadline, recorder, beat, out)


def _run_joined(
    request: Request, device: torch.device, deadline: Deadline, recorder: Recorder, beat: Heartbeat, out: Path
) -> None:
    plan, began = request.plan, time.perf_counter()
    dist.barrier()  # the first collective: whoever is missing is found here, under the short timeout
    recorder.write("versions", torch=torch.__version__, backend=dist.get_backend(), device=_device_name(device))
    if not _all_have_time(deadline, 0.0, device):
        recorder.write("out_of_time", steps=0)
        recorder.write("timed")
        recorder.write("done", seconds=time.perf_counter() - began)
        return
    beat.enter("building meshes")
    meshes = _meshes(plan, device.type)
    mesh = effective(meshes, plan)
    recorder.write("mesh", **mesh)
    if not mesh["as_requested"]:
        raise RuntimeError(f"torch's mesh is not the plan's: {mesh}")
    set_timeout(meshes, request.collective_timeout_s)
    beat.entered, beat.telling = entered, device.type == "cpu"

    if not check_numbers(request, meshes, device, recorder, beat):
        recorder.close()
        os._exit(WRONG_NUMBERS)  # a plan whose numbers are wrong is never timed

    beat.enter("building the model")
    trainer = Trainer(
        plan,
        request.model,
        request.workload,
        request.runtime,
        meshes,
        device=device,
        seed=request.seed,
        own_table=request.own_table,
    )
    held = sum(local(p).numel() for p in trainer.parameters())
    recorder.write("built", parameters_here=held, after_s=time.perf_counter() - began, **_memory(device.type))
    with NoCollection() as collector:
        longest = _take_steps(request, trainer, device, deadline, recorder, beat, collector)
    recorder.write("timed")  # whatever comes after this costs a picture, not the measurement
    beat.enter("profiling a step")
    # Reading the profile takes seconds, and is worth them only where a step is left over.
    if request.profile and _all_have_time(deadline, 2 * longest + PROFILE_S, device):
        rank = dist.get_rank()
        last = request.warm_up + MORE_WARM_UP + request.steps
        path = out / f"rank{rank}.trace.json"
        why, operators = profile_step(lambda: trainer.step(last), device, path, rank=rank)
        if why:
            recorder.missing(f"profile: {why}")
        for sample in operators:
            recorder.write("operator", sample=sample)
    recorder.write("effects", **built(trainer))
    dist.barrier()
    recorder.write("done", seconds=time.perf_counter() - began)
    beat.enter("done")


def _take_steps(
    request: Request,
    trainer: Trainer,
    device: torch.device,
    deadline: Deadline,
    recorder: Recorder,
    beat: Heartbeat,
    collector: NoCollection,
) -> float:
    """Warm up, take the steps and record each; return the seconds of the longest.

    Warm-up goes on for some steps while the allocator still grows: experts get more tokens in one step than in another,
    and memory that is asked of the driver in a step is not a cost of training.
    """
    longest, index, warm_up, held = 0.0, 0, request.warm_up, 0
    clock = SmClock(device)
    while index < warm_up + request.steps:
        warm = index < warm_up
        beat.enter(f"{'warm-up ' if warm else ''}step {index if warm else index - warm_up}")
        collector.between_steps(index)
        if not _all_have_time(deadline, longest, device):
            recorder.write("out_of_time", steps=max(0, index - warm_up))
            break
        if index == warm_up and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.reset_accumulated_memory_stats(device)  # counts how often memory had to be given back
        _synchronize(device)
        dist.barrier()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        clock.stamp()
        begin = time.perf_counter()
        for event in events[:1]:
            event.record()
        result = trainer.step(index)
        for event in events[1:]:
            event.record()
        _synchronize(device)
        seconds = time.perf_counter() - begin
        clock.stamp()
        symmetric.check_delivered()  # a kernel whose wait ran out went on with whatever was there
        longest = max(longest, seconds)
        if not (math.isfinite(result.loss) and math.isfinite(result.gradient_norm)):
            # The same on every rank: both are sums over all of them.
            recorder.write("not_finite", index=index)
            recorder.close()
            os._exit(WRONG_NUMBERS)
        recorder.write(
            "warm_up" if warm else "step",
            index=index,
            seconds=seconds,
            device_seconds=events[0].elapsed_time(events[1]) * 1e-3 if events else None,
            ended_at=time.time(),
            sm_clock_hz=next(iter(clock.hertz()), None),
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            **_memory(device.type),
        )
        index += 1
        if index == warm_up and warm_up < request.warm_up + MORE_WARM_UP and device.type == "cuda":
            before, held = held, torch.cuda.memory_reserved(device)
            warm_up += _any(held > before * GROWN, device)
        elif warm and device.type == "cuda":
            held = torch.cuda.memory_reserved(device)
    if clock.missing:
        recorder.missing(clock.missing)
    return longest


def _any(mine: bool, device: torch.device) -> bool:
    """Return whether it is so on some rank."""
    flag = torch.tensor(float(mine), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


_MESHES: dict[tuple[int, ...], Meshes] = {}  # process groups cost a second each on GPUs, and are never handed back


def _meshes(plan: Plan, device_type: str) -> Meshes:
    """Return the meshes of a plan; those of an earlier one of the same degrees."""
    key = (*(getattr(plan, axis) for axis in MESH_AXES), plan.ep)
    if key not in _MESHES:
        _MESHES[key] = build_meshes(plan, device_type)
    return _MESHES[key]


def _forget(device: str) -> None:
    """Give back what the last run held, so that the next one finds the memory that a fresh process would."""
    torch.compiler.reset()
    symmetric.release()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _is_full_memory(error: BaseException) -> bool:
    """Return whether an allocation failed: on a GPU torch says so by a class, on a CPU in words."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "can't allocate memory" in str(error) or "Cannot allocate memory" in str(error)


def _device(request: Request) -> torch.device:
    if request.device == "cpu":
        return torch.device("cpu")
    local, several = int(os.environ["LOCAL_RANK"]), os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]
    # On several nodes each counts its own GPUs, and a rank takes that of its place in the node.
    index = local if several or not request.gpus else request.gpus[int(os.environ["RANK"])]
    seen = torch.cuda.device_count()
    if index >= seen:
        raise RuntimeError(
            f"{socket.gethostname()} shows {seen} GPUs to this job; the plan's rank here needs GPU {index}"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _all_have_time(deadline: Deadline, step_s: float, device: torch.device) -> bool:
    """Return whether every rank has time for another step; all must decide alike, or some would wait for a step that is not."""
    left = torch.tensor(float(deadline.has(step_s)), device=device)
    dist.all_reduce(left, dist.ReduceOp.MIN)
    return bool(left.item())


def _memory(device_type: str) -> dict[str, Any]:
    """Return peaks in bytes: of torch's allocator and symmetric memory on a GPU, of the process on a CPU."""
    if device_type == "cuda":
        from executor.symmetric import held_bytes  # noqa: PLC0415 - CUDA

        stats, beside = torch.cuda.memory_stats(), held_bytes()
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() + beside,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() + beside,
            "allocated_bytes": stats.get("allocated_bytes.all.current", 0),
            "retries": stats.get("num_alloc_retries", 0),
        }
    return {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


if __name__ == "__main__":
    main()
