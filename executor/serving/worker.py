"""One rank of a serving run: check the numbers, then time steps and answer requests. Started by `executor.serving.run`.

Every record is written at once (`rank<r>.jsonl`), so that a run that ends early keeps what it measured.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from executor.gpu import symmetric_memory as symmetric
from executor.gpu.device import device_name
from executor.launch.records import WRONG_NUMBERS, Deadline, Recorder
from executor.measure.rank_group import every_rank_agrees, max_over_ranks
from executor.serving.cache import PagedCache, page_bytes, pages_of
from executor.serving.check import check
from executor.serving.decoder import ServedDecoder, Spread
from executor.serving.engine import Engine
from executor.serving.load import Server
from executor.serving.request import ServeRequest, require_served
from executor.serving.shared_broadcast import SharedBroadcast
from executor.serving.steps import StepTime, time_all_reduce, time_step
from simulator.serving.traffic import Request, Traffic
from topology import codec

CACHE_SHARE = 0.85  # share of the GPU memory left by weights; graphs and prompts use the rest
CPU_CACHE_TOKENS = 4096
WARM_UP = 8  # requests
SUMMED = (1, 8, 64)  # tokens


@record
def main(argv: Sequence[str] | None = None) -> None:
    """Run this rank. Exits with WRONG_NUMBERS if served scores differ from those of the training decoder."""
    parser = argparse.ArgumentParser(prog="executor.serving.worker")
    parser.add_argument("--request", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--until", type=float, default=float("inf"), help="begin nothing after this time (epoch seconds)"
    )
    options = parser.parse_args(argv)
    request = codec.convert(codec.read_json(options.request), ServeRequest, where=options.request)
    require_served(request)
    rank = int(os.environ["RANK"])
    recorder = Recorder(options.out / f"rank{rank}.jsonl")
    device = _device(request)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=request.start_timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    with torch.inference_mode():
        run(request, device, Deadline(options.until - time.time()), recorder)
    recorder.close()
    dist.destroy_process_group()


def run(request: ServeRequest, device: torch.device, deadline: Deadline, recorder: Recorder) -> None:
    """Check, then measure everything that is requested while there is time, the loads last."""
    began = time.perf_counter()
    alone = request.tp == 1
    spread = Spread() if alone else Spread(request.tp, dist.get_rank(), dist.group.WORLD)
    control = None if alone else dist.new_group(backend="gloo")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    recorder.write("versions", torch=torch.__version__, device=device_name(device))
    ways = []
    for way in _ways(request, device):
        try:
            verdict = check(request.model, spread, all_reduce=way, device=device, dtype=dtype, seed=request.seed)
        except symmetric.SymmetricMemoryError as error:  # fails on all ranks alike; NCCL still works
            recorder.missing(f"all-reduce {way}: {error}")
            continue
        recorder.write("checked", **asdict(verdict), ok=verdict.ok, after_s=time.perf_counter() - began)
        ways += [way] if verdict.ok else []
    if not ways:
        os._exit(WRONG_NUMBERS)  # unwinding would run collectives that other ranks may not enter
    engine = _engine(request, spread, device, dtype)
    recorder.write("built", pages=engine.cache.pages, after_s=time.perf_counter() - began, **_memory(device))
    for way in reversed(ways):  # the loads use the first all-reduce only
        engine.model.all_reduce = way
        engine.model.reserve(request.max_num_batched_tokens + request.max_num_seqs)
        engine.capture()
        recorder.write("captured", all_reduce=way, after_s=time.perf_counter() - began, **_memory(device))
        for shape in request.steps:
            if not _all_have_time(deadline, control):
                recorder.missing(f"{shape}, {way}", late=True)
                continue
            try:
                found: StepTime | str = time_step(engine, shape)
            except torch.OutOfMemoryError:
                found = f"{shape} needs more memory than there is"
                torch.cuda.empty_cache()
            if isinstance(found, str):
                recorder.missing(found)
            else:
                recorder.write("step", tp=request.tp, all_reduce=way, **asdict(found))
        if not alone:
            _time_sums(engine, way, deadline, control, recorder)
        if device.type == "cuda" and not alone:
            symmetric.check_delivered()
    broadcast = None if control is None else SharedBroadcast(control)
    for load in request.loads:
        if not _all_have_time(deadline, control):
            recorder.missing(f"load {load.name}", late=True)
            continue
        Server(engine, _warm_up(load.traffic), request.max_num_batched_tokens, broadcast, deadline).run()
        server = Server(engine, load.traffic, request.max_num_batched_tokens, broadcast, deadline)
        recorder.write("load", tp=request.tp, name=load.name, all_reduce=ways[0], **asdict(server.run()))
        if not server.batch.idle:  # time ran out before the rest, whose pages are still in use
            break
    recorder.write("done", after_s=time.perf_counter() - began)


def _time_sums(
    engine: Engine, way: str, deadline: Deadline, control: dist.ProcessGroup | None, recorder: Recorder
) -> None:
    """Time the sums over ranks for steps of a few sizes."""
    for tokens in sorted({min(size, engine.max_sequences) for size in SUMMED}):
        if _all_have_time(deadline, control):
            seconds = time_all_reduce(engine, tokens)
            recorder.write("sum", tp=engine.model.spread.ranks, all_reduce=way, tokens=tokens, seconds=seconds)


def _warm_up(traffic: Traffic) -> Traffic:
    """Return a few requests with the lengths of a load, since libraries choose kernels when they first see a shape."""
    few = traffic.draw()[:WARM_UP]
    return Traffic(
        prompt=traffic.prompt,
        output=traffic.output,
        trace=tuple(Request(0.0, request.prompt, min(4, request.output)) for request in few),
    )


def _ways(request: ServeRequest, device: torch.device) -> tuple[str, ...]:
    """Return the all-reduces to measure: our kernels need GPUs, and one rank needs none."""
    if request.tp == 1 or device.type != "cuda":
        return ("nccl",)
    return request.all_reduces


def _engine(request: ServeRequest, spread: Spread, device: torch.device, dtype: torch.dtype) -> Engine:
    model = ServedDecoder(
        request.model, spread, device=device, dtype=dtype, positions=request.max_model_len, seed=request.seed
    )
    pages = pages_of(request.cache_tokens or CPU_CACHE_TOKENS)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        most = int(free * CACHE_SHARE) // page_bytes(request.model.layers, model.heads, dtype)
        pages = min(pages, most) if request.cache_tokens else most
    (least,) = max_over_ranks([-pages], device=device)
    cache = PagedCache(request.model.layers, int(-least), model.heads, device=device, dtype=dtype)
    return Engine(model, cache, request.max_num_seqs, request.max_model_len)


def _all_have_time(deadline: Deadline, control: dist.ProcessGroup | None) -> bool:
    mine = deadline.left_s > 0
    return mine if control is None else every_rank_agrees(mine, group=control)


def _device(request: ServeRequest) -> torch.device:
    if request.device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", request.gpus[local] if request.gpus else local)
    torch.cuda.set_device(device)
    return device


def _memory(device: torch.device) -> dict[str, int]:
    return {"reserved_bytes": torch.cuda.memory_reserved(device)} if device.type == "cuda" else {}


if __name__ == "__main__":
    main()
