"""The launcher: budgets, kills, first failures and orphans, with workers that need nothing but Python."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from executor.launch.local_ranks import (
    FORCED_VARIABLES,
    TAG,
    Rendezvous,
    _first_failure,
    child_environment,
    command,
    launch,
    tagged_processes,
)
from tests.waiting import wait_until

# Every process that these tests start carries this name, so that they count their own and nobody else's.
MARK = f"MESHWRIGHT_TEST_{uuid.uuid4().hex}"
WORKERS = {"PYTHONPATH": str(Path(__file__).parent / "workers"), MARK: "1"}
ROOT = Path(__file__).parents[2]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def plain(module: str, *arguments: str, budget_s: float = 20.0, **more):
    return launch(module, arguments, elastic=False, budget_s=budget_s, environment=WORKERS, **more)


def ours() -> list[int]:
    """Processes of this module's tests that still live."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if MARK in process.environ():
                found.append(process.pid)
    return found


def test_a_worker_that_ends_well(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")

    done = plain("finish_worker", "a b", "; rm -rf /tmp/nothing", "$HOME")

    assert done.ok, done.stderr_tail
    assert (done.outcome, done.exit_code, done.failure) == ("finished", 0, None)
    said = json.loads(done.stdout_tail)
    assert said["argv"] == ["a b", "; rm -rf /tmp/nothing", "$HOME"]
    assert said["env"] == {**FORCED_VARIABLES, "CUDA_DEVICE_MAX_CONNECTIONS": None}
    assert len(done.stderr_tail) <= 16 * 1024


def test_a_worker_that_hangs_is_gone_with_its_grandchild() -> None:
    started = time.monotonic()

    done = plain("hang_worker", budget_s=6.0, grace_s=0.5)

    assert done.outcome == "timeout"
    assert done.failure is None
    assert done.survivors == ()
    assert "started" in done.stdout_tail
    assert time.monotonic() - started < 15
    assert ours() == []


@pytest.mark.parametrize(
    ("how", "what", "code", "name"), [("exit", "7", 7, None), ("signal", "9", None, "SIGKILL"), ("raise", "x", 1, None)]
)
def test_a_worker_that_dies_is_named(how: str, what: str, code: int | None, name: str | None) -> None:
    done = plain("die_worker", how, what)

    assert done.outcome == "failed"
    assert done.failure is not None
    assert (done.failure.rank, done.failure.exit_code, done.failure.signal) == (0, code, name)
    if how == "raise":
        assert done.failure.message == "RuntimeError: x"


def test_a_module_that_does_not_exist() -> None:
    done = plain("no_such_worker")

    assert done.outcome == "failed"
    assert "no_such_worker" in done.failure.message


def test_what_a_finished_worker_leaves_behind_is_ended() -> None:
    done = plain("orphan_worker", grace_s=2.0)

    assert done.outcome == "finished"
    assert done.survivors == ()
    assert ours() == []


def test_output_is_kept_where_asked(tmp_path) -> None:
    plain("finish_worker", directory=tmp_path / "new" / "folder")

    assert (tmp_path / "new" / "folder" / "stdout.txt").read_text().startswith("{")


@pytest.mark.parametrize(
    "how", [{"ranks": 0}, {"ranks": 2, "elastic": False}, {"budget_s": 0.0}, {"budget_s": float("nan")}]
)
def test_calls_that_cannot_be_meant(how) -> None:
    with pytest.raises(ValueError, match=r"ranks|budget"):
        launch("finish_worker", **{"budget_s": 5.0, **how})


def test_ctrl_c_tidies_up() -> None:
    """SIGINT to the process that launches: the answer is `interrupted`, and nobody is left."""
    code = textwrap.dedent(
        f"""
        from executor.launch.local_ranks import launch
        done = launch("hang_worker", elastic=False, budget_s=60, grace_s=0.5, environment={WORKERS!r})
        print(done.outcome, done.survivors)
        raise SystemExit(130)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: len(ours()) >= 2)

    parent.send_signal(signal.SIGINT)
    out, _ = parent.communicate(timeout=20)

    assert (parent.returncode, out.strip()) == (130, "interrupted ()")
    assert ours() == []


def test_a_second_ctrl_c_waits_no_longer() -> None:
    """The worker ignores SIGTERM, and the grace would be a minute and a half."""
    code = textwrap.dedent(
        f"""
        from executor.launch.local_ranks import launch
        done = launch("hang_worker", elastic=False, budget_s=300, grace_s=90, environment={WORKERS!r})
        print(done.outcome, done.survivors)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: len(ours()) >= 2)

    parent.send_signal(signal.SIGINT)
    time.sleep(0.5)
    parent.send_signal(signal.SIGINT)
    out, _ = parent.communicate(timeout=45)

    assert out.strip() == "interrupted ()"
    assert ours() == []


def test_a_killed_launcher_takes_its_worker_along() -> None:
    """Nobody can tidy up after SIGKILL, so the kernel tells the worker that its parent died."""
    code = f"""
from executor.launch.local_ranks import launch
launch("die_worker", ["exit", "0", "never"], elastic=False, budget_s=60, environment={WORKERS!r})
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_until(lambda: any("die_worker" in psutil.Process(pid).cmdline() for pid in ours()))

    parent.kill()
    parent.wait(timeout=10)

    wait_until(lambda: ours() == [])


def test_family_is_found_by_its_tag_only() -> None:
    environment = {**os.environ, TAG: "meshwright-test-a"}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)
    try:
        wait_until(lambda: [found.pid for found in tagged_processes("meshwright-test-a")] == [child.pid])
        assert tagged_processes("meshwright-test") == []
        assert tagged_processes("meshwright-test-b") == []
    finally:
        child.kill()
        child.wait()
    assert tagged_processes("meshwright-test-a") == []


def test_the_command_of_several_nodes_is_torchruns_agent() -> None:
    nodes = Rendezvous(count=2, endpoint="127.0.0.1:1", run_id="id")
    got = command("a.module", ["--x=1"], ranks=4, elastic=True, logs=Path("logs"), nodes=nodes)

    assert got[:4] == [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    assert "--nproc-per-node=4" in got
    assert "--rdzv-id=id" in got
    assert got[-3:] == ["-m", "a.module", "--x=1"]


def test_the_callers_path_stays_behind_ours() -> None:
    got = child_environment({"A": "b"}, run_id="r", base={"PYTHONPATH": "/elsewhere"})

    assert got["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/elsewhere"]
    assert got["A"] == "b"
    assert got["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize(
    ("given", "compiled", "kept"),
    [
        ({"PYTHONDONTWRITEBYTECODE": "1"}, False, {"PYTHONPYCACHEPREFIX": "/cache/meshwright/bytecode"}),
        ({"PYTHONDONTWRITEBYTECODE": "1"}, True, {"PYTHONDONTWRITEBYTECODE": "1"}),
        ({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/own"}, False, {"PYTHONPYCACHEPREFIX": "/own"}),
        ({}, False, {}),
    ],
)
def test_ranks_do_not_compile_torch_at_every_start(monkeypatch, given, compiled: bool, kept) -> None:
    """Unless its bytecode is there, or the user has said where it goes."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setattr("executor.launch.bytecode._compiled", lambda _: compiled)

    got = child_environment(None, run_id="r", base=given)

    assert kept.items() <= got.items()
    assert ("PYTHONPYCACHEPREFIX" in got) == ("PYTHONPYCACHEPREFIX" in kept)


def test_a_rank_that_is_alone_starts_without_the_agent_and_is_named_as_by_it() -> None:
    done = launch("die_worker", ["signal", "9", "0"], ranks=1, budget_s=60, environment=WORKERS)

    assert done.outcome == "failed"
    assert (done.failure.rank, done.failure.signal) == (0, "SIGKILL"), done.stderr_tail
    assert "Root Cause" not in done.stderr_tail


@pytest.mark.nightly  # so end those of test_apply_on_cpu.py
@needs_torch
def test_elastic_ranks_that_end_well() -> None:
    done = launch("finish_worker", ranks=2, budget_s=60, environment=WORKERS)

    assert done.ok, done.stderr_tail


@pytest.mark.nightly  # so does the report of test_apply_faults.py
@needs_torch
def test_elastic_names_the_rank_that_was_killed() -> None:
    done = launch("die_worker", ["signal", "9", "1"], ranks=2, budget_s=60, environment=WORKERS)

    assert done.outcome == "failed"
    assert (done.failure.rank, done.failure.signal) == (1, "SIGKILL"), done.stderr_tail
    assert done.seconds < 50
    assert ours() == []


def test_a_kill_goes_before_the_complaint_of_those_who_lost_their_peer(tmp_path) -> None:
    """The agent's summary, as torch 2.13 prints it, when it noticed the complaint first."""
    text = """
Failures:
[1]:
  time      : 2026-01-01_00:00:01
  host      : here
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 8)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 8
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : here
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 7)
  error_file: /x/0/error.json
  traceback : RuntimeError: connection closed by peer
"""
    found = _first_failure(tmp_path, 1, text, elastic=True)
    assert (found.rank, found.signal) == (1, "SIGKILL")

    stopped_later = text.replace("exitcode  : -9", "exitcode  : -15")  # by the agent
    found = _first_failure(tmp_path, 1, stopped_later, elastic=True)
    assert (found.rank, found.exit_code) == (0, 1)

    found = _first_failure(tmp_path, 1, stopped_later.replace("00:00:01", "00:00:00"), elastic=True)  # by somebody else
    assert (found.rank, found.signal, found.message) == (1, "SIGTERM", "the process was ended by SIGTERM")


def test_a_killed_agent_is_the_cause_and_not_what_was_printed_last(tmp_path) -> None:
    found = _first_failure(tmp_path, -9, "[W1122] Warning: this variable is deprecated", elastic=True)

    assert (found.rank, found.signal) == (None, "SIGKILL")
    assert "agent" in found.message


@needs_torch
def test_no_rank_is_to_blame_for_a_limit_that_all_have(tmp_path) -> None:
    limit = "RuntimeError: [enforce fail at device.cc:186] rv != -1. -1 vs -1. Too many open files"
    for name, message in (("one", limit), ("other", "ValueError: mine")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "error.json").write_text(json.dumps({"message": {"message": message}}))
    found = _first_failure(tmp_path / "one", 1, "", elastic=False)

    assert (found.rank, found.message) == (None, limit)
    assert _first_failure(tmp_path / "other", 1, "", elastic=False).rank == 0


@needs_torch
def test_elastic_passes_on_what_a_rank_said() -> None:
    done = launch("recorded_worker", ranks=2, budget_s=60, environment=WORKERS)

    assert done.failure.rank == 1
    assert "rank one has had enough" in done.failure.message
    assert ours() == []


@needs_torch
def test_elastic_ranks_that_hang_are_ended_within_the_budget() -> None:
    done = launch("hang_worker", ranks=2, budget_s=8, grace_s=1.0, environment=WORKERS)

    assert done.outcome == "timeout"
    assert done.survivors == ()
    assert ours() == []
