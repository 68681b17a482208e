"""The explorer as a server for tests that need a browser."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(address: str, process: subprocess.Popen[str], timeout_s: float = 60.0) -> None:
    """Return once the server at `address` answers; raise when it ends or stays silent."""
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{address}/_stcore/health", timeout=1) as answer:  # noqa: S310 - our own address
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server does not answer")


@contextmanager
def running(environment: dict[str, str] | None = None) -> Iterator[str]:
    """Run `planner ui` and yield its address; it is gone afterwards."""
    with serving(environment) as (address, _):
        yield address


@contextmanager
def serving(environment: dict[str, str] | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `planner ui` and yield its address and its process; both are gone afterwards."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "planner", "ui", "--port", str(port)],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        text=True,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address, process)
        yield address, process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)
