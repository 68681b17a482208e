"""`planner service`: questions and runs as jobs over HTTP."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from pathlib import Path

import platformdirs

from planner.io.explorer_server import environment, require_installed
from planner.remote.settings import LOOPBACK, Settings
from planner.requests.tools import Service
from topology import codec
from topology.errors import BadInput, UserError
from topology.units import GIB, MIB

NEEDS = ("fastapi", "uvicorn", "sqlalchemy", "alembic")
MODULE = "planner.service"


def service(asked: Service) -> None:
    """Print what `planner service` answers."""
    require_installed("service", "service", NEEDS)
    users = None if asked.tokens is None else read_tokens(asked.tokens)
    if asked.host not in LOOPBACK and users is None:
        raise UserError(
            f"--host {asked.host} needs --tokens",
            why="others than the users of this machine could ask",
            remedy="write a file with lines user:token, chmod 600, and give it as --tokens",
        )
    place = asked.folder or platformdirs.user_data_path("meshwright", appauthor=False) / "service"
    settings = Settings(
        folder=str(place.absolute()),
        host=asked.host,
        port=asked.port,
        database=asked.database,
        workers=asked.workers or os.cpu_count() or 1,
        users=users,
        allowed_hosts=tuple(asked.allowed_host or ()),
        programs=tuple(asked.allow_program or ()),
        limit_s=asked.time_limit,
        memory_bytes=int(asked.memory * GIB),
        rate_per_s=asked.rate,
        keep_days=asked.keep_days,
    )
    # Replace this process, so that a signal to it reaches the service.
    command = [sys.executable, "-P", "-m", MODULE]
    os.execve(command[0], command, {**environment(), **settings.environment()})  # noqa: S606 - an argument list of ours


def read_tokens(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each user's token. Raises BadInput; tokens are not repeated in its message."""
    if os.name == "posix" and path.is_file() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadInput(f"{path} can be read by others", why="it holds tokens", remedy=f"chmod 600 {path}")
    users = {}
    for number, line in enumerate(codec.read_text(path, max_bytes=MIB).splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        user, _, token = line.strip().partition(":")
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,63}", user) or len(token) < 16 or user in users:
            raise BadInput(
                f"line {number} of {path} is not user:token",
                why="a user is letters and digits, named once; a token has at least 16 characters",
                remedy="python3 -c 'import secrets; print(secrets.token_urlsafe(24))'",
            )
        users[user] = hashlib.sha256(token.encode()).hexdigest()
    if not users:
        raise BadInput(f"{path} names no user", remedy="add lines user:token")
    return users
