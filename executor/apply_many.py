"""Several runs with one start: `python -m executor.apply_many --run REQUEST OUT [--run REQUEST OUT ...] --budget S`.

Plans of equal meshes share processes and process groups: starting those takes longer than a plan's steps. Each run has
its own directory and report, as `executor.apply_run` would have written them. A run that fails ends its processes; those
after it get new ones. What the budget has no time for is left without a report. Imports no torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from executor.apply_run import ENDING_S, GRACE_S, MODULE, environment, report, write_report
from executor.entry import stop_at_sigterm
from executor.gpu_watch import GpuWatch
from executor.launch import Launched, launch
from executor.legal import check
from executor.records import read_records
from executor.request import Request
from simulator.plan import MESH_AXES
from topology import codec
from topology.errors import PlannerError

LEAST_S = 20.0  # below which no processes are started


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run to be made: its request, the file that holds it, and the directory that it writes."""

    request: Request
    path: Path
    out: Path

    @property
    def records(self) -> Path:
        return self.out / "records"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; return 0 when every run finished, 1 when one did not, 2 for a plan we cannot run, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="executor.apply_many")
    parser.add_argument("--run", required=True, action="append", nargs=2, metavar=("REQUEST", "OUT"))
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for everything")
    options = parser.parse_args(argv)
    stop_at_sigterm()
    try:
        runs = [read_run(Path(request), Path(out)) for request, out in options.run]
        documents = run_many(runs, options.budget)
    except KeyboardInterrupt:
        return 130
    except PlannerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if len(documents) == len(runs) and not any(d["exit_code"] for d in documents) else 1


def read_run(path: Path, out: Path) -> Run:
    """Return the run of a request's file. Raises BadPlan or BadModel for what the executor cannot run."""
    request = codec.convert(codec.read_json(path), Request, where=str(path))
    check(request.plan, request.model, request.workload, request.runtime, device=request.device)
    return Run(request=request, path=path, out=out)


def run_many(
    runs: Sequence[Run], budget_s: float, told: Callable[[Run, dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Make the runs within `budget_s` seconds, write each one's `run.json`, and return these in the order made.

    `told` is called with each report when it is written: at the end of the processes that made it.
    """
    end = time.monotonic() + budget_s
    documents = []
    for batch in batches(runs):
        pending = list(batch)
        while pending and end - time.monotonic() > min(LEAST_S, 0.3 * budget_s):
            over, pending, made = _launch(pending, end - time.monotonic())
            for run, document in made:
                documents.append(document)
                if told is not None:
                    told(run, document)
            if over:
                return documents
    return documents


def batches(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs that can share processes, together, in the order of each batch's first: those of equal meshes.

    A communicator keeps the buffers of every connection that it ever opened, out of the allocator's reach, gigabytes
    after a few plans: who needs other groups starts with a GPU's whole memory. (Destroying the groups and joining anew
    ended processes by SIGSEGV in NCCL 2.28.)
    """
    found: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        plan = run.request.plan
        found.setdefault((run.request.device, *(getattr(plan, axis) for axis in MESH_AXES), plan.ep), []).append(run)
    return list(found.values())


def _launch(runs: list[Run], budget_s: float) -> tuple[bool, list[Run], list[tuple[Run, dict[str, Any]]]]:
    """Start processes for `runs`; return whether that was the end, the runs that still want new ones, and the reports."""
    first, ending = runs[0], min(ENDING_S, 0.3 * budget_s)
    for run in runs:
        run.records.mkdir(parents=True, exist_ok=True)
        for stale in (*run.records.glob("rank*"), *run.records.glob("flight*")):
            stale.unlink()
    arguments = [f"--until={time.time() + budget_s - ending:.3f}"]
    for run in runs:
        arguments += [f"--request={run.path}", f"--out={run.records}"]
    watch = GpuWatch()
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
    samples = watch.stop() if first.request.device == "cuda" else []
    made = []
    for index, run in enumerate(runs):
        took = _seconds(run)
        # The first that did not come to its end is the one that ended the processes.
        ended = done if took is None else _well(done, took)
        document = report(run.request, ended, run.records, arguments, samples)
        write_report(document, run.out / "run.json")
        made.append((run, document))
        if took is None:
            over = done.outcome in {"timeout", "interrupted"} or bool(done.survivors)
            return over, runs[index + 1 :], made
    return False, [], made


def _seconds(run: Run) -> float | None:
    """Return how long a run took on its slowest rank, or None where a rank did not come to its end."""
    took = 0.0
    for rank in range(run.request.plan.gpus):
        ends = [entry for entry in read_records(run.records / f"rank{rank}.jsonl") if entry["kind"] == "done"]
        if not ends:
            return None
        took = max(took, ends[-1]["seconds"])
    return took


def _well(done: Launched, seconds: float) -> Launched:
    return replace(done, outcome="finished", exit_code=0, seconds=seconds, failure=None, survivors=())


if __name__ == "__main__":
    raise SystemExit(main())
