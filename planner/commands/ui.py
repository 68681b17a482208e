"""`planner ui`: the explorer, in a browser on this machine."""

from __future__ import annotations

import signal
import subprocess
from typing import Annotated

import typer

from planner.io.explorer_server import require_free, require_installed, start, stop_server


def ui(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1.")] = 8501,
) -> None:
    """Look at clusters, plans and runs in a browser: http://127.0.0.1:8501.

    Serves on this machine only, sends nothing anywhere, needs no GPU. Ctrl-C ends it.
    """
    require_installed()
    require_free(port)
    server = start(port)
    print(f"explorer  http://127.0.0.1:{port}\nCtrl-C ends it", flush=True)
    raise typer.Exit(_wait(server))


def _wait(server: subprocess.Popen[bytes]) -> int:
    """Return the server's exit code; leave no server behind, however this process is asked to end."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        stop_server(server)
