"""The store of runs: what is kept comes back, whoever else writes, and a store that fails loses nothing."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from dataclasses import replace

import pytest

from planner.io.plan_words import plan_in_words
from planner.runs.runs_store import damaged_runs, default_path, list_runs, read_run, remove, save_run
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from tests.planner.conftest import ROOT, TINY
from topology import codec
from topology.errors import BadInput, PlannerError, UserError


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


def test_the_empty_file_that_a_full_disk_leaves_is_no_store(store) -> None:
    store.parent.mkdir()
    store.touch()

    assert list_runs(store) == ()
    with pytest.raises(BadInput, match="no run"):
        read_run("abc", store)


def test_what_is_kept_comes_back(store, tmp_path) -> None:
    said = document()

    key = save_run(said, tmp_path, store)

    assert read_run(key, store) == said
    assert read_run(key[:6], store) == said
    (row,) = list_runs(store)
    assert (row.id, row.model, row.gpus, row.device, row.directory) == (key, "tiny", 8, "NVIDIA H200", str(tmp_path))
    assert (row.predicted_step_s, row.measured_step_s, row.measured_peak_bytes) == (1.5, 2.0, 2.5e9)
    assert row.step_error == pytest.approx(-0.25)
    assert row.memory_error == pytest.approx(0.2)


def test_what_was_not_measured_is_none(store) -> None:
    save_run({**document(step_s=None, status="failed"), "predicted": None}, "x", store)

    (row,) = list_runs(store)

    assert (row.status, row.complete, row.measured_step_s, row.predicted_step_s, row.step_error) == (
        "failed",
        False,
        None,
        None,
        None,
    )


def test_saving_a_run_twice_stores_it_once(store) -> None:
    assert save_run(document(), "old", store) == save_run(document(), "moved", store)
    assert [row.directory for row in list_runs(store)] == ["moved"]


def test_runs_come_newest_first(store) -> None:
    keys = [save_run(document(minute), "x", store) for minute in (3, 9, 5)]

    assert [row.id for row in list_runs(store)] == [keys[1], keys[2], keys[0]]
    assert [row.id for row in list_runs(store, limit=1)] == [keys[1]]


def test_an_id_that_fits_several_runs_is_refused(store) -> None:
    keys = [save_run(document(minute), "x", store) for minute in range(20)]
    shared = next(a[0] for i, a in enumerate(keys) for b in keys[:i] if a[0] == b[0])

    with pytest.raises(BadInput, match="runs begin with"):
        read_run(shared, store)
    for odd in ("", "%", "' OR 1=1 --", "../x"):
        with pytest.raises(BadInput):
            read_run(odd, store)


def writer(code: str, store, said: dict) -> subprocess.Popen:
    """Start a process that runs `code` with `said`, a report, and `store`."""
    head = "import json, resource, signal, sys\nfrom planner.runs.runs_store import save_run\n"
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
    code = "for turn in range(15):\n    save_run({**said, 'taken_at': f'{said[\"taken_at\"]} {turn}'}, 'x', store)\n"
    writers = [writer(code, store, document(minute)) for minute in range(3)]

    assert [process.wait(120) for process in writers] == [0] * 3
    assert len(list_runs(store)) == 45


def test_a_full_disk_is_told_and_harms_nothing(store) -> None:
    """A limit on the size of files stands for a full disk: the write fails in the middle."""
    key = save_run(document(), "x", store)
    large = {**document(1), "notes": ["x" * 20_000] * 100}
    code = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
from topology.errors import PlannerError
try:
    save_run(said, "x", store)
except PlannerError as error:
    print(error)
"""
    process = writer(code, store, large)

    assert "cannot be used" in process.stdout.read()
    assert process.wait(60) == 0
    assert [row.id for row in list_runs(store)] == [key]
    save_run(large, "x", store)
    assert len(list_runs(store)) == 2


def test_a_place_that_cannot_be_written_is_told(tmp_path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(PlannerError, match="cannot make"):
        save_run(document(), "x", tmp_path / "file" / "runs.sqlite3")
    with pytest.raises(PlannerError, match="cannot be used") as failed:
        save_run(document(), "x", tmp_path / "/".join(["d" * 200] * 3) / "runs.sqlite3")
    assert failed.value.remedy is not None
    assert "a shorter XDG_DATA_HOME" in failed.value.remedy


def test_a_broken_store_is_set_aside_and_a_newer_one_left_alone(store) -> None:
    rubbish = b"this is no database, but it is long enough to look like a file " * 40
    store.parent.mkdir()
    store.write_bytes(rubbish)
    with pytest.raises(PlannerError, match="cannot be used"):
        list_runs(store)

    said: list[str] = []
    key = save_run(document(), "x", store, tell=said.append)

    assert [run.id for run in list_runs(store)] == [key]
    aside = store.with_name(f"{store.name}.damaged-1")
    assert aside.read_bytes() == rubbish
    assert str(aside) in said[0]
    with sqlite3.connect(store) as other:
        other.execute("PRAGMA user_version = 9")
    with pytest.raises(PlannerError, match="schema 9"):
        list_runs(store)
    with pytest.raises(PlannerError, match="schema 9"):
        save_run(document(1), "x", store)


def test_the_store_lies_in_the_users_data_folder(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    assert default_path() == tmp_path / "meshwright" / "runs.sqlite3"


def test_a_plan_in_words() -> None:
    plan = Plan(pp=2, dp_shard=4, schedule="1F1B", virtual_stages=2, recompute="full", micro_batch_size=3)

    assert plan_in_words(codec.to_builtins(plan)) == ("fsdp 4 x pp 2, micro batch 3, recompute full, 1F1B x2")
    assert plan_in_words(codec.to_builtins(replace(plan, pp=1, dp_shard=1, virtual_stages=1, recompute="none"))) == (
        "one GPU, micro batch 3"
    )
    # What has no words of its own is named by its own name.
    assert plan_in_words(Plan(capacity_factor=1.5)) == "one GPU, micro batch 1, capacity factor 1.5"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("measured_step_s", "soon"),
        ("measured_step_s", float("inf")),
        ("measured_step_s", -1.0),
        ("gpus", "eight"),
        ("gpus", -8),
        ("model", b"\xff\x00"),
        ("model", "x" * 10_000),
        ("taken_at", b"7.5"),
        ("id", b"\xff"),
        ("id", None),
        ("id", ""),
        ("id", "../x"),
    ],
)
def test_a_damaged_row_is_named_left_out_and_removed(store, column, value) -> None:
    key, bad = save_run(document(), "x", store), save_run(document(1), "x", store)
    with sqlite3.connect(store) as other:
        other.execute(f"UPDATE runs SET {column} = ? WHERE id = ?", (value, bad))  # noqa: S608 - a test's own words

    assert [run.id for run in list_runs(store)] == [key]
    (damaged,) = damaged_runs(store)
    assert damaged.why
    if column != "id":
        assert damaged.id == bad
    assert remove(damaged.id, store) == damaged.id
    assert (damaged_runs(store), [run.id for run in list_runs(store)]) == ((), [key])


def test_text_that_is_no_utf_8_hides_no_other_run(store) -> None:
    key, bad = save_run(document(), "x", store), save_run(document(1), "x", store)
    with sqlite3.connect(store) as other:
        other.execute("UPDATE runs SET model = CAST(x'ff41' AS TEXT) WHERE id = ?", (bad,))

    assert {run.id for run in list_runs(store)} == {key, bad}


@pytest.mark.parametrize(
    "change",
    [
        {"plan": 7},
        {"plan": {"tp": -1}},
        {"workload": {"seq_len": "long", "global_batch_size": 8}},
        {"model": []},
        {"runtime": None},
        {"measured": {"step_s": {"median": "soon"}}},
        {"measured": {"step_s": [1]}},
        {"measured": {"step_s": {"median": -2.0}}},
        {"predicted": {"step_s": 3}},
        {"measured": {"memory_by_rank": [1, 2]}},
        {"taken_at": "x" * 10_000},
    ],
)
def test_a_report_that_cannot_be_one_is_not_kept(store, change) -> None:
    key = save_run(document(), "x", store)
    with pytest.raises(UserError) as caught:
        save_run({**document(1), **change}, "x", store)

    assert caught.value.exit_code == 2
    assert [run.id for run in list_runs(store)] == [key]


def test_a_run_is_removed_by_the_beginning_of_its_id(store) -> None:
    key = save_run(document(), "x", store)

    for odd in ("", "zz", "#99", "%"):
        with pytest.raises(BadInput, match="no run"):
            remove(odd, store)
    assert remove(key[:6], store) == key
    assert list_runs(store) == ()


def test_the_command_lists_past_a_damaged_run_and_removes_it(planner, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    key, bad = save_run(document(), "x"), save_run(document(1), "x")
    with sqlite3.connect(default_path()) as other:
        other.execute("UPDATE runs SET measured_step_s = 'soon' WHERE id = ?", (bad,))

    listed = planner("runs")
    assert (listed.returncode, bad in listed.stdout) == (0, False)
    assert f"run {bad} is damaged" in listed.stderr
    document_ = json.loads(planner("runs", "--json").stdout)
    assert [run["id"] for run in document_["runs"]] == [key]
    assert [run["id"] for run in document_["damaged"]] == [bad]
    assert "removed" in planner("runs", "--remove", bad).stderr
    assert planner("runs").stderr == ""
