"""Runs in files: a list of cases (JSON), one case per line (JSON Lines), or a table (CSV) whose columns are paths into
a case.

Measurements may be in the log of a run, which `measured.log` names relative to the file (`planner.learn.logs`).
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from planner.learn.logs import with_log
from planner.question.case_words import sectioned
from planner.question.cases import read_cases
from topology import codec
from topology.codec import JsonObject
from topology.errors import BadInput

MOST_ROWS = 100_000


def read_runs(path: str | Path) -> list[JsonObject]:
    """Return the cases of a file. Raises BadInput, naming the line, for an invalid case.

    A column of a table has the name of its field, `plan.tp` or `measured.log`, or that of the command-line option; an
    empty cell means not stated.
    """
    folder = Path(path).parent
    found = [sectioned(row) for row in _read(str(path))]
    return [with_log(case, folder, f"{path}: {case.get('id', f'case {n}')}") for n, case in enumerate(found, start=1)]


def _read(name: str) -> list[JsonObject]:
    if name.endswith(".csv"):
        rows = islice(codec.parse_csv(codec.read_text(name), where=name), MOST_ROWS)
        return [_case_of_row(row, f"{name}:{line}") for line, row in rows]
    if name.endswith(".jsonl"):
        lines = [line for line in codec.read_text(name).splitlines() if line.strip()][:MOST_ROWS]
        found = [codec.parse_json(line, where=f"{name}:{number}") for number, line in enumerate(lines, start=1)]
        for number, one in enumerate(found, start=1):
            if not isinstance(one, dict):
                raise BadInput(
                    f"{name}:{number} is no case", why="a line is one object with model, cluster, workload, plan"
                )
        return [{"id": f"{name}:{number}", **one} for number, one in enumerate(found, start=1)]
    return list(read_cases(name)[0])


def _case_of_row(row: dict[str, str | None], where: str) -> JsonObject:
    case: JsonObject = {"id": where}
    for column, cell in row.items():
        if cell is None or not cell.strip():
            continue
        *path, last = column.strip().split(".")
        place = case
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise BadInput(f"{where}: column {column} is inside a value of another column")
        place[last] = _value(cell.strip())
    return case


def _value(cell: str) -> Any:
    """Return a number, true, false or null as JSON reads it, all else as text."""
    try:
        found = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    return cell if isinstance(found, dict | list | str) else found
