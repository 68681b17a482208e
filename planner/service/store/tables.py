"""The tables of the service. `migrations/` makes them; both are compared by a test."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

METADATA = MetaData()

JOBS = Table(
    "jobs",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("owner", String(100), nullable=False),  # the user who asked
    Column("command", String(32), nullable=False),
    Column("request", Text, nullable=False),  # JSON: values, and files by digest
    Column("digest", String(64), nullable=False),  # of the request
    Column("idempotency_key", String(255)),
    Column("state", String(16), nullable=False),
    Column("progress", Text, nullable=False),
    Column("created_s", Float, nullable=False),  # seconds since 1970 by the database's clock, as all times here
    Column("started_s", Float),
    Column("finished_s", Float),
    Column("server", String(64)),  # which server works on it
    Column("fence", Integer, nullable=False),  # number of its starts; writes with a lower number are refused
    Column("starts_left", Integer, nullable=False),
    Column("lease_until_s", Float),
    Column("exit_code", Integer),
    Column("result", Text),
    Column("error", Text),
    Column("said", Text, nullable=False),  # warnings
    Index("jobs_of_owner_by_key", "owner", "idempotency_key", unique=True),
    Index("jobs_by_state", "state", "created_s"),
    Index("jobs_by_owner", "owner", "created_s"),
)

ARTIFACTS = Table(
    "artifacts",
    METADATA,
    Column("job", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("name", String(512), primary_key=True),
    Column("sha256", String(64), nullable=False),
    Column("bytes", BigInteger, nullable=False),
)
