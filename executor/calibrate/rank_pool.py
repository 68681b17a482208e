"""Pools of ranks: processes for one group of GPUs that are started once and measure one job after another.

Ranks are forked from a server that has imported torch (and torchtitan if installed) and never used a GPU, so that a
group starts in seconds, and one that hangs or fails can be ended alone. If forked processes cannot use the GPU, ranks
are new interpreters. Never imports torch. Jobs and answers are JSON over pipes.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from executor.calibrate.rank_request import PoolRequest, RankRequest
from executor.launch.local_ranks import FORCED_VARIABLES, REMOVED_VARIABLES, ROOT
from topology.codec import JsonObject, to_builtins, to_json

PRELOAD = ("executor.calibrate.rank",)
FAILED_S = 6.0  # seconds after the failure of one rank for the others to report theirs
START_S = 90.0  # seconds for a pool to join its process group, including the import of torch from a cold disk

Answer = JsonObject  # one JSON message of a pipe


def process_context(added: Mapping[str, str], start: str = "forkserver") -> Any:
    """Return how ranks are started, with `added` in their environment."""
    for name in REMOVED_VARIABLES:
        os.environ.pop(name, None)
    os.environ |= {**added, **FORCED_VARIABLES, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    inherited = os.environ.get("PYTHONPATH", "")
    if str(ROOT) not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), inherited)))
    context: Any = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(list(PRELOAD))
    return context


class RankPool:
    """The ranks on `gpus` (indices among the measured GPUs), one process each.

    A pool is `starting` until all ranks have joined, then `idle`, `working` on a job, or `dead` with a `cause`.
    """

    def __init__(self, context: Any, gpus: Sequence[int], folder: Path, options: PoolRequest) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.gpus, self.folder = tuple(gpus), folder
        self.state, self.cause = "starting", ""
        self.began = time.monotonic()
        self.until = self.began + START_S
        self._waiting = set(range(len(self.gpus)))
        self._failed_at: float | None = None
        self._ranks: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(len(self.gpus)):
            here, there = context.Pipe()
            request = RankRequest(**to_builtins(options), rank=rank, gpus=self.gpus, folder=str(folder))
            process = context.Process(target=_run_rank, args=(to_json(request), there))
            self._pipes.append(here)
            try:
                process.start()
            except (OSError, EOFError) as error:
                self._die(f"rank {rank} could not be started: {type(error).__name__} {error}")
                return
            there.close()
            self._ranks.append(process)

    @property
    def pipes(self) -> list[Connection]:
        """Pipes on which an answer may arrive."""
        return [self._pipes[rank] for rank in sorted(self._waiting)] if self.state != "dead" else []

    def give(self, job: Mapping[str, Any], limit_s: float) -> None:
        """Start a job on all ranks; it is ended after `limit_s`."""
        self.state, self.cause, self._failed_at = "working", "", None
        self.began = time.monotonic()
        self.until = self.began + limit_s
        self._waiting = set(range(len(self.gpus)))
        text = json.dumps(job).encode()
        try:
            for pipe in self._pipes:
                pipe.send_bytes(text)
        except OSError:
            self._die("a rank had ended")

    def poll(self) -> list[Answer]:
        """Return the answers of ranks since the last call; ends the pool if only some ranks failed, or time is over."""
        answers: list[Answer] = []
        for rank in sorted(self._waiting):
            pipe = self._pipes[rank]
            try:
                while rank in self._waiting and pipe.poll():
                    answer = json.loads(pipe.recv_bytes())
                    answers.append({**answer, "rank": rank})
                    self._note(rank, answer)
            except (EOFError, OSError, ValueError):
                self._die(f"rank {rank} ended{_tail(self.folder / f'rank{rank}.log')}")
                return answers
        now = time.monotonic()
        if self._waiting and self._failed_at is not None and now - self._failed_at > FAILED_S:
            self._die(self.cause or "one rank failed and the others waited for it")
        elif self._waiting and now > self.until:
            silent = f"no answer of ranks {sorted(self._waiting)} after {now - self.began:.0f} s"
            self._die(f"{silent}{_tail(self.folder / f'rank{min(self._waiting)}.log')}")
        elif not self._waiting and self.state in {"starting", "working"}:
            self.state = "idle"
        return answers

    def end(self) -> None:
        """End the ranks and all their processes; none needs an orderly exit."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.close()
        for process in self._ranks:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.is_alive():
                process.kill()
        for process in self._ranks:
            process.join(5.0)
        self.state = "dead"

    def _note(self, rank: int, answer: Answer) -> None:
        if answer.get("failed"):
            self.cause = self.cause or str(answer["failed"])
            self._failed_at = self._failed_at or time.monotonic()
        if answer.get("over"):
            self._waiting.discard(rank)

    def _die(self, cause: str) -> None:
        self.cause = cause
        self.end()


def wait_for_answers(pools: Sequence[RankPool], seconds: float) -> None:
    """Return when a rank has sent a message, or after `seconds`."""
    pipes = [pipe for pool in pools for pipe in pool.pipes]
    if pipes:
        multiprocessing.connection.wait(pipes, timeout=seconds)
    else:
        time.sleep(seconds)


def _run_rank(request: str, pipe: Connection) -> None:
    """Run as one rank: only here the module that imports torch is loaded."""
    from executor.calibrate.rank import main  # noqa: PLC0415 - imports torch, which whoever starts ranks needs not

    main(request, pipe)


def _tail(path: Path) -> str:
    """Return the last line of a rank's output that is not empty, as a cause."""
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return f": {lines[-1][:300]}" if lines else ""
