"""Calibrate a machine: the jobs of a request, in order, on pools of ranks that are started once.

Started by `planner calibrate` in its own process, with a request that lists jobs, the most valuable first. Jobs that
need fewer GPUs than there are run at the same time on different ones if they do not disturb each other: host times are
measured while nothing reads clocks. Code is compiled during other measurements. Every sample is written to `--records`
at once, so a run that is stopped, killed or out of time leaves a valid profile with fewer samples; a job that fails or
does not end is recorded with its cause, and its pool is restarted. Never imports torch.
"""

from __future__ import annotations

import argparse
import getpass
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from executor.calibrate.rank_pool import RankPool, process_context, wait_for_answers
from executor.calibrate.rank_request import PoolRequest
from executor.launch.bytecode import compile_ahead, keep_bytecode
from executor.launch.local_ranks import loopback_environment
from executor.launch.process_exit import exit_code_of
from executor.launch.records import Deadline, Recorder
from executor.measure.measurement import (
    devices_to_measure,
    measurement_parser,
)
from simulator.runtimes.library import runtime_spec
from topology.codec import JsonObject, read_json, to_builtins
from topology.profile.samples import Provenance
from topology.versions import driver_version

POLL_S = 0.1
LIMIT_FACTOR, LIMIT_S = 3.0, 10.0  # a job's limit: a multiple of its expected seconds, plus some
COMPILE_LIMIT_S = 120.0
RESTLESS_S = 45.0  # from the beginning; later, hosts are measured even if something starts or compiles
MOST_STARTS = 3  # starts of a pool on the same GPUs
KEPT_S = 1.0  # seconds of the budget for ending

Job = JsonObject  # as in the request's JSON
Place = tuple[str, tuple[int, ...]]  # the kind of a pool, and its GPUs


def main(argv: list[str] | None = None) -> int:
    """Measure. Returns 0 when the jobs are done or time is over, 1 if nothing can be measured, 130 on Ctrl-C."""
    parser = measurement_parser("executor.calibrate.run")
    parser.add_argument("--request", required=True, help="JSON: {jobs: [{kind, name, ranks, seconds, items}]}")
    parser.add_argument("--records", required=True, help="JSON lines; what is there already is kept")
    parser.add_argument("--gpu-name", default="", help="catalogue name of the GPU")
    parser.add_argument("--command", default="", help="what the user typed, for the record")
    parser.add_argument("--text", default="")
    return exit_code_of(run, parser.parse_args(argv))


def run(options: argparse.Namespace) -> int:
    """Run the jobs. Raises ProbeError if there is no device, or other processes use the GPUs."""
    deadline = Deadline(options.budget)
    indices = [device.index for device in devices_to_measure(options)]
    recorder = Recorder(options.records)
    recorder.write("header", **to_builtins(header(options, len(indices))))
    keep_bytecode(os.environ)
    compiling = compile_ahead(os.environ)
    jobs = [Work(job) for job in read_json(options.request).get("jobs", []) if job["ranks"] <= len(indices)]
    with tempfile.TemporaryDirectory(prefix="meshwright-", ignore_cleanup_errors=True) as folder:
        scheduler = PoolScheduler(options, indices, Path(folder), recorder, deadline)
        try:
            scheduler.work(jobs)
        except KeyboardInterrupt:
            recorder.missing("interrupted", late=True)
            return 130
        finally:
            scheduler.close()
            if compiling is not None:
                compiling.kill()
                compiling.wait()
            recorder.write("header", seconds=options.budget - deadline.left_s)
            recorder.close()
    return 0


@dataclass(slots=True)
class Work:
    """A job and its progress. Code of compiled jobs is compiled while other jobs run."""

    job: Job
    compiling: bool = field(init=False)

    def __post_init__(self) -> None:
        self.compiling = self.compiled

    @property
    def items(self) -> list[Any]:
        return list(self.job.get("items", []))

    @property
    def name(self) -> str:
        return str(self.job["name"])

    @property
    def quiet(self) -> bool:
        """Whether it measures the host, which reading clocks would disturb."""
        return self.job["kind"] in {"host", "layers"}

    @property
    def use(self) -> str:
        """The kind of its pool: torchtitan changes its process, and pools that compile do so while others measure."""
        titan = any(runtime_spec(item["runtime"]["name"]).tools.layers == "torchtitan" for item in self.layers)
        return ("torchtitan" if titan else "own") + (" compiled" if self.compiled else "")

    @property
    def layers(self) -> list[Any]:
        return self.items if self.job["kind"] == "layers" else []

    @property
    def compiled(self) -> bool:
        return any(item["runtime"].get("compile") for item in self.layers)

    def limited(self, left_s: float, *, kind: str | None = None) -> Job:
        """Return the job as sent to its ranks, including the seconds after which it is ended."""
        most = COMPILE_LIMIT_S if kind == "compile" else LIMIT_FACTOR * float(self.job["seconds"]) + LIMIT_S
        return {**self.job, "kind": kind or self.job["kind"], "limit_s": max(0.1, min(most, left_s))}


class PoolScheduler:
    """Assigns jobs to pools, in order, and starts and ends pools."""

    def __init__(
        self, options: argparse.Namespace, indices: list[int], folder: Path, recorder: Recorder, deadline: Deadline
    ) -> None:
        self.options, self.indices, self.folder = options, indices, folder
        self.recorder, self.deadline, self.began = recorder, deadline, time.monotonic()
        self.context = process_context(environment(options.device))
        self.pools: dict[Place, RankPool] = {}
        self.starts: dict[Place, int] = {}
        self.running: dict[Place, Work] = {}
        self.compiling: dict[Place, Work] = {}
        self.done, self.total = 0, 0

    def work(self, jobs: list[Work]) -> None:
        """Do `jobs` until they are done or time is over."""
        waiting, self.total = list(jobs), len(jobs)
        while self.deadline.allows(KEPT_S):
            self._start_pools(waiting)
            self._hand_out(waiting)
            if not (self.running or self.compiling or any(map(self._in_time, waiting))):
                break
            wait_for_answers(list(self.pools.values()), POLL_S)
            self._collect(waiting)
        for job in [*self.running.values(), *self.compiling.values(), *waiting]:
            self.recorder.missing(f"{job.name}: out of time", late=True)

    def close(self) -> None:
        for pool in self.pools.values():
            pool.end()

    # --- who works where --------------------------------------------------------------------------------------------

    def _start_pools(self, waiting: Sequence[Work]) -> None:
        """Start the pools of all jobs at once, compiling ones first, since later that would disturb measurements of
        hosts.

        Of each kind and number of ranks there are no more pools than jobs.
        """
        counts = Counter((job.use, int(job.job["ranks"])) for job in waiting)
        for job in sorted(waiting, key=lambda job: not job.compiling):
            for place in self._places(job)[: counts[job.use, int(job.job["ranks"])]]:
                if place not in self.pools:
                    self._pool(place)

    def _places(self, job: Work) -> list[Place]:
        """Return the GPUs on which a job could run: neighbouring ones, starting at the first."""
        ranks = int(job.job["ranks"])
        starts = range(0, len(self.indices) - ranks + 1, ranks)
        places = [(job.use, tuple(range(start, start + ranks))) for start in starts]
        return places[:1] if job.compiled else places

    def _pool(self, place: Place) -> RankPool | None:
        """Return the pool at a place, started if there is none; None if it has been started too often."""
        pool = self.pools.get(place)
        if pool is not None and pool.state != "dead":
            return pool
        if self.starts.get(place, 0) >= MOST_STARTS:
            return None
        self.starts[place] = self.starts.get(place, 0) + 1
        folder = self.folder / f"{place[0].replace(' ', '_')}_{'_'.join(map(str, place[1]))}_{self.starts[place]}"
        self.pools[place] = RankPool(
            self.context,
            place[1],
            folder,
            PoolRequest(
                device=self.options.device,
                records=self.options.records,
                began=self.began,
                indices=tuple(self.indices),
                text=self.options.text,
            ),
        )
        return self.pools[place]

    def _hand_out(self, waiting: list[Work]) -> None:
        """Assign jobs to idle pools: in order, and none before an earlier one that waits for GPUs; compiling occupies
        no GPU.

        Hosts are not measured while others start or compile: on H200s the variation of steps of narrow layers was then
        as large as their median.
        """
        for job in [one for one in waiting if one.compiling]:
            place = self._places(job)[0]
            if place not in self.compiling and self._ready(place):
                waiting.remove(job)
                self.compiling[place] = job
                self.pools[place].give(job.limited(self.deadline.left_s, kind="compile"), COMPILE_LIMIT_S)
        busy = {gpu for _, gpus in self.running for gpu in gpus}
        quiet = {job.quiet for job in self.running.values()}
        restless = bool(self.compiling) or any(pool.state == "starting" for pool in self.pools.values())
        restless = (restless or any(job.compiling for job in waiting)) and time.monotonic() - self.began < RESTLESS_S
        for job in [one for one in waiting if not one.compiling]:
            if not self._in_time(job):
                continue
            if job.quiet and restless:
                continue
            if quiet and quiet != {job.quiet}:
                break
            here = [place for place in self._places(job) if place in self.pools]
            alive = [place for place in here if self._pool(place) is not None]
            if here and not alive:
                waiting.remove(job)
                self.recorder.missing(f"{job.name}: {self.pools[here[0]].cause}")
                continue
            free = next((place for place in alive if self._ready(place) and not busy & set(place[1])), None)
            if free is None and all(self.pools[place].state == "starting" for place in alive):
                continue
            if free is None:
                break
            waiting.remove(job)
            limited = job.limited(self.deadline.left_s)
            self.pools[free].give(limited, limited["limit_s"])
            self.running[free] = job
            busy |= set(free[1])
            quiet |= {job.quiet}

    def _in_time(self, job: Work) -> bool:
        return float(job.job["seconds"]) <= self.deadline.left_s - KEPT_S

    def _ready(self, place: Place) -> bool:
        pool = self._pool(place)
        return pool is not None and pool.state == "idle" and place not in self.running and place not in self.compiling

    # --- what they say ----------------------------------------------------------------------------------------------

    def _collect(self, waiting: list[Work]) -> None:
        for place, pool in list(self.pools.items()):
            if pool.state not in {"starting", "working"}:
                continue
            answers = pool.poll()
            failures = [answer for answer in answers if answer.get("failed")]
            if pool.state == "dead" and self.starts[place] == 1 and self._cannot_fork(pool):
                self.context = process_context(environment(self.options.device), "spawn")
            if pool.state == "dead" or (pool.state == "idle" and (place in self.running or place in self.compiling)):
                self._ended(place, pool, failures, waiting)

    def _ended(self, place: Place, pool: RankPool, failures: list[Job], waiting: list[Work]) -> None:
        """Record how a job ended. A pool that failed, other than by refusing a job, is restarted when it is needed
        again.
        """
        compiled = self.compiling.pop(place, None)
        job = compiled or self.running.pop(place, None)
        cause = pool.cause
        if pool.state == "idle" and cause and not all(answer.get("refused") for answer in failures):
            pool.end()
        if job is None:
            print(f"ranks on GPUs {place[1]} did not start: {cause}", file=sys.stderr, flush=True)
            return
        if compiled is not None and not cause:
            compiled.compiling = False
            waiting.insert(0, compiled)
            return
        self.done += 1
        if cause:
            self.recorder.missing(f"{job.name}: {cause}")
        outcome = f"failed: {cause}" if cause else f"{time.monotonic() - pool.began:.1f} s"
        passed_s = time.monotonic() - self.began
        print(f"{passed_s:6.1f} s  {self.done}/{self.total}  {job.name}: {outcome}", file=sys.stderr, flush=True)

    def _cannot_fork(self, pool: RankPool) -> bool:
        """Return whether a pool failed because its processes were forked, in which CUDA sometimes does not work."""
        return self.options.device == "cuda" and "fork" in pool.cause.lower()


def header(options: argparse.Namespace, gpus: int) -> Provenance:
    """Return the place and time of the samples; the workers add the versions of their libraries."""
    cuda = options.device == "cuda"
    return Provenance(
        machine=options.machine,
        gpu=options.gpu_name if cuda else "cpu",
        device=options.device,
        gpus=gpus,
        driver=(cuda and driver_version()) or "",
        versions={"python": sys.version.split()[0]},
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=options.command,
    )


def environment(device: str) -> dict[str, str]:
    """Return the ranks' environment: GPUs numbered as by nvidia-smi, loopback on one host, torchtitan's allocator."""
    added = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",  # workers of each rank, so that others can measure at the same time
    }
    # Compiled code is cached in torch's default folder, although ranks have temporary folders of their own.
    with suppress(KeyError, OSError):
        added["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get(
            "TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
        )
    if device == "cpu":
        added |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    else:
        added |= {"OMP_NUM_THREADS": "4"}
    return added | loopback_environment()


if __name__ == "__main__":
    raise SystemExit(main())
