"""Access control: host names, origins, tokens, rates, and bodies that do not arrive."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from topology.units import in_mib

LOCAL_USER = "local"
ASKED_BELOW = "/v1/"  # paths that need a token
QUIET_S, BODY_S = 10.0, 120.0  # seconds between two parts of a body, and for all of it


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
            why = "this service answers requests of its own pages only, under its own host names"
            await _refuse(403, why, scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_ours(self, headers: Headers) -> bool:
        host = headers.get("host", "")
        try:
            asked = urlsplit(f"//{host}")
            name, _ = asked.hostname, asked.port
        except ValueError:
            return False
        if asked.netloc != host or "@" in host:  # more than a name and a port
            return False
        origin = headers.get("origin", f"http://{host}")
        return name in self._hosts and origin in {f"http://{host}", f"https://{host}"}


class Tokens:
    """The users who may ask, by token. Without tokens, everybody is `LOCAL_USER`."""

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
        for user, digest in self._users.items():  # compares with all, so that the time reveals nothing
            if hmac.compare_digest(given, digest):
                found = user
        return found


class Known:
    """Refuse (401) requests without a user's token before their bodies are read."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        asked = scope["type"] == "http" and scope["path"].startswith(ASKED_BELOW)
        if asked and self._tokens.user(Headers(scope=scope).get("authorization")) is None:
            about = {"detail": "a token is needed: Authorization: Bearer TOKEN"}
            await JSONResponse(about, status_code=401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, receive, send)


class WholeBodies:
    """End requests whose bodies stop arriving (408), and those with bodies larger than `most_bytes` (413)."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app = app
        self._most_bytes = most_bytes
        self._too_large = f"a request has at most {in_mib(most_bytes)}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = Headers(scope=scope).get("content-length", "")
        if stated.isdecimal() and int(stated) > self._most_bytes:
            await JSONResponse({"detail": self._too_large}, status_code=413)(scope, receive, send)
            return
        until: float | None = asyncio.get_running_loop().time() + BODY_S
        left = self._most_bytes

        async def timed() -> Message:
            nonlocal until, left
            if until is None:  # after the body, the only message is that the client has left
                return await receive()
            try:
                async with asyncio.timeout_at(min(until, asyncio.get_running_loop().time() + QUIET_S)):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, "the body of the request did not come", {"Connection": "close"}) from error
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, self._too_large, {"Connection": "close"})
            if not message.get("more_body"):
                until = None
            return message

        await self._app(scope, timed, send)


class Rates:
    """Rate limit per user: `per_s` requests a second on average, twice as many for a moment."""

    def __init__(self, per_s: float) -> None:
        self._per_s, self._most = per_s, 2 * per_s
        self._left: dict[str, tuple[float, float]] = {}  # user -> (requests left, at what time)
        self._lock = threading.Lock()

    def wait_s(self, user: str) -> float:
        """Take a request of `user` and return 0, or return the seconds until the next one is allowed."""
        now = time.monotonic()
        with self._lock:
            left, then = self._left.get(user, (self._most, now))
            left = min(self._most, left + (now - then) * self._per_s)
            taken = left >= 1
            self._left[user] = (left - taken, now)
        return 0.0 if taken else (1 - left) / self._per_s


async def _refuse(status: int, message: str, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"error": {"message": message}}, status_code=status)(scope, receive, send)
