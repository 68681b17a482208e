"""Trials by our executor: each plan is built and run for a few steps, by our own trainer or by torchtitan's.

The results of our own trainer are first compared with one process. Plans with equal meshes share one start of
processes. A failing run ends its processes, the kernel frees their memory, and the next run starts new ones. Reports
are kept where `planner runs` lists them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from planner.io import child
from planner.question.plan_file import plan_file
from planner.runs import runs_store
from planner.runs.planned_run import PlannedRun, cpu_run, cuda_run
from planner.runs.run_document import read_report
from planner.tune.candidates import Candidate
from planner.tune.runners.started_trials import StartedTrials, failed
from planner.tune.state import TrialStart
from planner.tune.trials import Chosen, Status, Trial
from simulator.config.plan import MESH_AXES
from topology import codec
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import PlannerError
from topology.health.diagnose import Health
from topology.readers.nvml import read_nvml

MODULE = "executor.run.apply_many"
START_S = {"cuda": 20.0, "cpu": 12.0}  # assumed start time until a trial on this machine has shown it
COMPILE_S = 30.0
LATE_S = 20.0
RELEASE_S, RELEASE_POLL_S = 20.0, 0.3  # seconds for the driver to free the memory of processes that ended


def _gpu_processes() -> set[int]:
    """Return the processes on this machine's GPUs, as reported by the driver."""
    return {pid for gpu in read_nvml().gpus for pid, _ in gpu.processes or ()}


@dataclass(slots=True, kw_only=True)
class ExecutorTrials(StartedTrials):
    """Runs plans here; `here` and `health` are the probed machine, None on a CPU."""

    LEAST_S = 20.0  # as in the executor

    device: str
    here: Cluster | None = None
    health: Health | None = None
    allow_busy: bool = False
    profiled: bool = False
    trainer: str = "own"  # `own`, or torchtitan: whose training step is run
    store: Path | None = None
    gpu_processes: Callable[[], set[int]] = _gpu_processes
    others: set[int] | None = None  # processes on the GPUs before the first trial
    compiled_s: list[float] = field(default_factory=list)  # as `starts_s`, of compiled plans

    def start_s(self, candidate: Candidate) -> float:
        compiled = self._compiles(candidate)
        if seen := self.compiled_s if compiled else self.starts_s:
            return median(seen)
        eager = median(self.starts_s) if self.starts_s else START_S[self.device]
        return eager + (COMPILE_S if compiled else 0.0)

    def _compiles(self, candidate: Candidate) -> bool:
        return candidate.runtime.compile and self.device == "cuda"

    def steps(self) -> int:
        return self.timed_steps + (3 if self.device == "cuda" else 1)

    def shares_start(self, one: Candidate, other: Candidate) -> bool:
        names = (*MESH_AXES, "ep", "placement")
        return all(getattr(one.plan, name) == getattr(other.plan, name) for name in names)

    def run(self, plans: Sequence[tuple[Candidate, Chosen]], left_s: float) -> Iterator[Trial]:
        if left_s < self.LEAST_S:
            return
        if self.device == "cuda" and self.others is None:
            self.others = self.gpu_processes()
        budget_s = min(left_s, self.limit_s * len(plans))
        begun, arguments = [], []
        for candidate, chosen in plans:
            trial = self.new_trial(candidate, chosen)
            folder = Path(trial.directory)
            try:
                request = self._request(candidate, budget_s)
            except PlannerError as error:  # a plan that cannot be run here does not end the tuning
                yield failed(trial, error)
                continue
            codec.write_text(folder / "request.json", codec.to_json(request) + "\n")
            self.began(TrialStart.now(trial))
            arguments += ["--run", str(folder / "request.json"), str(folder)]
            begun.append((candidate, trial))
        if not begun:
            return
        folders = [Path(trial.directory) for _, trial in begun]
        began, code, log = time.monotonic(), None, folders[0] / "executor.txt"
        with log.open("wb") as output:
            code = child.run_module(
                MODULE,
                [*arguments, f"--budget={budget_s:g}"],
                budget_s=budget_s,
                output=output,
                late_s=LATE_S,
                watch=lambda: self.tell(_phase(folders)),
            )
        took = time.monotonic() - began
        nothing = not any((folder / "run.json").is_file() for folder in folders)
        said = _last_line(log) if nothing and code is not None else ""
        trials = [self._ended(one, overran=code is None, cut=budget_s >= left_s, said=said) for _, one in begun]
        trials = self._with_start(trials, took, [candidate for candidate, _ in begun])
        if self.device == "cuda" and not self._released():
            held = f"its processes still held GPUs after {RELEASE_S:.0f} s"
            trials[-1] = replace(trials[-1], cause="; ".join(filter(None, (trials[-1].cause, held))))
        yield from trials

    def _released(self) -> bool:
        """Wait until no process of a trial is on a GPU; return whether that happened in time."""
        until = time.monotonic() + RELEASE_S
        while self.gpu_processes() - (self.others or set()):
            if time.monotonic() > until:
                return False
            time.sleep(RELEASE_POLL_S)
        return True

    def _request(self, candidate: Candidate, budget_s: float) -> JsonObject:
        """Return the executor's request. Raises PlannerError if the plan cannot run here."""
        question = replace(self.question, runtime=candidate.runtime)
        content = plan_file(question, candidate.plan, candidate.estimate)
        if self.device == "cpu" or self.here is None or self.health is None:
            run: PlannedRun = replace(cpu_run(content, None), predicted=codec.to_builtins(candidate.estimate))
        else:
            run = cuda_run(content, self.here, self.health, allow_busy=self.allow_busy)
        request = run.request(steps=self.timed_steps, budget_s=budget_s, own_table=False)
        return request | {"profile": self.profiled, "trainer": self.trainer}

    def _ended(self, trial: Trial, *, overran: bool, cut: bool, said: str) -> Trial:
        """Return the result of a run. `cut`: the tuning's budget ended it; `said`: why no run of its start has a
        report.
        """
        folder = Path(trial.directory)
        document = read_report(folder)
        if document is None:
            if said:
                return failed(trial, said)
            # An earlier run of the start, or this one, used up the time.
            hung = overran and not cut and any((folder / "records").glob("rank*"))
            if hung:
                return replace(trial, status=Status.TIMEOUT, cause="it did not end within its time")
            return replace(trial, status=Status.OUT_OF_TIME)
        try:
            document["id"] = runs_store.run_id(document)
            runs_store.save_run(document, folder, self.store, tell=self.tell)
        except PlannerError as error:
            self.tell(f"warning: {error}")
        found = reported(trial, document)
        if found.status is Status.OUT_OF_TIME and not cut:
            return replace(found, status=Status.TIMEOUT, cause=found.cause or "it did not end within its time")
        return found

    def _with_start(self, trials: Sequence[Trial], took_s: float, tried: Sequence[Candidate]) -> list[Trial]:
        """Return the trials with the seconds of their common start added to the first, and record the time of a start.

        It is recorded in full although these trials share it, since the next trial may need its own start.
        """
        start_s = max(0.0, took_s - sum(trial.seconds for trial in trials))
        for compiled, starts_s in ((False, self.starts_s), (True, self.compiled_s)):
            own_s = [
                trial.seconds - self.steps() * trial.step_s
                for trial, candidate in zip(trials, tried, strict=True)
                if trial.step_s and self._compiles(candidate) == compiled
            ]
            if own_s:
                starts_s.append(max(1.0, start_s + max(own_s)))
        return [replace(trials[0], seconds=trials[0].seconds + start_s), *trials[1:]]


def reported(trial: Trial, document: JsonObject) -> Trial:
    """Return the trial with the result in its run's report."""
    words = {status.value for status in Status}
    said = str(document["status"])
    status = Status(said) if said in words else Status.TIMEOUT if said == "overrun" else Status.FAILED
    measured = document.get("measured") or {}
    steps = measured.get("step_s") or {}
    taken, wanted = int(measured.get("steps") or 0), int(measured.get("steps_asked") or 0)
    # If most steps were made the run counts as measured even if time ended before the last.
    if status is Status.OUT_OF_TIME and taken >= max(3, wanted // 2):
        status = Status.FINISHED
    timed = status is Status.FINISHED and bool(steps.get("median"))
    held = [rank.get("peak_reserved_bytes") for rank in measured.get("memory_by_rank") or ()]
    return replace(
        trial,
        status=status if timed or status is not Status.FINISHED else Status.FAILED,
        step_s=float(steps["median"]) if timed else None,
        noise=float(steps.get("spread") or 0.0) / 2.56 / math.sqrt(max(1, taken)) if timed else 0.0,
        seconds=float(document.get("seconds") or 0.0),
        reserved_bytes=max((float(size) for size in held if size), default=None) if timed else None,
        cause=_cause(document.get("failure") or {}),
    )


def _cause(failure: JsonObject) -> str:
    who = "" if failure.get("rank") is None else f"rank {failure['rank']}: "
    words = " ".join(str(part) for part in (failure.get("signal"), failure.get("message")) if part)
    text = f"{who}{words}" if words else ""
    suspects = "; ".join((*(failure.get("gpus") or ()), *(failure.get("suspects") or ())))
    return " ".join(f"{text}{'; ' if text and suspects else ''}{suspects}".split())[:400]


def _phase(folders: Sequence[Path]) -> str:
    """Return the current phase of rank 0 of the latest run."""
    for folder in reversed(folders):
        try:
            beat = codec.read_json(folder / "records" / "rank0.beat")
        except PlannerError:
            continue
        if isinstance(beat, dict) and beat.get("phase"):
            return f"{folder.name}: {str(beat['phase'])[:80]}"
    return "starting processes"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ")[:400] if lines else "the executor ended without a word"
