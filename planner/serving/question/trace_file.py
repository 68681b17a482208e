"""A file of requests: when each arrives, how long its prompt and its answer are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from simulator.serving.traffic import Request
from topology.codec import parse_csv, parse_json, read_text
from topology.errors import BadInput

MAX_REQUESTS = 100_000
MAX_TOKENS = 1 << 24
MAX_SECONDS = 1e7
FIELDS = ("arrival_s", "prompt", "output")


def read_trace(path: str) -> tuple[Request, ...]:
    """Return the requests of a file in order of arrival: JSON lines, or CSV with a heading, each with FIELDS.

    Raises BadInput, naming the line, for an invalid request.
    """
    text = read_text(path)
    rows = _csv_rows(path, text) if Path(path).suffix.lower() == ".csv" else _json_rows(path, text)
    found: list[Request] = []
    for number, row in rows:
        if len(found) >= MAX_REQUESTS:
            raise BadInput(f"{path} has more than {MAX_REQUESTS} requests", remedy="take a part of it")
        found.append(read_request(row, f"{path}: line {number}"))
    if not found:
        raise BadInput(f"{path} has no requests", remedy=f"write a line for each, with {', '.join(FIELDS)}")
    return tuple(sorted(found))


def _csv_rows(path: str, text: str) -> Iterable[tuple[int, Mapping[str, Any]]]:
    for number, row in parse_csv(text, where=path):
        yield number, {name: _number(value) for name, value in row.items()}


def _number(text: Any) -> Any:
    try:
        return float(text)
    except (TypeError, ValueError):
        return text


def _json_rows(path: str, text: str) -> Iterable[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        row = parse_json(line, where=f"{path}: line {number}")
        if not isinstance(row, dict):
            raise BadInput(
                f"{path}: line {number} is not an object", remedy='{"arrival_s": 0, "prompt": 9, "output": 9}'
            )
        yield number, row


def read_request(row: Mapping[str, Any], where: str) -> Request:
    """Return a request by its FIELDS. Raises BadInput for a field that is missing or not a number in its range."""
    if missing := [name for name in FIELDS if name not in row]:
        raise BadInput(
            f"{where}: there is no {' and no '.join(missing)}",
            why=f"it has {', '.join(map(str, row))}"[:200] if row else "it is empty",
            remedy=f"a request has {', '.join(FIELDS)}: seconds, tokens, tokens",
        )
    values = [row.get(name) for name in FIELDS]
    most = (MAX_SECONDS, MAX_TOKENS, MAX_TOKENS)
    for name, value, limit in zip(FIELDS, values, most, strict=True):
        least = 0 if name == "arrival_s" else 1
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= limit:
            raise BadInput(f"{where}: {name} is {value!r}"[:200], remedy=f"a number from {least} to {limit:g}")
    return Request(float(values[0] or 0), int(values[1] or 1), int(values[2] or 1))
