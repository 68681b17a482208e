"""Pools of ranks: what becomes of a rank that fails, hangs or ends, and who works when on which GPUs.

Ranks here are processes that do as their job says; a real one is in tests/planner/test_calibrate.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from executor.calibrate import rank_pool as pools
from executor.calibrate import run as shop
from executor.calibrate.rank_pool import RankPool
from executor.calibrate.rank_request import PoolRequest
from executor.calibrate.run import PoolScheduler, Work
from executor.launch.records import Deadline, Recorder, read_records
from tests.waiting import wait_until

FORK = multiprocessing.get_context("fork")


def scripted_rank(request: str, pipe: Any) -> None:
    """Answer every job as it says for this rank, and note when."""
    me = json.loads(request)
    pipe.send_bytes(json.dumps({"over": True}).encode())
    while True:
        try:
            job = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        began = time.monotonic()
        time.sleep(job.get("takes", 0.0))
        what = job.get("does", {}).get(str(me["rank"]), "ends well")
        if what == "hangs":
            time.sleep(60)
        if what == "ends":
            os._exit(3)
        with (Path(me["records"]) if me["records"] else Path(me["folder"]) / "times").open("a") as file:
            line = {
                "kind": "missing",
                "what": json.dumps([job["name"], job["kind"], me["gpus"], began, time.monotonic()]),
            }
            file.write(json.dumps(line) + "\n")
        failed = {"failed": "RuntimeError: no", "refused": what == "refuses"} if what in {"fails", "refuses"} else {}
        pipe.send_bytes(json.dumps({**failed, "over": True}).encode())


class Scripted:
    """Stands for a context of multiprocessing: ranks are forked and follow the script."""

    Pipe = staticmethod(FORK.Pipe)

    @staticmethod
    def Process(target: object, args: tuple[Any, ...]) -> Any:  # noqa: N802 - as in multiprocessing
        return FORK.Process(target=scripted_rank, args=args)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "FAILED_S", 0.3)
    monkeypatch.setattr(pools.os, "killpg", os.kill)  # scripted ranks lead no group
    found = RankPool(Scripted(), (0, 1), tmp_path / "pool", PoolRequest())
    wait_until(lambda: found.poll() is not None and found.state == "idle")
    yield found
    found.end()


def outcome(pool: RankPool, limit_s: float = 5.0, **does: str) -> str:
    pool.give({"name": "n", "kind": "k", "does": {name[1:]: what for name, what in does.items()}}, limit_s)
    wait_until(lambda: pool.poll() is not None and pool.state != "working")
    return pool.state


def test_a_pool_does_one_job_after_another(pair: RankPool) -> None:
    assert outcome(pair) == outcome(pair) == "idle"
    assert pair.cause == ""


def test_ranks_that_all_fail_stay(pair: RankPool) -> None:
    assert outcome(pair, _0="fails", _1="fails") == "idle"
    assert "RuntimeError" in pair.cause
    assert outcome(pair) == "idle"
    assert pair.cause == "", "the next job has its own"


@pytest.mark.parametrize(
    ("does", "cause"),
    [
        ({"_0": "fails", "_1": "hangs"}, "RuntimeError"),
        ({"_1": "hangs"}, "no answer of ranks [1]"),
        ({"_0": "ends"}, "rank 0 ended"),
    ],
)
def test_a_pool_that_is_stuck_is_ended_with_its_cause(pair: RankPool, does: dict[str, str], cause: str) -> None:
    assert outcome(pair, 1.0, **does) == "dead"
    assert cause in pair.cause
    assert not any(process.is_alive() for process in pair._ranks)


def work(name: str, ranks: int = 1, kind: str = "operators", seconds: float = 0.1, **more: Any) -> Work:
    return Work({"name": name, "kind": kind, "ranks": ranks, "seconds": seconds, "items": [], **more})


@pytest.fixture
def done(tmp_path, monkeypatch):
    """Return what does jobs on four GPUs, and tells of each (kind, GPUs, begin, end), and what is missing."""
    monkeypatch.setattr(shop, "process_context", lambda *_: Scripted())
    monkeypatch.setattr(pools, "FAILED_S", 0.3)
    monkeypatch.setattr(pools.os, "killpg", os.kill)

    def do(jobs: list[Work], budget_s: float = 20.0) -> tuple[dict[str, Any], list[str]]:
        records = tmp_path / "records"
        options = Namespace(device="cpu", records=str(records), text="")
        here = PoolScheduler(options, [0, 1, 2, 3], tmp_path / "pools", Recorder(records), Deadline(budget_s))
        here.work(jobs)
        here.close()
        said = [record["what"] for record in read_records(records) if record["kind"] == "missing"]
        rows = [json.loads(what) for what in said if what.startswith("[")]
        return {name: rest for name, *rest in rows}, [what for what in said if not what.startswith("[")]

    return do


def together(one: list[Any], other: list[Any]) -> bool:
    return bool(one[2] < other[3] and other[2] < one[3])


def test_jobs_for_few_gpus_run_at_the_same_time_on_different_ones(done) -> None:
    made, missing = done([work(str(i), takes=0.8) for i in range(4)])

    assert sorted(gpus for _, gpus, *_ in made.values()) == [[0], [1], [2], [3]]
    assert all(together(one, other) for one in made.values() for other in made.values())
    assert not missing


def test_what_shows_the_host_is_not_measured_beside_what_reads_clocks(done) -> None:
    jobs = [work("a", takes=0.4), work("b", kind="layers", takes=0.4), work("c", kind="layers", takes=0.4)]

    made, _ = done(jobs)

    assert not together(made["a"], made["b"])
    assert made["b"][1] != made["c"][1]


def test_a_job_for_all_gpus_waits_and_is_not_overtaken(done) -> None:
    made, _ = done([work("a", takes=0.4), work("all", ranks=4, takes=0.2), work("b", takes=0.2)])

    assert made["a"][3] <= made["all"][2] + 0.01
    assert made["all"][1] == [0, 1, 2, 3]


def test_a_job_that_fails_is_recorded_and_the_rest_is_done(done) -> None:
    made, missing = done([work("bad", ranks=2, does={"0": "fails", "1": "hangs"}), work("good", ranks=2)])

    assert "good" in made
    assert any(what.startswith("bad: ") and "RuntimeError: no" in what for what in missing)


def test_what_does_not_fit_into_the_budget_is_told(done) -> None:
    made, missing = done([work("short"), work("long", seconds=100.0)], budget_s=10.0)

    assert "short" in made
    assert missing == ["long: out of time"]


def test_compiled_layers_are_compiled_before_and_beside(done) -> None:
    item = {"runtime": {"name": "torchtitan", "compile": True}}
    jobs = [work("compiled", kind="layers", items=[item]), work("other", kind="layers", takes=0.1)]

    made, missing = done(jobs)

    assert made["compiled"][0] == "layers", "compiling comes first and is the same job"
    assert not missing
