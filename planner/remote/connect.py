"""Make a client of a service; the only module that imports httpx when needed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from topology.errors import UserError

if TYPE_CHECKING:
    from planner.remote.client import Client


def require_httpx() -> None:
    """Raise UserError if the extra `service` is not installed."""
    if find_spec("httpx") is None:
        raise UserError("--server needs httpx", remedy="pip install 'meshwright[service]'")


def connect(server: str, *, patience_s: float | None = None) -> Client:
    """Return a client that waits `patience_s` for a service that is away. Raises UserError where httpx is missing."""
    require_httpx()
    from planner.remote.client import PATIENCE_S, Client  # noqa: PLC0415 - needs the extra `service`

    return Client(server, patience_s=PATIENCE_S if patience_s is None else patience_s)
