"""Ranks of one gloo group on this machine, forked from a process that has imported torch: four start in the time of
one.

For tests of what ranks compute. Those of how ranks are started, watched and ended use `executor.launch`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from executor.launch.local_ranks import Failure, LaunchResult

PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.pipelining",
    "executor.parallel.parallelize",
    "executor.verify.plans",
    "executor.verify.overlap",
    "torch.export._trace",
    "tests.executor.sharding.ranks",
]


def start(work: Callable[..., None], ranks: int, *args: Any, budget_s: float = 240.0) -> None:
    """Call `work(*args)` on every rank, with torchrun's variables set; raise what a rank raised, or TimeoutError."""
    from torch import multiprocessing as torch_processes

    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    store = meeting_point()
    running = torch_processes.start_processes(
        _rank, (ranks, store.port, work, args), nprocs=ranks, join=False, start_method="forkserver"
    )
    end = time.monotonic() + budget_s
    try:
        while not running.join(timeout=max(0.0, end - time.monotonic())):
            if time.monotonic() > end:
                raise TimeoutError(f"{ranks} ranks have not ended within {budget_s:g} s")
    finally:
        for process in running.processes:
            process.kill()


def meeting_point() -> Any:
    """Return a store on a port that the system chose. It is held, for one that was only found free can be taken."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet_at(port: int) -> None:
    """Set the variables by which ranks meet at a store that somebody else holds, as torchrun's agent does."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def run_module(module: str, arguments: list[str], ranks: int, **limits: float) -> None:
    """Run a module of workers on every rank as torchrun would."""
    start(_run_module, ranks, module, arguments, **limits)


def launch(
    module: str, arguments: Sequence[str], *, ranks: int, budget_s: float, environment: Mapping[str, str], **_: Any
) -> LaunchResult:
    """Do what `executor.launch` does, without its agent: a rank that ends badly ends the others."""
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    started = time.monotonic()
    ended = LaunchResult(outcome="finished", exit_code=0, seconds=0.0, failure=None, stdout_tail="", stderr_tail="")
    try:
        start(_run_module, ranks, module, list(arguments), dict(environment), budget_s=budget_s)
    except (ProcessExitedException, ProcessRaisedException) as error:
        failed = Failure(rank=error.error_index, exit_code=1, signal=None, message=str(error))
        ended = replace(ended, outcome="failed", exit_code=1, failure=failed)
    return replace(ended, seconds=time.monotonic() - started)


def _run_module(module: str, arguments: list[str], environment: Mapping[str, str] | None = None) -> None:
    os.environ |= environment or {}
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")


def _rank(rank: int, ranks: int, port: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    import torch

    meet_at(port)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    work(*args)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch's threads can outlive the interpreter, which then aborts
