"""`planner ui`: the explorer, in a browser on this machine."""

from __future__ import annotations

import signal
import subprocess
from typing import Annotated

import typer

from planner.io.explorer_server import require_free, require_installed, start, stop_server
from planner.remote.connect import connect
from planner.remote.settings import SERVER

PATIENCE_S = 5.0  # for a service that does not answer at the start


def ui(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1.")] = 8501,
    server: Annotated[
        str | None,
        typer.Option(
            "--server", metavar="URL", help="Search, run and tune on this service; its token is in MESHWRIGHT_TOKEN."
        ),
    ] = None,
) -> None:
    """Look at clusters, plans and runs in a browser: http://127.0.0.1:8501.

    Serves on this machine only, needs no GPU, and sends nothing anywhere but to the service of --server. Ctrl-C ends it.
    """
    require_installed()
    require_free(port)
    if server is not None:
        _require_service(server)
    explorer = start(port, None if server is None else {SERVER: server})
    asks = "" if server is None else f"\nservice   {server}"
    print(f"explorer  http://127.0.0.1:{port}{asks}\nCtrl-C ends it", flush=True)
    raise typer.Exit(_wait(explorer))


def _require_service(server: str) -> None:
    """Raise UserError or ServiceError where no service answers, or does not know the token."""
    with connect(server, patience_s=PATIENCE_S) as service:
        service.jobs(limit=1)


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
