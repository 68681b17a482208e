"""Databases and servers for the tests of the service: SQLite, and a real PostgreSQL where this machine has one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.postgres import Server, binaries


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    found = binaries()
    if found is None:
        pytest.skip("no PostgreSQL server is installed: apt-get install postgresql")
    # A socket's path has at most 107 characters, so it is not below pytest's folder.
    with tempfile.TemporaryDirectory(prefix="mw-pg-") as folder:
        Path(folder).chmod(0o755)
        server = Server(folder=Path(folder) / "pg", bin=found)
        server.make()
        server.start()
        yield server
        server.stop("immediate")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.sqlite3'}"
    from sqlalchemy import create_engine, text

    server: Server = request.getfixturevalue("postgres")
    url = server.url.replace("postgresql:", "postgresql+psycopg:")
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return server.url
