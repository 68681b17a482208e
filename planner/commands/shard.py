"""`planner shard`: where the pieces of every tensor lie, and which collectives that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.table import Table

from planner.commands import options
from planner.io import output
from planner.io.inputs import measurements, read_cluster
from planner.io.output import console, printable
from planner.sharding.answer import captured_row
from planner.sharding.frontends.request import is_request
from planner.sharding.problem import split_cases
from planner.sharding.report import report_case
from topology import codec
from topology.errors import UserError
from topology.rates.reach import doubts_about


def shard(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Cases: mesh, operators, placements; - for stdin.")],
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Simulate the time there: catalogue name, cluster file or capture.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, max=1 << 20, help="GPUs of the cluster to have.")] = None,
    profile: options.Profile = None,
    program: Annotated[
        str | None, typer.Option("--program", help="Write the program of a captured graph there, for the executor.")
    ] = None,
    strict: options.Strict = False,
    json: options.Json = False,
) -> None:
    """Choose placements for what is not pinned, and plan the collectives between them.

    A case is text, or a graph that the executor captured from a module (`executor.sharding`).

    A case that has no answer says why. Exit code 3 when that is so of every case.
    """
    text, where = codec.read_path_or_stdin(file)
    if cluster is None and (gpus is not None or profile is not None):
        raise UserError("--gpus and --profile are about a machine", remedy="name it with --cluster")
    machine = None if cluster is None else read_cluster(cluster, gpus)
    known = measurements(profile, strict=strict)
    measured = None if machine is None else known.on(machine)
    for doubt in (*doubts_about(machine), *known.doubts(machine)) if machine is not None else ():
        output.warn(f"warning: {doubt}")
    cases = split_cases(codec.parse_json(text, where=where), where=where)
    if program is not None and (len(cases) != 1 or not is_request(cases[0])):
        raise UserError("--program is about one captured graph", remedy="a file with a graph, from executor.sharding")
    rows = []
    try:
        for number, case in enumerate(cases):
            output.progress(f"case {number + 1} of {len(cases)}")
            if is_request(case):
                row, answer = captured_row(case, number, machine, measured)
                if program is not None and answer is not None:
                    codec.write_text(program, codec.to_json(answer.written.program, indent=None))
            else:
                row = report_case(case, number, machine, measured)
            rows.append(row)
    finally:
        output.end_progress()
    if json:
        output.emit_json({"schema_version": output.SCHEMA_VERSION, "cases": rows})
    else:
        _print(rows)
    if all(row["rejected"] is not None for row in rows):
        raise typer.Exit(3)


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    screen = console()
    for row in rows:
        if row["rejected"] is not None:
            screen.print(printable(f"{row['id']}: rejected: {row['rejected']}"))
            screen.print()
            continue
        screen.print(printable(f"{row['id']}: {row['ring_send_bytes_per_rank']:,} ring bytes sent by a rank"))
        placed = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 2))
        for name, tokens in row["placements"].items():
            placed.add_row(printable(name), " ".join(tokens), printable(_axes(row["named"][name])))
        screen.print(placed)
        if time := row.get("time_s"):
            parts = (
                f": {1e6 * time['compute']:,.1f} compute, {1e6 * time['exposed_communication']:,.1f} communication not hidden"
                if "compute" in time
                else ", forward and backward as the program has them"
            )
            screen.print(f"{1e6 * time['value']:,.1f} us simulated ({time['source']}){parts}")
        if row["collectives"]:
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
            for heading, justify in (("collective", "left"), ("over", "left"), ("in B", "right"), ("ring B", "right")):
                table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
            table.add_column("why", overflow="fold")
            for _, alike in groupby(row["collectives"], key=str):
                one, *more = alike
                kind = f"{len(more) + 1} x {one['kind']}" if more else one["kind"]
                sent = f"{one['ring_send_bytes_per_rank']:,}"
                table.add_row(kind, printable(one["mesh_dim"]), f"{one['bytes_in']:,}", sent, printable(one["why"]))
            screen.print(table)
        screen.print()


def _axes(named: Mapping[str, Any]) -> str:
    """Return a layout as `f: tp,dp; sum pending over cp`."""
    parts = [f"{axis}: {','.join(str(item) for item in items)}" for axis, items in named["axes"].items()]
    parts += [f"{reducer} pending over {axis}" for axis, reducer in named["partial"].items()]
    return "; ".join(parts)
