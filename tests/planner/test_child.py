"""The planner's one way to start a process: budgets that are overrun, interrupts, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner import apply_process, child
from tests.planner.conftest import ROOT

WORKERS = str(ROOT / "tests" / "executor" / "workers")


@pytest.fixture(autouse=True)
def _workers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", WORKERS)


def run(module: str, *arguments: str, budget_s: float = 60.0, **more) -> int | None:
    return child.run(module, arguments, budget_s=budget_s, output=subprocess.DEVNULL, **more)


def test_the_code_of_a_process_comes_back() -> None:
    assert run("finish_worker") == 0
    assert run("die_worker", "exit", "7") == 7


def test_a_process_that_says_it_was_interrupted_was() -> None:
    with pytest.raises(KeyboardInterrupt):
        run("die_worker", "exit", "130")


def test_an_overrun_is_no_interrupt(monkeypatch) -> None:
    monkeypatch.setattr(child, "GRACE_S", 0.5)

    assert run("stubborn_worker", budget_s=1.0, late_s=0.0) is None


def test_an_overrun_is_reported_as_such_with_what_there_is(monkeypatch, tmp_path) -> None:
    """The executor took the signal for Ctrl-C and wrote `interrupted`; it was our deadline."""

    def overrun(*_arguments, **_settings) -> None:
        (tmp_path / "run.json").write_text('{"status": "interrupted", "exit_code": 130, "complete": false}')

    monkeypatch.setattr(child, "run", overrun)

    found = apply_process.run({}, tmp_path, 5.0, lambda _: None)

    assert (found["status"], found["exit_code"]) == ("overrun", 1)
    assert "did not end within its budget" in found["failure"]["message"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_stops_us_stops_what_we_started(number: int, tmp_path: Path) -> None:
    code = f"""
import subprocess
from planner import child
child.GRACE_S = 0.5
try:
    child.run("stubborn_worker", [], budget_s=60, output=open({str(tmp_path / "out")!r}, "wb"))
except KeyboardInterrupt:
    raise SystemExit(130)
"""
    ours = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    end = time.monotonic() + 60
    while time.monotonic() < end and "started" not in (
        (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""
    ):
        time.sleep(0.05)
    started = int(Path(f"/proc/{ours.pid}/task/{ours.pid}/children").read_text().split()[0])

    ours.send_signal(number)

    assert ours.wait(timeout=30) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(started, 0)
