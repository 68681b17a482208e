"""Who may ask, and how often: host names, origins, tokens, rates."""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL_USER = "local"


class SameSite:
    """Refuse (403) requests whose Host is none of ours, or whose Origin is another site than that Host.

    A web page elsewhere whose name resolves to this machine (DNS rebinding) sends its own name as Host, and one that
    connects across sites its own Origin.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] in {"http", "websocket"} and not self._is_ours(Headers(scope=scope)):
            await _refuse(403, "this name or site may not ask this service", scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_ours(self, headers: Headers) -> bool:
        host = headers.get("host", "")
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        origin = headers.get("origin", f"http://{host}")
        return name in self._hosts and origin in {f"http://{host}", f"https://{host}"}


class Tokens:
    """The users who may ask, by token. Without any, everybody is `LOCAL_USER`."""

    def __init__(self, users: Mapping[str, str] | None) -> None:
        self._users = None if users is None else dict(users)

    def user(self, authorization: str | None) -> str | None:
        """Return the user of an Authorization header; None where it names nobody."""
        if self._users is None:
            return LOCAL_USER
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        given = hashlib.sha256(token.strip().encode()).hexdigest()
        found = None
        for user, digest in self._users.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(given, digest):
                found = user
        return found


class Rates:
    """How often each user may ask: `per_s` a second on average, twice as often for a moment."""

    def __init__(self, per_s: float) -> None:
        self._per_s, self._most = per_s, 2 * per_s
        self._left: dict[str, tuple[float, float]] = {}  # user -> (requests left, when that was)
        self._lock = threading.Lock()

    def wait_s(self, user: str) -> float:
        """Take a request of `user` and return 0, or return after how many seconds there will be one."""
        now = time.monotonic()
        with self._lock:
            left, then = self._left.get(user, (self._most, now))
            left = min(self._most, left + (now - then) * self._per_s)
            taken = left >= 1
            self._left[user] = (left - taken, now)
        return 0.0 if taken else (1 - left) / self._per_s


async def _refuse(status: int, message: str, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"error": {"message": message}}, status_code=status)(scope, receive, send)
