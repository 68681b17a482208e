"""Trials on this machine's GPUs in forked processes: what `tests/bench/tune_on_gpus.py` measures with.

The same steps as `planner apply` times, without its check of numbers and its profile, which take longer than the steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from planner.tune.candidates import Candidate
from planner.tune.trials import Chosen, Status, Trial
from simulator.config.model import Model
from simulator.config.plan import MESH_AXES
from simulator.config.workload import Workload
from tests.bench.fresh_pool import Pool, _end, _free_port, _read, _released, _tail, _wait, summary
from topology import codec

STATUSES = {"ok": Status.FINISHED, "out of memory": Status.OUT_OF_MEMORY, "failed": Status.FAILED}
NO_TIME = Status.OUT_OF_TIME


def _rank(rank: int, requests: list[dict[str, Any]], folder: str, port: int) -> None:
    from tests.bench.tune_worker import main

    main(rank, requests, folder, port)


@dataclass(slots=True, kw_only=True)
class PoolTrials:
    """Makes trials of one model and workload. `limit_s` bounds one plan, its start included."""

    pool: Pool
    model: Model
    workload: Workload
    folder: Path
    limit_s: float = 40.0
    number: int = 0
    starts_s: list[float] = field(default_factory=list)

    def start_s(self, candidate: Candidate) -> float:
        del candidate
        return median(self.starts_s) if self.starts_s else 9.0

    def steps(self) -> int:
        return 12

    def shares_start(self, one: Candidate, other: Candidate) -> bool:
        return all(getattr(one.plan, name) == getattr(other.plan, name) for name in (*MESH_AXES, "ep"))

    def run(self, plans: Sequence[tuple[Candidate, Chosen]], left_s: float) -> Iterator[Trial]:
        until, pending = time.monotonic() + left_s, list(plans)
        while pending and until - time.monotonic() > min(self.limit_s, 12.0):
            began = time.monotonic()
            ended, texts = self._start([one.plan for one, _ in pending], [one.runtime for one, _ in pending], until)
            took = time.monotonic() - began
            in_steps = [sum(said["measured"]["steps_s"]) if said.get("measured") else 0.0 for said in ended]
            self.starts_s.append(max(1.0, (took - sum(in_steps)) / max(1, len(ended))))
            for (candidate, chosen), said in zip(pending, ended, strict=False):
                yield self._trial(candidate, chosen, said, took / len(ended), texts)
            pending = pending[max(1, len(ended)) :]

    def _start(self, plans: Sequence[Any], runtimes: Sequence[Any], until: float) -> tuple[list[dict[str, Any]], str]:
        """Run plans of one mesh in one start; return what became of each that was begun, the failed one last."""
        self.number += 1
        folder = self.folder / f"start-{self.number:03d}"
        folder.mkdir(parents=True)
        requests = [
            {
                "gpus": plan.gpus,
                "device": self.pool.device,
                "environment": {},
                "model": codec.to_builtins(self.model),
                "workload": codec.to_builtins(self.workload),
                "plan": codec.to_builtins(plan),
                "runtime": codec.to_builtins(runtime),
            }
            for plan, runtime in zip(plans, runtimes, strict=True)
        ]
        port, world = _free_port(), plans[0].gpus
        limit = min(until, time.monotonic() + self.limit_s + 12.0 * (len(plans) - 1))
        limit_s = limit - time.monotonic()
        ranks = [
            self.pool.context.Process(target=_rank, args=(rank, requests, str(folder), port)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        timed_out = _wait(ranks, limit)
        _end(ranks)
        if self.pool.device == "cuda":
            _released()
        found = []
        logs = [_tail(folder / f"rank{rank}.log") for rank in range(world)]
        for number in range(len(plans)):
            said = [_read(folder / f"{number}.rank{rank}.json") for rank in range(world)]
            if not any(said):
                break
            found.append(summary(said, logs, limit_s if timed_out else None))
            if found[-1]["status"] != "ok":
                break
        return found or [{"status": "failed", "cause": "no rank began", "measured": None}], logs[0] if logs else ""

    def _trial(self, candidate: Candidate, chosen: Chosen, said: dict[str, Any], seconds: float, log: str) -> Trial:
        measured = said.get("measured") or {}
        cause = str(said.get("cause", ""))[:300]
        status = Status.TIMEOUT if cause.startswith("not over after") else STATUSES[said["status"]]
        return Trial(
            key=candidate.key,
            status=status,
            step_s=measured.get("step_s"),
            seconds=seconds,
            reserved_bytes=measured.get("reserved_bytes") or None,
            cause=cause or ("" if measured else log[-300:]),
            predicted_s=chosen.predicted_s,
            why=chosen.why,
        )
