"""The planner's one way to start a process: budgets that are overrun, interrupts, and nobody left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.io import child
from planner.runs import apply_process
from tests.planner.conftest import ROOT
from tests.waiting import wait_until
from topology.errors import PlannerError
from topology.processes import alive, descendants

WORKERS = str(ROOT / "tests" / "executor" / "workers")


@pytest.fixture(autouse=True)
def _workers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", WORKERS)


def run(module: str, *arguments: str, budget_s: float = 60.0, **more) -> int | None:
    return child.run_module(module, arguments, budget_s=budget_s, output=subprocess.DEVNULL, **more)


def test_the_code_of_a_process_comes_back() -> None:
    assert run("finish_worker") == 0
    assert run("die_worker", "exit", "7") == 7


def test_a_process_that_says_it_was_interrupted_was() -> None:
    with pytest.raises(KeyboardInterrupt):
        run("die_worker", "exit", "130")


def test_an_overrun_is_no_interrupt(monkeypatch) -> None:
    monkeypatch.setattr(child, "GRACE_S", 0.5)

    assert run("stubborn_worker", budget_s=1.0, late_s=0.0) is None


def test_a_stopped_process_is_continued_in_time_to_end_itself() -> None:
    assert run("stop_worker", budget_s=2.0, late_s=60.0) == 5


def test_a_full_disk_is_named_where_nothing_could_be_reported(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(child, "run_module", lambda *_a, **_k: 1)
    monkeypatch.setattr(apply_process.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))

    with pytest.raises(PlannerError, match="no report") as caught:
        apply_process.run({}, tmp_path, 5.0, lambda _: None)

    assert "disk" in caught.value.why
    assert "full" in caught.value.why


def test_an_overrun_is_reported_as_such_with_what_there_is(monkeypatch, tmp_path) -> None:
    """The executor took the signal for Ctrl-C and wrote `interrupted`; it was our deadline."""

    def overrun(*_arguments, **_settings) -> None:
        (tmp_path / "run.json").write_text('{"status": "interrupted", "exit_code": 130, "complete": false}')

    monkeypatch.setattr(child, "run_module", overrun)

    found = apply_process.run({}, tmp_path, 5.0, lambda _: None)

    assert (found["status"], found["exit_code"]) == ("overrun", 1)
    assert "did not end within its budget" in found["failure"]["message"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_stops_us_stops_what_we_started(number: int, tmp_path: Path) -> None:
    code = f"""
import signal, subprocess
from planner.io import child
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may have had signals ignored
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
child.GRACE_S = 0.5
try:
    child.run_module("stubborn_worker", [], budget_s=60, output=open({str(tmp_path / "out")!r}, "wb"))
except KeyboardInterrupt:
    raise SystemExit(130)
"""
    ours = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    out = tmp_path / "out"
    wait_until(lambda: out.exists() and "started" in out.read_text(), 60)
    (started,) = descendants(ours.pid)

    ours.send_signal(number)

    assert ours.wait(timeout=30) == 130
    assert not alive(started)
