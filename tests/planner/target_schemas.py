"""Schemas of all export targets: those that `planner check` reads are part of the package, the others of the tests."""

from functools import lru_cache
from pathlib import Path

from planner.export.schema import schema
from topology import codec
from topology.codec import JsonObject

FOLDER = Path(__file__).resolve().parents[1] / "data" / "export_schemas"


@lru_cache
def schema_of(name: str, version: str) -> JsonObject:
    """Return a target's schema, as `planner.export.schema.schema`."""
    path = FOLDER / f"{name}_{version}.json"
    return dict(codec.read_json(path)) if path.exists() else schema(name, version)
