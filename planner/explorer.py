"""How the explorer's server is started and ended. It is a process of its own: nothing here imports streamlit or ui."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from topology.errors import PlannerError, UserError

ADDRESS = "127.0.0.1"
NEEDS = ("streamlit", "altair")
GRACE_S = 5.0  # between asking the server to end and making it


def require_installed() -> None:
    """Raise UserError when the packages of the explorer are not there."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise UserError(
            f"the explorer needs {' and '.join(missing)}",
            why="they are an optional part of meshwright",
            remedy="pip install 'meshwright[ui]'",
        )


def require_free(port: int) -> None:
    """Raise UserError when something listens on the port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used", why=error.strerror or str(error), remedy=f"planner ui --port {port + 1}"
            ) from error


def folder() -> Path:
    """Return where the explorer lies: beside this package."""
    return Path(__file__).resolve().parents[1] / "ui"


def command(port: int) -> list[str]:
    """Return the argument vector of the server. `-P`: modules of the folder it is started in are not ours."""
    place = folder()
    settings = tomllib.loads((place / "config.toml").read_text(encoding="utf-8"))
    start = [sys.executable, "-P", "-m", "ui.serve", "run", str(place / "app.py")]
    return [*start, "--server.port", str(port), *_flags(settings)]


def _flags(settings: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for key, value in settings.items():
        name = f"{section}.{key}" if section else key
        if isinstance(value, Mapping):
            yield from _flags(value, name)
        else:
            yield from (f"--{name}", value if isinstance(value, str) else json.dumps(value))


def environment() -> dict[str, str]:
    """Return the server's environment: this process's, with our packages found wherever it is started."""
    ours = str(folder().parent)
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{ours}{os.pathsep}{before}" if before else ours}


def end(server: subprocess.Popen[bytes]) -> None:
    """End the server: ask, wait, then make it. Raises PlannerError when it outlives even that."""
    if server.poll() is not None:
        return
    server.terminate()
    try:
        server.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        try:
            server.wait(GRACE_S)
        except subprocess.TimeoutExpired as error:
            raise PlannerError(f"process {server.pid} does not end", remedy=f"kill -9 {server.pid}") from error
