"""A service as a process of its own, for tests and benches."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
PATIENT_S = 100.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Process:
    """A service's process; `start` it again after `kill`."""

    settings: Any
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    def start(self) -> None:
        before = {**os.environ, "PYTHONPATH": str(ROOT), **self.settings.environment()}
        command = [sys.executable, "-P", "-m", "planner.service"]
        self.process = subprocess.Popen(command, env=before, stdout=subprocess.DEVNULL)
        ends = time.monotonic() + PATIENT_S
        while time.monotonic() < ends:
            assert self.process.poll() is None, "the service ended"
            try:
                if httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError("the service is not ready")

    def workers(self) -> list[psutil.Process]:
        """Return the processes that answer, and the one that forks them."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        """Kill the server as `kill -9` does, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


@contextmanager
def service(folder: Path, **settings: Any) -> Iterator[Process]:
    """Run a service with short leases, and yield its process."""
    from planner.remote.settings import Settings

    reported = {"folder": str(folder), "port": free_port(), "workers": 2, "lease_s": 1.0, **settings}
    running = Process(settings=Settings(**reported))
    running.start()
    try:
        yield running
    finally:
        running.stop()
