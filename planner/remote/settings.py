"""The settings of `planner service`, passed to the server process in its environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from topology import codec

VARIABLE = "MESHWRIGHT_SERVICE"
SERVER = "MESHWRIGHT_SERVER"  # the service that an explorer uses; unset if it works by itself
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`database` is a URL; None is SQLite in `folder`. `users` has the SHA-256 of each user's token, by user.

    `programs` are those that a tuning's command may start; without this limit every user could run anything as the
    service's user. `rate_per_s` is the number of jobs that a user may submit per second, `limit_s` the time limit of a
    question.
    """

    folder: str
    host: str = "127.0.0.1"
    port: int = 8600
    database: str | None = None
    workers: int = 2
    users: dict[str, str] | None = None
    allowed_hosts: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    limit_s: float = 600.0
    memory_bytes: int = 4 << 30
    rate_per_s: float = 100.0
    most_waiting: int = 10_000
    keep_days: float = 30.0
    lease_s: float = 10.0

    @property
    def database_url(self) -> str:
        return self.database or f"sqlite:///{Path(self.folder) / 'service.sqlite3'}"

    def environment(self) -> dict[str, str]:
        """Return the variable with the settings. It has no tokens, but may contain a password in the database URL."""
        return {VARIABLE: codec.to_json(self, indent=None)}


def settings_of_environment() -> Settings:
    """Return the settings of this process, and remove them from its environment. Raises BadInput."""
    return codec.convert(codec.parse_json(os.environ.pop(VARIABLE, ""), where=VARIABLE), Settings, where=VARIABLE)
