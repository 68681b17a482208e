"""Run several plans: `python -m executor.run.apply_many --run REQUEST OUT [--run REQUEST OUT ...] --budget S`.

Plans of equal meshes share processes and process groups, whose start takes longer than a plan's steps. Each run has its
own directory and report, as written by `executor.run.apply`. A run that fails ends its processes, and later runs get
new ones. Runs for which no time is left get no report. Never imports torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from executor.gpu.monitor import GpuMonitor
from executor.launch.legal import check
from executor.launch.local_ranks import LaunchResult, launch
from executor.launch.process_exit import exit_code_of
from executor.launch.request import Request
from executor.run.apply import ENDING_S, GRACE_S, MODULE, environment, report, write_report
from executor.run.rank_records import RankRecords
from simulator.config.plan import MESH_AXES
from topology import codec
from topology.codec import JsonObject

MIN_LAUNCH_S = 20.0  # seconds below which no processes are started


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: its request, the request's file, and the output directory."""

    request: Request
    path: Path
    out: Path

    @property
    def records(self) -> Path:
        return self.out / "records"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; return 0 when every run finished, 1 when one did not, 2 for a plan we cannot run, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="executor.run.apply_many")
    parser.add_argument("--run", required=True, action="append", nargs=2, metavar=("REQUEST", "OUT"))
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for everything")
    return exit_code_of(_run_all, parser.parse_args(argv))


def _run_all(options: argparse.Namespace) -> int:
    runs = [read_run(Path(request), Path(out)) for request, out in options.run]
    documents = run_many(runs, options.budget)
    return 0 if len(documents) == len(runs) and not any(d["exit_code"] for d in documents) else 1


def read_run(path: Path, out: Path) -> Run:
    """Return the run of a request's file. Raises BadPlan or BadModel for what the executor cannot run."""
    request = codec.convert(codec.read_json(path), Request, where=str(path))
    if request.trainer == "own":  # the other framework reports itself what it cannot run
        check(request.plan, request.model, request.workload, request.runtime)
    return Run(request=request, path=path, out=out)


def run_many(
    runs: Sequence[Run], budget_s: float, on_report: Callable[[Run, JsonObject], None] | None = None
) -> list[JsonObject]:
    """Run all within `budget_s` seconds, write each `run.json`, and return the reports in order of execution.

    `on_report` is called with each report once it is written, after the processes of its batch have ended.
    """
    end = time.monotonic() + budget_s
    documents = []
    for batch in batches(runs):
        pending = list(batch)
        while pending and end - time.monotonic() > min(MIN_LAUNCH_S, 0.3 * budget_s):
            over, pending, made = _launch_batch(pending, end - time.monotonic())
            for run, document in made:
                documents.append(document)
                if on_report is not None:
                    on_report(run, document)
            if over:
                return documents
    return documents


def batches(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs in batches that share processes: runs with equal meshes, in the order of each batch's first run.

    A communicator keeps the buffers of every connection it ever opened outside of torch's allocator, gigabytes after a
    few plans, so plans that need other groups get new processes. (Destroying and recreating the groups crashed with
    SIGSEGV in NCCL 2.28.)
    """
    found: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        plan = run.request.plan
        found.setdefault((run.request.device, *(getattr(plan, axis) for axis in MESH_AXES), plan.ep), []).append(run)
    return list(found.values())


def _launch_batch(runs: list[Run], budget_s: float) -> tuple[bool, list[Run], list[tuple[Run, JsonObject]]]:
    """Start processes for `runs`; return (whether to stop, the runs that need new processes, the reports made)."""
    first, ending = runs[0], min(ENDING_S, 0.3 * budget_s)
    for run in runs:
        run.records.mkdir(parents=True, exist_ok=True)
        for stale in (*run.records.glob("rank*"), *run.records.glob("flight*")):
            stale.unlink()
    arguments = [f"--until={time.time() + budget_s - ending:.3f}"]
    for run in runs:
        arguments += [f"--request={run.path}", f"--out={run.records}"]
    watch = GpuMonitor()
    if first.request.device == "cuda":
        watch.start()
    done = launch(
        MODULE,
        arguments,
        ranks=first.request.plan.gpus,
        budget_s=max(1.0, budget_s - 0.5 * ending),
        grace_s=min(GRACE_S, 0.25 * ending),
        environment=environment(first.request, first.records),
        directory=first.out / "logs",
    )
    ended_at, began_at = time.time(), None
    samples = watch.stop() if first.request.device == "cuda" else []
    made = []
    for index, run in enumerate(runs):
        took = _seconds(run)
        # The first run that did not finish is the one that ended the processes. Its time starts where the run before
        # ended; only if there is none, it includes the start of the processes.
        own_s = done.seconds if began_at is None else max(0.0, ended_at - began_at)
        ended = replace(done, seconds=own_s) if took is None else _as_finished(done, took)
        over_at = float("inf") if took is None else (run.records / "rank0.jsonl").stat().st_mtime
        began_at = over_at
        faults = [fault for fault in watch.faults if fault.at <= over_at]  # those before the run count, too
        document = report(run.request, ended, run.records, arguments, samples, faults)
        write_report(document, run.out / "run.json")
        made.append((run, document))
        if took is None:
            over = done.outcome in {"timeout", "interrupted"} or bool(done.survivors)
            return over, runs[index + 1 :], made
    return False, [], made


def _seconds(run: Run) -> float | None:
    """Return the seconds of a run on its slowest rank, or None when a rank did not finish."""
    took = 0.0
    for rank in range(run.request.plan.gpus):
        ends = RankRecords.read(run.records / f"rank{rank}.jsonl").of("done")
        if not ends:
            return None
        took = max(took, ends[-1]["seconds"])
    return took


def _as_finished(done: LaunchResult, seconds: float) -> LaunchResult:
    return replace(done, outcome="finished", exit_code=0, seconds=seconds, failure=None, survivors=())


if __name__ == "__main__":
    raise SystemExit(main())
