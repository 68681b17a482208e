"""`planner shard`: where the pieces of every tensor lie, and which collectives that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.table import Table

from planner.commands.flags import options
from planner.io import output
from planner.io.inputs import measurements, read_cluster
from planner.io.output import console, printable
from planner.pictures.sharding import sharding_picture
from planner.sharding.answer import Answer, captured_row
from planner.sharding.backends.dtensor_file import write_dtensor_file
from planner.sharding.frontends.decoder import decoder_case
from planner.sharding.frontends.request import is_request
from planner.sharding.layouts.mesh import make_mesh
from planner.sharding.plans.explanation import explain_plan
from planner.sharding.plans.report import Limits, Planned, planned_case
from planner.sharding.problem.problem import split_cases
from simulator.config.hf_config import load_model
from topology import codec
from topology.errors import UserError
from topology.rates.reach import cluster_caveats


def shard(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="Cases: mesh, operators, placements; - for stdin.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Instead of FILE: layers of a shipped model or config.json, none placed."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", min=1, help="How many of its layers; default: all, with embedding and loss."),
    ] = None,
    mesh: Annotated[str | None, typer.Option("--mesh", help="With --model: axes and sizes, data=8,model=8.")] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", "--seq", min=1, max=1 << 24, help="With --model: tokens; default 4096.")
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            "--micro-batch", min=1, max=1 << 24, help="With --model: sequences in all; default: as many as ranks."
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Choose by time there: catalogue name, cluster file or capture.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, max=1 << 20, help="GPUs of the cluster to have.")] = None,
    profile: options.Profile = None,
    program: Annotated[
        str | None, typer.Option("--program", help="Write the program of a captured graph there, for the executor.")
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", help="Write a Python file of DTensor placements there, which torch runs.")
    ] = None,
    picture: Annotated[
        str | None,
        typer.Option("--picture", help="Write the plan as an SVG there: operators, placements, collectives."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why each collective is there, and what the plan without it takes.")
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit", min=0.1, help="Seconds to look for the cheapest; then the best so far, and its gap."
        ),
    ] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option("--memory-limit", min=0.001, help="GiB of a rank for parameters, their state and what is saved."),
    ] = None,
    strict: options.Strict = False,
    json: options.Json = False,
) -> None:
    """Choose placements for what is not pinned, and plan the collectives between them.

    A case is text, or a graph that the executor captured from a module (`executor.sharding`).

    A case that has no answer says why. Exit code 3 when that is so of every case.
    """
    about_model = (layers, mesh, seq_len, micro_batch)
    if model is None and any(one is not None for one in about_model):
        raise UserError(
            "--layers, --mesh, --seq-len and --micro-batch are about a model", remedy="name it with --model"
        )
    if (file is None) == (model is None):
        raise UserError("shard takes a FILE or --model", remedy="one of the two")
    if cluster is None and (gpus is not None or profile is not None):
        raise UserError("--gpus and --profile are about a machine", remedy="name it with --cluster")
    if cluster is None and (time_limit is not None or memory_limit is not None):
        raise UserError("--time-limit and --memory-limit are about time on a machine", remedy="name it with --cluster")
    limits = Limits(time_limit, None if memory_limit is None else memory_limit * 2**30)
    machine = None if cluster is None else read_cluster(cluster, gpus)
    known = measurements(profile, strict=strict)
    measured = None if machine is None else known.on(machine)
    for doubt in (*cluster_caveats(machine), *known.doubts(machine)) if machine is not None else ():
        output.warn(f"warning: {doubt}")
    if model is not None:
        if cluster is None:
            raise UserError("--model is placed by time", remedy="name a machine with --cluster")
        cases = [_model_case(model, mesh, layers=layers, seq_len=seq_len, micro_batch=micro_batch)]
    else:
        text, where = codec.read_path_or_stdin(str(file))
        cases = split_cases(codec.parse_json(text, where=where), where=where)
    _check_files(cases, program=program, python=python, picture=picture)
    rows = []
    try:
        for number, case in enumerate(cases):
            output.progress(f"case {number + 1} of {len(cases)}")
            found: Answer | Planned | None
            if is_request(case):
                row, found = captured_row(case, number, machine, measured, limits=limits)
                if found is not None:
                    _write_captured(found, program=program, python=python)
            else:
                row, found = planned_case(case, number, machine, measured, limits=limits)
            if found is not None and explain:
                explained = explain_plan(found.problem, found.plan, machine, measured)
                row["explanations"] = [codec.to_builtins(one) for one in explained]
            if found is not None and picture is not None:
                codec.write_text(picture, sharding_picture(found.problem, found.plan, title=row["id"]).text())
            rows.append(row)
    finally:
        output.end_progress()
    if json:
        output.emit_json({"schema_version": output.SCHEMA_VERSION, "cases": rows})
    else:
        _print(rows)
    if all(row["rejected"] is not None for row in rows):
        raise typer.Exit(3)


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
        if row.get("explanations"):
            screen.print()
            _print_explanations(row["explanations"])
        screen.print()


def _axes(named: Mapping[str, Any]) -> str:
    """Return a layout as `f: tp,dp; sum pending over cp`."""
    parts = [f"{axis}: {','.join(str(item) for item in items)}" for axis, items in named["axes"].items()]
    parts += [f"{reducer} pending over {axis}" for axis, reducer in named["partial"].items()]
    return "; ".join(parts)
