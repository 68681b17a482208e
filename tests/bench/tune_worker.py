"""One rank of trials that share a start: plans of equal meshes, built, warmed up and timed one after the other.

Forked from a server that has imported torch (tests/bench/fresh_pool.py), so that a start costs the groups and no
imports. Each plan's result is written when it is known; a plan that fails ends the processes, and the plans after it
get new ones.
"""

from __future__ import annotations

import gc
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
from tests.bench.fresh_worker import Report, _synchronize, _timed, _warm_up
from topology import codec


def main(rank: int, requests: list[dict[str, Any]], folder: str, port: int) -> None:
    """Be rank `rank` of the trials `requests`, and end the process."""
    fresh_worker.STEPS_S, fresh_worker.MOST_STEPS, fresh_worker.MORE_WARM_UP = 1.2, 15, 3

    def work(report: Report, device: torch.device) -> None:
        for number, request in enumerate(requests):
            report.begin(Path(folder) / f"{number}.rank{rank}.json")
            _measure(request, device, report)
            report.say("done", status="ok")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    fresh_worker.be_rank(rank, requests[0], Path(folder), port, f"0.rank{rank}.json", work)


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
