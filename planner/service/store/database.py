"""The database of the service: SQLite in a file, or PostgreSQL by URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import filelock
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from topology.errors import PlannerError, UserError

WAIT_S = 10.0  # for another writer
MIGRATIONS = Path(__file__).parent / "migrations"
MIGRATION_LOCK = 7_245_117_330  # key of our advisory lock: any fixed number


def connect(url: str, folder: Path) -> Engine:
    """Return the engine of a database whose schema is up to date. Raises UserError for a URL that cannot be used.

    `folder` holds the lock that keeps two servers from changing an SQLite schema at once. Raises PlannerError when the
    database does not answer.
    """
    made = _engine(_url(url))
    try:
        if made.dialect.name == "sqlite":
            with filelock.FileLock(folder / "schema.lock", timeout=WAIT_S):
                _upgrade(made)
        else:
            _upgrade(made)
    except SQLAlchemyError as error:
        raise PlannerError(
            "the database of the service cannot be used",
            why=str(error.__cause__ or error).splitlines()[0],
            remedy="check --database, and that the server runs",
        ) from error
    return made


def _url(text_url: str) -> URL:
    try:
        url = make_url(text_url)
    except ArgumentError as error:
        raise UserError("--database is not a database URL", remedy="postgresql://user@host/name") from error
    if url.drivername in {"postgresql", "postgres"}:
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername not in {"sqlite", "postgresql+psycopg"}:
        raise UserError(
            f"--database is of kind {url.drivername}",
            why="known: sqlite, postgresql",
            remedy="postgresql://user@host/name",
        )
    return url


def _engine(url: URL) -> Engine:
    try:
        if url.drivername != "sqlite":
            # A connection that the server closed meanwhile is replaced before it is used.
            waits: dict[str, Any] = {"connect_timeout": int(WAIT_S), "options": "-c lock_timeout=10s"}
            return create_engine(url, pool_pre_ping=True, pool_size=10, max_overflow=30, connect_args=waits)
        made = create_engine(url, connect_args={"timeout": WAIT_S})
    except (NoSuchModuleError, ImportError) as error:
        raise UserError(
            "the driver of this database is missing", why=str(error), remedy="pip install 'meshwright[service]'"
        ) from error

    @event.listens_for(made, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions begin where `begin` below says so
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # an accepted job survives a loss of power
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(made, "begin")
    def begin(connection: Any) -> None:
        if connection.get_execution_options().get("reads") is not True:
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # writers take turns from their first statement on

    return made


def _upgrade(made: Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with made.begin() as connection:
        if made.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
