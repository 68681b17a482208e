"""`planner ui`: the explorer, in a browser on this machine."""

from __future__ import annotations

import signal
import subprocess

from click.exceptions import Exit

from planner.io.explorer_server import require_free, require_installed, start, stop_server
from planner.remote.connect import connect
from planner.remote.settings import SERVER
from planner.requests.tools import Ui

PATIENCE_S = 5.0  # seconds to wait for a service at the start


def ui(asked: Ui) -> None:
    """Print what `planner ui` answers."""
    require_installed("explorer", "ui", ("streamlit", "altair"))
    require_free(asked.port)
    if asked.server is not None:
        _require_service(asked.server)
    explorer = start(asked.port, None if asked.server is None else {SERVER: asked.server})
    asks = "" if asked.server is None else f"\nservice   {asked.server}"
    print(f"explorer  http://127.0.0.1:{asked.port}{asks}\nCtrl-C ends it", flush=True)
    raise Exit(_wait(explorer))


def _require_service(server: str) -> None:
    """Raise UserError or ServiceError where no service answers, or does not know the token."""
    with connect(server, patience_s=PATIENCE_S) as service:
        service.jobs(limit=1)


def _wait(server: subprocess.Popen[bytes]) -> int:
    """Return the server's exit code; end the server however this process ends."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        stop_server(server)
