"""Owners are named only where the driver's process numbers are ours; a tree of processes ends as a whole."""

import getpass
import os
import subprocess
import sys
import time

import psutil
import pytest

from topology import processes
from topology.processes import HOST_PID_NAMESPACE, alive, descendants, end_tree, process_owner

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]); {STUBBORN}"


@pytest.fixture
def namespace(monkeypatch, tmp_path):
    def is_(text):
        link = tmp_path / "pid"
        link.symlink_to(text)
        monkeypatch.setattr(processes, "NAMESPACE", link)

    return is_


def test_on_the_host_the_owner_is_named(namespace):
    namespace(HOST_PID_NAMESPACE)

    assert process_owner(os.getpid()) == getpass.getuser()
    assert process_owner(2**22 + 1) is None


def test_in_a_container_nobody_is_accused(namespace):
    """Our process here is another one than the process of that number of the host."""
    namespace("pid:[4026532621]")

    assert process_owner(os.getpid()) is None


def test_without_a_process_table_nothing_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "NAMESPACE", tmp_path / "absent")

    assert process_owner(os.getpid()) is None


def test_a_tree_that_will_not_end_is_killed_whole():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.read(2)  # both ignore SIGTERM from here on
    (child,) = descendants(parent.pid)

    assert end_tree(parent, 0.5) == ()
    assert parent.returncode < 0
    assert not alive(child)


def test_a_process_that_ends_when_asked_is_not_waited_for():
    started = time.monotonic()
    sleeper = subprocess.Popen(["sleep", "600"])

    assert end_tree(sleeper, 60) == end_tree(sleeper, 60) == ()
    assert time.monotonic() - started < 30
    assert descendants(sleeper.pid) == []
    assert not psutil.pid_exists(sleeper.pid)
