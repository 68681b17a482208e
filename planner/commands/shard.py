"""`planner shard`: where the pieces of every tensor lie, and which collectives that takes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import groupby
from typing import Any

import typer

from planner.io import output
from planner.io.inputs import measurements, read_cluster
from planner.io.output import console
from planner.io.printable import printable
from planner.pictures.sharding import sharding_picture
from planner.requests.flag import values_of
from planner.requests.tools import Shard
from planner.sharding import (
    Answer,
    Deadline,
    Limits,
    decoder_case,
    explain_plan,
    is_request,
    make_mesh,
    program_text,
    shard_case,
    split_cases,
    write_dtensor_file,
)
from simulator.config.hf_config import load_model
from topology import codec
from topology.errors import UserError
from topology.rates.reach import cluster_caveats
from topology.units import GIB


def shard(asked: Shard) -> None:
    """Print what `planner shard` answers."""
    _refuse_unused(asked)
    limits = Limits(Deadline.after(asked.time_limit), None if asked.memory_limit is None else asked.memory_limit * GIB)
    machine = None if asked.cluster is None else read_cluster(asked.cluster, asked.gpus)
    known = measurements(asked.profile, strict=asked.strict)
    measured = None if machine is None else known.on(machine)
    for doubt in (*cluster_caveats(machine), *known.doubts(machine)) if machine is not None else ():
        output.warn(f"warning: {doubt}")
    if asked.model is not None:
        cases = [
            _model_case(
                asked.model, asked.mesh, layers=asked.layers, seq_len=asked.seq_len, micro_batch=asked.micro_batch
            )
        ]
    else:
        text, where = codec.read_path_or_stdin(str(asked.file))
        cases = split_cases(codec.parse_json(text, where=where), where=where)
    _check_files(cases, program=asked.program, python=asked.python, picture=asked.picture)
    rows = []
    try:
        for number, case in enumerate(cases):
            output.progress(f"case {number + 1} of {len(cases)}")
            row, found = shard_case(case, number, machine, measured, limits=limits)
            if isinstance(found, Answer):
                _write_captured(found, program=asked.program, python=asked.python)
            if found is not None and asked.listing:
                row["listing"] = program_text(found.problem, found.plan)
            if found is not None and asked.explain:
                explained = explain_plan(found.problem, found.plan, machine, measured)
                row["explanations"] = [codec.to_builtins(one) for one in explained]
            if found is not None and asked.picture is not None:
                codec.write_text(asked.picture, sharding_picture(found.problem, found.plan, title=row["id"]).text())
            rows.append(row)
    finally:
        output.end_progress()
    if asked.json:
        output.emit_json({"schema_version": output.SCHEMA_VERSION, "cases": rows})
    else:
        _print(rows)
    if all(row["rejected"] is not None for row in rows):
        raise typer.Exit(3)


def _refuse_unused(asked: Shard) -> None:
    """Raise UserError where an option is about something that is not named, or where the cases are named twice or not."""
    stated = {name for name, value in values_of(asked).items() if value is not None}
    if "model" not in stated and stated & {"layers", "mesh", "seq_len", "micro_batch"}:
        raise UserError(
            "--layers, --mesh, --seq-len and --micro-batch are about a model", remedy="name it with --model"
        )
    if ("file" in stated) == ("model" in stated):
        raise UserError("shard takes a FILE or --model", remedy="one of the two")
    if "cluster" in stated:
        return
    if stated & {"gpus", "profile"}:
        raise UserError("--gpus and --profile are about a machine", remedy="name it with --cluster")
    if stated & {"time_limit", "memory_limit"}:
        raise UserError("--time-limit and --memory-limit are about time on a machine", remedy="name it with --cluster")
    if "model" in stated:
        raise UserError("--model is placed by time", remedy="name a machine with --cluster")


def _model_case(
    model: str, mesh: str | None, *, layers: int | None, seq_len: int | None, micro_batch: int | None
) -> dict[str, Any]:
    """Return the case of a model's layers. Raises UserError and BadInput."""
    sizes: dict[str, int] = {}
    for part in (mesh or "").split(","):
        name, _, size = part.partition("=")
        if not (size.isascii() and size.isdigit() and len(size) < 8) or name in sizes:
            raise UserError(f"--mesh {str(mesh)[:60]} is no mesh", remedy="axes with their sizes: data=8,model=8")
        sizes[name] = int(size)
    ranks = make_mesh(list(sizes), list(sizes.values())).ranks
    return decoder_case(load_model(model), sizes, layers=layers, batch=micro_batch or ranks, seq_len=seq_len or 4096)


def _check_files(
    cases: Sequence[Mapping[str, Any]], *, program: str | None, python: str | None, picture: str | None
) -> None:
    """Raise UserError where a file is asked for that these cases do not make."""
    for flag, path in (("--program", program), ("--python", python)):
        if path is not None and (len(cases) != 1 or not is_request(cases[0])):
            raise UserError(f"{flag} is about one captured graph", remedy="a file with a graph, from executor.sharding")
    if picture is not None and len(cases) != 1:
        raise UserError(f"--picture is about one case, and there are {len(cases)}", remedy="a file with one case")


def _write_captured(answer: Answer, *, program: str | None, python: str | None) -> None:
    if program is not None:
        codec.write_text(program, codec.to_json(answer.written.program, indent=None))
    if python is not None:
        if answer.request.stages is not None:
            raise UserError("pipeline stages are no DTensor placements", remedy="--program, which the executor runs")
        graph = answer.request.graph
        codec.write_text(python, write_dtensor_file(answer.captured, graph, answer.plan, title=answer.request.id))


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
            printable(f"{one['product']} beside its exchange: {way}, {1e6 * one['program_s']:,.1f} us in all{more}")
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
                f": {1e6 * time['compute']:,.1f} compute, {1e6 * time['exposed_communication']:,.1f} communication not hidden"
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
    """Return lines of aligned cells, columns of `right` flush right. A table of rich takes seconds for thousands of tensors."""
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
