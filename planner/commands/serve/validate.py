"""`planner validate` on files of serving points: predictions of the serving simulation compared with published
measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.io import output
from planner.io.grids import console, grid
from planner.io.printable import printable
from planner.requests.runs import Validate
from planner.requests.serving import is_points_file
from planner.validate.serving_points import QUANTITIES, validate_point
from planner.validate.serving_report import by_group, read_points, summarise_points
from topology.codec import JsonObject
from topology.errors import Infeasible, OutOfTolerance, UserError


def validate(asked: Validate) -> None:
    """Print predictions alongside measurements of all points. `tolerance` is for mean absolute errors, in percent.

    Raises UserError for files of another kind among them, Infeasible when no row could be predicted, OutOfTolerance.
    """
    files, tolerance = asked.files, asked.tolerance
    others = [name for name in files if not is_points_file(name)]
    if others:
        raise UserError(
            f"{others[0]} does not hold serving points",
            why="cases of training and serving points are summed up differently",
            remedy="validate them in a call of their own",
        )
    rows: list[JsonObject] = []
    try:
        for name in files:
            for index, row in enumerate(read_points(name)):
                rows.append({**validate_point(row), "file": Path(name).name})
                if index % 20 == 0:
                    output.progress(f"{name}: row {index + 1}")
    finally:
        output.end_progress()
    groups = dict(by_group(rows))
    summary = {**summarise_points(rows), "by_group": groups}
    if asked.json:
        output.emit_json({"schema_version": output.SCHEMA_VERSION, "rows": rows, "summary": summary})
    else:
        _print(groups, summary, rows)
    if summary["skipped"] == summary["rows"]:
        raise Infeasible("nothing was compared", why="every row was skipped", remedy="see the reason of each row")
    over = [name for name in QUANTITIES if tolerance and summary[name] and 100 * summary[name]["mean_abs"] > tolerance]
    if over:
        raise OutOfTolerance(f"mean absolute error above {tolerance:g}%: {', '.join(over)}")


def _print(groups: Mapping[str, Any], summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    headings = ("source | GPU | model | engine", "rows", "1st token", "held", "a token", "held", "tok/s", "held")
    table = grid(headings)
    for name, part in [*groups.items(), ("all", summary)]:
        cells = [cell for quantity in QUANTITIES for cell in _cells(part[quantity])]
        table.add_row(printable(name), str(part["rows"] - part["skipped"]), *cells)
    screen = console()
    screen.print(table)
    reasons: dict[str, int] = {}
    for row in rows:
        if row["skipped"]:
            reasons[row["skipped"]] = reasons.get(row["skipped"], 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:20]:
        screen.print(printable(f"skipped {count}: {reason}"))
    screen.print("Mean absolute errors, predicted/measured - 1; held: inside the 80% range.")


def _cells(part: Mapping[str, Any] | None) -> list[str]:
    return ["-", "-"] if part is None else [f"{part['mean_abs']:.0%}", f"{part['coverage']:.0%}"]
