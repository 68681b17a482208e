"""`planner shard`: the layout of every tensor, and the collectives that it needs."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import groupby
from typing import Any

from click.exceptions import Exit

from planner.answers import shard as answers
from planner.io import output
from planner.io.grids import console
from planner.io.printable import printable
from planner.requests.tools import Shard


def shard(asked: Shard) -> None:
    """Print what `planner shard` answers; raise Exit(3) where no case has an answer."""
    try:
        found = answers.shard(asked, output.progress)
    finally:
        output.end_progress()
    if asked.json:
        output.emit_json(found.to_dict())
    else:
        _print(found.rows)
    if not found.answered:
        raise Exit(3)


def _print_explanations(explanations: Sequence[Mapping[str, Any]]) -> None:
    screen = console()
    for one in explanations:
        took = "" if one["seconds"] is None else f", {1e6 * one['seconds']:,.1f} us"
        screen.print(
            printable(f"{one['kind']} of {one['tensor']} over {one['over']}: {one['ring_bytes']:,.0f} ring B{took}")
        )
        screen.print(printable(f"  why      {one['why']}"))
        if one["instead"]:
            more = "" if one["more_bytes"] is None else f": {one['more_bytes']:+,.0f} ring B in all"
            if one["more_seconds"] is not None:
                more += f", {1e6 * one['more_seconds']:+,.1f} us of collectives"
            screen.print(printable(f"  instead  {one['instead']}{more}"))
        if one["wins"]:
            screen.print(printable(f"  wins     {one['wins']}"))


def _print_schedules(schedules: Sequence[Mapping[str, Any]]) -> None:
    screen = console()
    for one in schedules:
        way = f"{one['way']} chunks" if isinstance(one["way"], int) else one["way"]
        other = one.get("instead")
        other = f"{other} chunks" if isinstance(other, int) else other
        more = "" if other is None else f"; next best {other}: {1e6 * one['more_s']:+,.1f} us"
        screen.print(
            printable(f"{one['product']} alongside its exchange: {way}, {1e6 * one['program_s']:,.1f} us in all{more}")
        )


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    screen = console()
    for row in rows:
        if row["rejected"] is not None:
            screen.print(printable(f"{row['id']}: rejected: {row['rejected']}"))
            screen.print()
            continue
        screen.print(printable(f"{row['id']}: {row['ring_send_bytes_per_rank']:,} ring bytes sent by a rank"))
        screen.out(
            _columns([(name, " ".join(at), _axes(row["named"][name])) for name, at in row["placements"].items()])
        )
        if "not_simulated" in row:
            screen.print(row["not_simulated"])
        if time := row.get("time_s"):
            parts = (
                f": {1e6 * time['compute']:,.1f} compute, {1e6 * time['exposed_communication']:,.1f} communication not"
                " hidden"
                if "compute" in time
                else ", forward and backward as the program has them"
            )
            screen.print(f"{1e6 * time['value']:,.1f} us simulated ({time['source']}){parts}")
        if row["collectives"]:
            cells = [("collective", "over", "in B", "ring B", "why")]
            for _, alike in groupby(row["collectives"], key=str):
                one, *more = alike
                kind = f"{len(more) + 1} x {one['kind']}" if more else one["kind"]
                sent = f"{one['ring_send_bytes_per_rank']:,}"
                cells.append((kind, one["mesh_dim"], f"{one['bytes_in']:,}", sent, one["why"]))
            screen.out(_columns(cells, right=(2, 3)))
        if row.get("listing"):
            screen.print()
            screen.print(printable(row["listing"]), soft_wrap=True)
        if row.get("explanations"):
            screen.print()
            _print_explanations(row["explanations"])
            _print_schedules(row.get("program", {}).get("schedules", ()))
        screen.print()


def _columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """Return lines of aligned cells; `right` columns are aligned right. (rich takes seconds for thousands of
    tensors.)
    """
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in shown
    )


def _axes(named: Mapping[str, Any]) -> str:
    """Return a layout as `f: tp,dp; sum pending over cp`."""
    parts = [f"{axis}: {','.join(str(item) for item in items)}" for axis, items in named["axes"].items()]
    parts += [f"{reducer} pending over {axis}" for axis, reducer in named["partial"].items()]
    return "; ".join(parts)
