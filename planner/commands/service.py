"""`planner service`: questions and runs as jobs over HTTP."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import platformdirs
import typer

from planner.io.explorer_server import environment
from planner.remote.settings import LOOPBACK, Settings
from topology import codec
from topology.errors import BadInput, UserError
from topology.units import GIB, MIB

NEEDS = ("fastapi", "uvicorn", "sqlalchemy", "alembic")
MODULE = "planner.service"


def service(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8600,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; others than loopback need --tokens.")] = (
        "127.0.0.1"
    ),
    database: Annotated[
        str | None,
        typer.Option(
            "--database", envvar="MESHWRIGHT_DATABASE", help="postgresql://user@host/name; default SQLite in --folder."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, max=1024, help="Jobs at a time; default the CPU cores.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where files of jobs are kept; default the user's data folder.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option("--tokens", help="File of users and tokens, `user:token` a line, for its owner only.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option("--allowed-host", help="Name by which the service may be asked; repeat it.")
    ] = None,
    time_limit: Annotated[float, typer.Option("--time-limit", min=1, help="Seconds that a question may take.")] = 600.0,
    memory: Annotated[float, typer.Option("--memory", min=0.5, help="GiB that a question may use.")] = 4.0,
    rate: Annotated[float, typer.Option("--rate", min=0.1, help="Jobs that a user may submit a second.")] = 100.0,
    keep_days: Annotated[float, typer.Option("--keep-days", min=0.01, help="Days that ended jobs are kept.")] = 30.0,
) -> None:
    """Answer questions and make runs for others: http://127.0.0.1:8600, described at /openapi.json.

    Every accepted job ends with a result or a stated failure, also when processes are killed. Listens on this machine only
    unless told otherwise. Ctrl-C ends it.
    """
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise UserError(
            f"the service needs {', '.join(missing)}",
            why="they are an optional part of meshwright",
            remedy="pip install 'meshwright[service]'",
        )
    users = None if tokens is None else read_tokens(tokens)
    if host not in LOOPBACK and users is None:
        raise UserError(
            f"--host {host} needs --tokens",
            why="others than the users of this machine could ask",
            remedy="write a file with lines user:token, chmod 600, and give it as --tokens",
        )
    place = folder or platformdirs.user_data_path("meshwright", appauthor=False) / "service"
    settings = Settings(
        folder=str(place.absolute()),
        host=host,
        port=port,
        database=database,
        workers=workers or os.cpu_count() or 1,
        users=users,
        allowed_hosts=tuple(allowed_host or ()),
        limit_s=time_limit,
        memory_bytes=int(memory * GIB),
        rate_per_s=rate,
        keep_days=keep_days,
    )
    # In the place of this process, so that what ends it ends the service.
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
