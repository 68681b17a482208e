"""One rank of a run: check the numbers, then run steps and time them. Started by `executor.run.apply`.

Every record is written at once (`rank<r>.jsonl`), so that an incomplete run keeps its records. Several requests with
the same number of ranks can run one after the other (`executor.run.apply_many`), since starting processes takes longer
than a plan's steps.
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

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from executor.gpu import symmetric_memory as symmetric
from executor.gpu.device import device_name, forget_compiled, synchronize
from executor.gpu.sm_clock import SmClock
from executor.launch.garbage_collection import PausedGarbageCollection
from executor.launch.heartbeat import Heartbeat
from executor.launch.records import OUT_OF_MEMORY, WRONG_NUMBERS, Deadline, Recorder
from executor.launch.request import Request
from executor.measure.profile_step import profile_step
from executor.measure.rank_group import every_rank_agrees
from executor.measure.torchtitan import TitanTrainer
from executor.model.shards import local_tensor
from executor.parallel.meshes import collectives_entered, describe_mesh, meshes_for, set_timeout
from executor.parallel.model_facts import read_model_facts
from executor.parallel.parallelize import Setup
from executor.parallel.train_step import Trainer
from executor.run.host_load import HostLoad
from executor.run.same_software import require_same_software
from executor.verify.checks import check_numbers
from topology import codec

PROFILE_S = 10.0
MAX_EXTRA_WARM_UP = 6  # at most so many steps, while the allocator's memory still grows by more than GROWTH_FACTOR
GROWTH_FACTOR = 1.002


@record
def main(argv: Sequence[str] | None = None) -> None:
    """Run this rank. Exits with OUT_OF_MEMORY when memory is full; with WRONG_NUMBERS at the end when numbers are
    wrong.

    A plan whose check fails on one rank fails on all, so the next request runs in the same processes.
    """
    parser = argparse.ArgumentParser(prog="executor.run.worker")
    parser.add_argument("--request", required=True, action="append", help="may be repeated, each with an --out")
    parser.add_argument("--out", required=True, action="append", type=Path)
    parser.add_argument("--until", type=float, default=float("inf"), help="run no step after this time (epoch seconds)")
    options = parser.parse_args(argv)
    deadline = Deadline(options.until - time.time())
    rank, right = int(os.environ["RANK"]), True
    for path, out in zip(options.request, options.out, strict=True):
        beat = Heartbeat(out, rank)
        recorder = Recorder(out / f"rank{rank}.jsonl")
        request = codec.convert(codec.read_json(path), Request, where=path)
        try:
            right &= run(request, deadline, recorder, beat, out)
        except BaseException as error:
            beat.mark_exited()
            if not _is_full_memory(error):
                raise
            recorder.write("out_of_memory", message=str(error)[:2000], phase=beat.phase, **_memory(request.device))
            recorder.close()
            # Exit at once: unwinding would run collectives that the other ranks never enter.
            os._exit(OUT_OF_MEMORY)
        recorder.close()
        beat.close()
        _release_memory(request.device)
    # Only after success: after a failure other ranks may have ended, and destroying the group would wait for them.
    dist.destroy_process_group()
    if not right:
        os._exit(WRONG_NUMBERS)


def run(request: Request, deadline: Deadline, recorder: Recorder, beat: Heartbeat, out: Path) -> bool:
    """Join the process group, verify, warm up and measure; return False if the numbers were wrong, in which case
    nothing is measured.
    """
    device = _device(request)
    if device.type == "cpu":
        torch.set_num_threads(1)
    beat.set_phase("joining the process group")
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=request.start_timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    return _run_in_group(request, device, deadline, recorder, beat, out)


def _run_in_group(
    request: Request, device: torch.device, deadline: Deadline, recorder: Recorder, beat: Heartbeat, out: Path
) -> bool:
    began = time.perf_counter()
    dist.barrier()  # the first collective: finds a missing rank under the short timeout
    require_same_software(device)
    recorder.write("versions", torch=torch.__version__, backend=dist.get_backend(), device=device_name(device))
    if not _all_have_time(deadline, 0.0, device):
        recorder.write("out_of_time", steps=0)
        recorder.write("timed")
        recorder.write("done", seconds=time.perf_counter() - began)
        return True
    trainer = (
        TitanTrainer(request, device)
        if request.trainer == "torchtitan"
        else _own_trainer(request, device, recorder, beat)
    )
    if trainer is None:
        dist.barrier()
        recorder.write("done", seconds=time.perf_counter() - began)
        return False
    parameters = sum(local_tensor(p).numel() for p in trainer.parameters()) if isinstance(trainer, Trainer) else None
    recorder.write("built", parameters_here=parameters, after_s=time.perf_counter() - began, **_memory(device.type))
    with PausedGarbageCollection() as collector:
        longest = _take_steps(request, trainer, device, deadline, recorder, beat, collector)
    recorder.write("timed")  # a failure after this loses the profiled step, not the measurement
    beat.set_phase("profiling a step")
    # Reading the profile takes seconds, so a step is profiled only if enough time is left.
    if request.profile and _all_have_time(deadline, 2 * longest + PROFILE_S, device):
        rank = dist.get_rank()
        last = request.warm_up + MAX_EXTRA_WARM_UP + request.steps
        path = out / f"rank{rank}.trace.json"
        why, operators = profile_step(lambda: trainer.step(last), device, path, rank=rank)
        if why:
            recorder.missing(f"profile: {why}")
        for sample in operators:
            recorder.write("operator", sample=sample)
    if isinstance(trainer, Trainer):
        recorder.write("effects", **codec.to_builtins(read_model_facts(trainer)))
    dist.barrier()
    recorder.write("done", seconds=time.perf_counter() - began)
    beat.set_phase("done")
    return True


def _own_trainer(request: Request, device: torch.device, recorder: Recorder, beat: Heartbeat) -> Trainer | None:
    """Build meshes, check the plan's numbers, and build the model; None if the numbers are wrong, so that it is never
    timed.
    """
    plan = request.plan
    beat.set_phase("building meshes")
    meshes = meshes_for(plan, device.type)
    mesh = describe_mesh(meshes, plan)
    recorder.write("mesh", **codec.to_builtins(mesh))
    if not mesh.as_requested:
        raise RuntimeError(f"torch's mesh is not the plan's: {mesh}")
    set_timeout(meshes, request.collective_timeout_s)
    beat.entered, beat.stack_tells_waiting = collectives_entered, device.type == "cpu"

    if not check_numbers(request, meshes, device, recorder, beat):
        return None

    beat.set_phase("building the model")
    return Trainer(
        Setup(
            plan=plan,
            model=request.model,
            workload=request.workload,
            runtime=request.runtime,
            meshes=meshes,
            device=device,
            seed=request.seed,
            own_table=request.own_table,
        )
    )


def _take_steps(
    request: Request,
    trainer: Trainer | TitanTrainer,
    device: torch.device,
    deadline: Deadline,
    recorder: Recorder,
    beat: Heartbeat,
    collector: PausedGarbageCollection,
) -> float:
    """Warm up, run the steps and record each; return the seconds of the longest.

    Warm-up is extended while the allocator still grows: experts get more tokens in some steps, and requests of memory
    from the driver are not a recurring cost of training.
    """
    longest, index, warm_up, reserved = 0.0, 0, request.warm_up, 0
    clock, load = SmClock(device), None
    while index < warm_up + request.steps:
        warm = index < warm_up
        beat.set_phase(f"{'warm-up ' if warm else ''}step {index if warm else index - warm_up}")
        collector.between_steps(index)
        if not _all_have_time(deadline, longest, device):
            recorder.write("out_of_time", steps=max(0, index - warm_up))
            break
        if index == warm_up:
            load = HostLoad()
        if index == warm_up and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.reset_accumulated_memory_stats(device)  # counts allocation retries
        synchronize(device)
        dist.barrier()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        clock.stamp()
        begin = time.perf_counter()
        for event in events[:1]:
            event.record()
        result = trainer.step(index)
        for event in events[1:]:
            event.record()
        synchronize(device)
        seconds = time.perf_counter() - begin
        clock.stamp()
        symmetric.check_delivered()  # a kernel whose wait timed out went on with incomplete data
        longest = max(longest, seconds)
        if not (math.isfinite(result.loss) and math.isfinite(result.gradient_norm)):
            # Equal on every rank, since both are sums over all ranks.
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
            **_peaks(trainer, device.type),
        )
        index += 1
        if index == warm_up and warm_up < request.warm_up + MAX_EXTRA_WARM_UP and device.type == "cuda":
            before, reserved = reserved, torch.cuda.memory_reserved(device)
            warm_up += not every_rank_agrees(reserved <= before * GROWTH_FACTOR, device=device)
        elif warm and device.type == "cuda":
            reserved = torch.cuda.memory_reserved(device)
    if clock.missing:
        recorder.missing(clock.missing)
    if load is not None:
        recorder.write("host", **load.since())
    return longest


def _peaks(trainer: Trainer | TitanTrainer, device_type: str) -> dict[str, int]:
    """Return peak memory; torchtitan's step resets torch's counter of reserved bytes, so its trainer keeps the peak."""
    found = _memory(device_type)
    if isinstance(trainer, TitanTrainer) and device_type == "cuda":
        found["peak_reserved_bytes"] = max(found["peak_reserved_bytes"], trainer.peak_reserved_bytes)
    return found


def _release_memory(device: str) -> None:
    """Release the memory of the last run, so that the next one starts like in a new process."""
    forget_compiled()
    symmetric.release()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _is_full_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation: a class of torch on a GPU, a message on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "can't allocate memory" in str(error) or "Cannot allocate memory" in str(error)


def _device(request: Request) -> torch.device:
    if request.device == "cpu":
        return torch.device("cpu")
    local, several = int(os.environ["LOCAL_RANK"]), os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]
    # On several nodes GPUs are numbered per node, and a rank takes the one of its local rank.
    index = local if several or not request.gpus else request.gpus[int(os.environ["RANK"])]
    seen = torch.cuda.device_count()
    if index >= seen:
        raise RuntimeError(
            f"{socket.gethostname()} shows {seen} GPUs to this job; the plan's rank here needs GPU {index}"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _all_have_time(deadline: Deadline, step_s: float, device: torch.device) -> bool:
    """Return whether every rank has time for another step; ranks that decided differently would wait forever."""
    return every_rank_agrees(deadline.allows(step_s), device=device)


def _memory(device_type: str) -> dict[str, int]:
    """Return peaks in bytes: of torch's allocator and symmetric memory on a GPU, of the process on a CPU."""
    if device_type == "cuda":
        stats, symmetric_bytes = torch.cuda.memory_stats(), symmetric.workspace_bytes()
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() + symmetric_bytes,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() + symmetric_bytes,
            "allocated_bytes": stats.get("allocated_bytes.all.current", 0),
            "retries": stats.get("num_alloc_retries", 0),
        }
    return {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


if __name__ == "__main__":
    main()
