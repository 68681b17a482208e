"""A file of serving points: read line by line, predicted, and summarised by source."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from planner.validate.serving_points import QUANTITIES
from topology.codec import MAX_BYTES, JsonObject, parse_json, read_text
from topology.errors import BadInput
from topology.units import in_mib

MAX_ROWS = 100_000


def read_points(path: str | Path) -> list[JsonObject]:
    """Return the rows of a file. Raises BadInput, naming the line, for a line that is not an object."""
    rows = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        if number > MAX_ROWS:
            raise BadInput(f"{path} has more than {MAX_ROWS} lines", remedy="split it")
        row = parse_json(line, where=f"{path}: line {number}")
        if not isinstance(row, dict):
            raise BadInput(f"{path}: line {number} is not an object", remedy="give one serving point a line")
        rows.append(row)
    return rows


def _text(path: str | Path) -> str:
    if not str(path).endswith(".gz"):
        return read_text(path)
    try:
        with gzip.open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"cannot read {path}", why=str(error), remedy="check the file") from error
    if len(raw) > MAX_BYTES:
        raise BadInput(f"{path} unpacks to more than {in_mib(MAX_BYTES)}", remedy="split it")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text", why=str(error)) from error


def summarise_points(rows: Sequence[Mapping[str, Any]]) -> JsonObject:
    """Return counts and, for each quantity, mean and median absolute error, bias and share inside the range."""
    summary: JsonObject = {"rows": len(rows), "skipped": sum(bool(row["skipped"]) for row in rows)}
    for name in QUANTITIES:
        errors = [row["error"][name] for row in rows if row["error"][name] is not None]
        held = [row["held"][name] for row in rows if row["error"][name] is not None]
        summary[name] = errors and {
            "rows": len(errors),
            "mean_abs": fmean(map(abs, errors)),
            "median_abs": median(map(abs, errors)),
            "bias": fmean(errors),
            "worst": max(errors, key=abs),
            "coverage": fmean(held),
        }
        summary[name] = summary[name] or None
    return summary


def by_group(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, JsonObject]]:
    """Yield (group, summary) of rows that have a prediction: a source on one GPU, model and engine."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if not row["skipped"]:
            groups.setdefault(row["group"], []).append(row)
    for name in sorted(groups, key=lambda name: -len(groups[name])):
        yield name, summarise_points(groups[name])
