"""One rank of trials that share a start: plans of equal meshes, built, warmed up and timed one after the other.

Forked from a server that has imported torch (tests/bench/fresh_pool.py), so that a start costs the groups and no imports. Each
plan's result is written when it is known; a plan that fails ends the processes, and the plans after it get new ones.
"""

from __future__ import annotations

import gc
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.calibrate.layers import own_step
from executor.launch.garbage_collection import PausedGarbageCollection
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from tests.bench import fresh_worker
from tests.bench.fresh_worker import FAILED, JOIN_S, OUT_OF_MEMORY, Report, _first_line, _synchronize, _timed, _warm_up
from topology import codec


def main(rank: int, requests: list[dict[str, Any]], folder: str, port: int) -> None:
    """Be rank `rank` of the trials `requests`, and end the process."""
    os.setsid()  # so that whoever kills this rank reaches what it started
    here = Path(folder)
    log = os.open(here / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    world = str(requests[0]["gpus"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **requests[0]["environment"]}
    fresh_worker.STEPS_S, fresh_worker.MOST_STEPS, fresh_worker.MORE_WARM_UP = 1.2, 15, 3
    cuda = requests[0]["device"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    report = Report(here / f"0.rank{rank}.json")
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
        for number, request in enumerate(requests):
            report = Report(here / f"{number}.rank{rank}.json")
            _measure(request, device, report)
            report.say("done", status="ok")
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
        code = 0
    except torch.OutOfMemoryError as error:
        report.say("ended", status="out of memory", cause=_first_line(error))
        code = OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001 - whatever it is, the report says it
        report.say("ended", status="failed", cause=f"{type(error).__name__}: {_first_line(error)}")
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = FAILED
    os._exit(code)  # other ranks may stand in a collective: no leaving in order


def _measure(request: dict[str, Any], device: torch.device, report: Report) -> None:
    report.say("building")
    step = own_step(
        codec.convert(request["model"], Model, where="request"),
        codec.convert(request["plan"], Plan, where="request"),
        codec.convert(request["workload"], Workload, where="request"),
        codec.convert(request["runtime"], Runtime, where="request"),
        device,
    )
    report.say("warming up")
    with PausedGarbageCollection():
        _warm_up(step, device)
        report.say("timing")
        _timed(step, device, report)
    _synchronize(device)
    dist.barrier()
