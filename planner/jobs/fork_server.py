"""Worker processes, forked from a server process that has imported what they need: a fork takes milliseconds and shares
memory.

The server is `python -P -m planner.jobs.fork_server MODULE`; MODULE.WORK has the functions of its workers. Its parent
sends requests over a socket, the server's standard input: to fork, with the worker's end of a pipe, or to report how a
worker ended. `multiprocessing` has such a server too, but it runs the main module again in every process, and under
Streamlit that is a page.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import psutil

from planner.io.explorer_server import environment
from planner.jobs.worker import serve
from topology.processes import alive

# Numerical libraries start a thread per core otherwise, in every process.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_FORK = -1  # requests a worker; any other number asks how that process ended
_RUNS = 1 << 30  # instead of an exit code
_NUMBER = struct.Struct("<i")
_TICK_S = 0.005


class Worker:
    """A worker process: `pipe` takes requests and has the messages of `planner.jobs.worker`."""

    def __init__(self, server: ForkServer, pid: int, pipe: Connection) -> None:
        self._server, self.pid, self.pipe = server, pid, pipe
        self._exit_code: int | None = None
        self._asking = threading.Lock()  # the server reports an exit code once, and several threads may ask

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that ended it; None while it runs."""
        with self._asking:
            if self._exit_code is None:
                self._exit_code = self._server.exit_code(self.pid)
            return self._exit_code

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code once there is one; None after `timeout_s`."""
        ends = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < ends:
            time.sleep(_TICK_S)
        return self._exit_code

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self.kill()
        self.wait(10.0)
        self.pipe.close()


class ForkServer:
    """The server process that forks workers, as seen by its parent. Raises OSError or EOFError if it has ended."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._turn = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "planner.jobs.fork_server", module],
                stdin=theirs.fileno(),
                stdout=2,
                env={**environment(), **ONE_THREAD},
                start_new_session=True,  # Ctrl-C is handled by the server, which ends its processes
            )

    def fork(self) -> Worker:
        here, there = Pipe()
        with there:
            try:
                return Worker(self, self._ask(_FORK, [there.fileno()]), here)
            except (OSError, EOFError):
                here.close()
                raise

    def exit_code(self, pid: int) -> int | None:
        try:
            code = self._ask(pid)
        except (OSError, EOFError):  # the server has ended
            code = _RUNS if _runs(pid) else -signal.SIGKILL
        return None if code == _RUNS else code

    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process. Its workers end on their own."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, number: int, files: list[int] | None = None) -> int:
        with self._turn:
            socket.send_fds(self._socket, [_NUMBER.pack(number)], files or [])
            return _received(self._socket.recv(_NUMBER.size, socket.MSG_WAITALL))


def _runs(pid: int) -> bool:
    try:
        return alive(psutil.Process(pid))
    except psutil.Error:
        return False


def _received(said: bytes) -> int:
    if len(said) < _NUMBER.size:
        raise EOFError
    return int(_NUMBER.unpack(said)[0])


def main(module: str) -> None:
    """Fork workers until the parent has ended."""
    work = import_module(module).WORK
    gc.freeze()  # imports stay and are shared as long as they are not written to
    asked = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # no worker holds the other end
    with suppress(EOFError, ConnectionError):
        while True:
            said, files, _, _ = socket.recv_fds(asked, _NUMBER.size, 1)
            number = _received(said)
            if number != _FORK:
                asked.sendall(_NUMBER.pack(_exit_code(number)))
                continue
            pid = os.fork()
            if pid == 0:
                asked.close()
                os.setsid()  # a lower priority then applies to its session only
                serve(work, Connection(files[0]))
                os._exit(0)
            os.close(files[0])
            asked.sendall(_NUMBER.pack(pid))


def _exit_code(pid: int) -> int:
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0  # asked before
    return os.waitstatus_to_exitcode(status) if ended else _RUNS


if __name__ == "__main__":
    main(sys.argv[1])
