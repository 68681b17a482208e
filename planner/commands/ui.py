"""`planner ui`: the explorer, in a browser on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import subprocess


def ui(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1.")] = 8501,
) -> None:
    """Look at clusters, plans and runs in a browser: http://127.0.0.1:8501.

    Serves on this machine only, sends nothing anywhere, needs no GPU. Ctrl-C ends it.
    """
    import subprocess  # noqa: PLC0415 - keeps `--help` light

    from planner.explorer import command, environment, require_free, require_installed  # noqa: PLC0415 - as above

    require_installed()
    require_free(port)
    server = subprocess.Popen(command(port), env=environment())
    print(f"explorer  http://127.0.0.1:{port}\nCtrl-C ends it", flush=True)
    raise typer.Exit(_wait(server))


def _wait(server: subprocess.Popen[bytes]) -> int:
    """Return the server's exit code; leave no server behind, however this process is asked to end."""
    import signal  # noqa: PLC0415 - keeps `--help` light

    from planner.explorer import end  # noqa: PLC0415 - as above

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        end(server)
