"""Measured facts about a cluster. Written by `planner calibrate`; read by everything that predicts."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """One timed collective: `nbytes` is nccl-tests' size column, `time_s` the median out-of-place time."""

    op: str
    ranks: int
    nodes: int
    nbytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured on one machine, with what, and when (ISO date)."""

    gpu: str
    taken_at: str
    driver: str | None = None
    versions: dict[str, str] | None = None
    collectives: tuple[CollectiveSample, ...] = ()
    schema_version: int = SCHEMA_VERSION
