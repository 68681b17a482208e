"""Start and end the server of the explorer, which is a separate process: nothing here imports streamlit or ui."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from topology.errors import PlannerError, UserError
from topology.processes import end_tree

ADDRESS = "127.0.0.1"
GRACE_S = 5.0  # seconds between terminating and killing the server


def require_installed(what: str, extra: str, packages: Sequence[str]) -> None:
    """Raise UserError when packages of an optional part are not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError(
            f"the {what} needs {', '.join(missing)}",
            why="they are an optional part of meshwright",
            remedy=f"pip install 'meshwright[{extra}]'",
        )


def require_free(port: int) -> None:
    """Raise UserError when the port is already in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used", why=error.strerror or str(error), remedy=f"planner ui --port {port + 1}"
            ) from error


def folder() -> Path:
    """Return the folder of the explorer, next to this package."""
    return Path(__file__).resolve().parents[2] / "ui"


def start(port: int, more: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start the server, with the variables `more`. It ends when its standard input is closed, so it never outlives this
    process.
    """
    return subprocess.Popen(command(port), env={**environment(), **(more or {})}, stdin=subprocess.PIPE)


def command(port: int) -> list[str]:
    """Return the argument list of the server. `-P` keeps modules of the current folder from being imported."""
    return [sys.executable, "-P", "-m", "ui.serve", str(port)]


def environment() -> dict[str, str]:
    """Return the server's environment: that of this process, with this repository on PYTHONPATH."""
    ours = str(folder().parent)
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{ours}{os.pathsep}{before}" if before else ours}


def stop_server(server: subprocess.Popen[bytes]) -> None:
    """Terminate the server and its children, and kill them after GRACE_S. Raises PlannerError if one survives."""
    for pid in end_tree(server, GRACE_S):
        raise PlannerError(f"process {pid} does not end", remedy=f"kill -9 {pid}")
