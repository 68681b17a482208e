"""The store of runs: what is kept comes back, whoever else writes, and a store that fails loses nothing."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from dataclasses import replace

import pytest

from planner.runs_store import default_path, keep, list_runs, plan_words, read_run
from simulator.plan import Plan
from simulator.runtime import Runtime
from simulator.workload import Workload
from tests.planner.conftest import ROOT, TINY
from topology import codec
from topology.errors import BadInput, PlannerError


def document(minute: int = 0, *, step_s: float | None = 2.0, status: str = "finished") -> dict:
    return json.loads(codec.to_json(_document(minute, step_s, status)))  # lists, not tuples


def _document(minute: int, step_s: float | None, status: str) -> dict:
    return {
        "schema_version": 1,
        "status": status,
        "complete": status == "finished",
        "taken_at": f"2026-01-01T00:{minute:02d}:00+00:00",
        "device": "cuda",
        "plan": codec.to_builtins(Plan(pp=2, dp_shard=4, schedule="1F1B")),
        "model": codec.to_builtins(TINY),
        "workload": codec.to_builtins(Workload(seq_len=64, global_batch_size=8)),
        "runtime": codec.to_builtins(Runtime()),
        "predicted": {"step_s": {"value": 1.5}, "memory": {"peak_bytes": {"value": 3.0e9}}},
        "measured": {
            "step_s": {"median": step_s} if step_s else None,
            "tokens_per_s": 7.0,
            "memory_by_rank": [{"peak_allocated_bytes": 2_000_000_000}, {"peak_allocated_bytes": 2_500_000_000}, {}],
        },
        "versions": {"device": "NVIDIA H200"},
    }


@pytest.fixture
def store(tmp_path):
    return tmp_path / "data" / "runs.sqlite3"


def test_no_store_is_no_runs(store) -> None:
    assert list_runs(store) == ()
    assert not store.exists()
    with pytest.raises(BadInput, match="no run"):
        read_run("abc", store)


def test_what_is_kept_comes_back(store, tmp_path) -> None:
    said = document()

    key = keep(said, tmp_path, store)

    assert read_run(key, store) == said
    assert read_run(key[:6], store) == said
    (row,) = list_runs(store)
    assert (row.id, row.model, row.gpus, row.device, row.directory) == (key, "tiny", 8, "NVIDIA H200", str(tmp_path))
    assert (row.predicted_step_s, row.measured_step_s, row.measured_peak_bytes) == (1.5, 2.0, 2.5e9)
    assert row.step_error == pytest.approx(-0.25)
    assert row.memory_error == pytest.approx(0.2)


def test_what_was_not_measured_is_none(store) -> None:
    keep({**document(step_s=None, status="failed"), "predicted": None}, "x", store)

    (row,) = list_runs(store)

    assert (row.status, row.complete, row.measured_step_s, row.predicted_step_s, row.step_error) == (
        "failed",
        False,
        None,
        None,
        None,
    )


def test_keeping_a_run_twice_keeps_it_once(store) -> None:
    assert keep(document(), "old", store) == keep(document(), "moved", store)
    assert [row.directory for row in list_runs(store)] == ["moved"]


def test_runs_come_newest_first(store) -> None:
    keys = [keep(document(minute), "x", store) for minute in (3, 9, 5)]

    assert [row.id for row in list_runs(store)] == [keys[1], keys[2], keys[0]]
    assert [row.id for row in list_runs(store, limit=1)] == [keys[1]]


def test_an_id_that_fits_several_runs_is_refused(store) -> None:
    keys = [keep(document(minute), "x", store) for minute in range(20)]
    shared = next(a[0] for i, a in enumerate(keys) for b in keys[:i] if a[0] == b[0])

    with pytest.raises(BadInput, match="runs begin with"):
        read_run(shared, store)
    for odd in ("", "%", "' OR 1=1 --", "../x"):
        with pytest.raises(BadInput):
            read_run(odd, store)


def writer(code: str, store, said: dict) -> subprocess.Popen:
    """Start a process that runs `code` with `said`, a report, and `store`."""
    head = "import json, resource, signal, sys\nfrom planner.runs_store import keep\n"
    head += "said, store = json.load(sys.stdin), sys.argv[1]\n"
    process = subprocess.Popen(
        [sys.executable, "-c", head + code, str(store)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    process.stdin.write(json.dumps(said))
    process.stdin.close()
    return process


def test_two_writers_lose_nothing(store) -> None:
    """Three processes keep fifteen runs each, at once."""
    code = "for turn in range(15):\n    keep({**said, 'taken_at': f'{said[\"taken_at\"]} {turn}'}, 'x', store)\n"
    writers = [writer(code, store, document(minute)) for minute in range(3)]

    assert [process.wait(120) for process in writers] == [0] * 3
    assert len(list_runs(store)) == 45


def test_a_full_disk_is_told_and_harms_nothing(store) -> None:
    """A limit on the size of files stands for a full disk: the write fails in the middle."""
    key = keep(document(), "x", store)
    large = {**document(1), "notes": "x" * 2_000_000}
    code = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
from topology.errors import PlannerError
try:
    keep(said, "x", store)
except PlannerError as error:
    print(error)
"""
    process = writer(code, store, large)

    assert "cannot be used" in process.stdout.read()
    assert process.wait(60) == 0
    assert [row.id for row in list_runs(store)] == [key]
    keep(large, "x", store)
    assert len(list_runs(store)) == 2


def test_a_place_that_cannot_be_written_is_told(tmp_path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(PlannerError, match="cannot make"):
        keep(document(), "x", tmp_path / "file" / "runs.sqlite3")


def test_a_broken_or_newer_store_is_told(store) -> None:
    store.parent.mkdir()
    store.write_bytes(b"this is no database, but it is long enough to look like a file " * 40)
    with pytest.raises(PlannerError, match="cannot be used"):
        list_runs(store)
    with pytest.raises(PlannerError, match="cannot be used"):
        keep(document(), "x", store)

    store.unlink()
    keep(document(), "x", store)
    with sqlite3.connect(store) as other:
        other.execute("PRAGMA user_version = 9")
    with pytest.raises(PlannerError, match="schema 9"):
        list_runs(store)
    with pytest.raises(PlannerError, match="schema 9"):
        keep(document(1), "x", store)


def test_the_store_lies_in_the_users_data_folder(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    assert default_path() == tmp_path / "meshwright" / "runs.sqlite3"


def test_a_plan_in_words() -> None:
    plan = Plan(pp=2, dp_shard=4, schedule="1F1B", virtual_stages=2, recompute="full", micro_batch_size=3)

    assert plan_words(codec.to_builtins(plan)) == (
        "pp 2 x dp_shard 4, 1F1B, 2 stages a rank, recompute full, micro batch 3"
    )
    assert plan_words(codec.to_builtins(replace(plan, pp=1, dp_shard=1, virtual_stages=1, recompute="none"))) == (
        "one GPU, micro batch 3"
    )
