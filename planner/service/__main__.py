"""The server process: `python -m planner.service`, started by `planner service`."""

from __future__ import annotations

import socket
import sys

import uvicorn

from planner.io.output import warn
from planner.remote.settings import Settings, settings_of_environment
from planner.service.app import create_app
from topology.errors import PlannerError

KEEP_ALIVE_S = 30


class _Server(uvicorn.Server):
    """Says where it listens, once it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            print(f"service  http://{host}:{self.config.port}\nCtrl-C ends it", flush=True)


def serve(settings: Settings) -> int:
    """Serve until asked to end; return the exit code."""
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    server.run()
    return 0 if server.started else 1


def main() -> int:
    """Serve what the environment says."""
    try:
        return serve(settings_of_environment())
    except PlannerError as error:
        warn(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
