"""The server process: `python -m planner.service`, started by `planner service`."""

from __future__ import annotations

import asyncio
import socket
import sys

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from planner.io.output import warn
from planner.remote.settings import Settings, settings_of_environment
from planner.service.app import create_app
from topology.errors import PlannerError, UserError

KEEP_ALIVE_S = 30
HEAD_S = 10.0  # seconds for the head of a request


class _Timed(H11Protocol):
    """Closes connections whose request head does not arrive, or stops arriving."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        else:
            self._has_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # refused before the body, which may never arrive
            self._await_head()

    def _await_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def _has_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    """Prints its address once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            print(f"service  http://{host}:{self.config.port}\nCtrl-C ends it", flush=True)


def serve(settings: Settings) -> int:
    """Serve until asked to end; return the exit code. Raises UserError if its address cannot be used."""
    listening = _listening(settings)
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
        http=_Timed,
    )
    server = _Server(config)
    server.run(sockets=[listening])
    return 0 if server.started else 1


def _listening(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(
            f"cannot listen on {settings.host} port {settings.port}",
            why=error.strerror or str(error),
            remedy="planner service --port, for another one",
        ) from error


def main() -> int:
    """Serve with the settings in the environment."""
    try:
        return serve(settings_of_environment())
    except PlannerError as error:
        warn(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
