"""`planner collective`: how long a collective takes on a cluster, alone or against measured tables."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from planner.commands.flags import options
from planner.io import output
from planner.io.inputs import measurements, read_cluster
from planner.io.output import console
from planner.io.printable import printable
from planner.validate.collective_rows import predicted_rows, table_rows
from topology.errors import UserError
from topology.rates.reach import cluster_caveats


class CostModel(StrEnum):
    MESHWRIGHT = "meshwright"
    NCCL = "nccl"


class Launch(StrEnum):
    QUEUED = "queued"
    GRAPH = "graph"
    EAGER = "eager"
    ISOLATED = "isolated"


def collective(
    cluster: options.Cluster = "dgx-h100",
    gpu: options.Gpu = None,
    op: Annotated[str, typer.Option("--op", help="all_reduce, all_gather, reduce_scatter, all_to_all, broadcast.")] = (
        "all_reduce"
    ),
    gpus: Annotated[int | None, typer.Option("--gpus", min=2, max=1 << 20, help="Ranks; default the cluster.")] = None,
    sizes: Annotated[
        str, typer.Option("--bytes", help="Message sizes in bytes, comma separated (nccl-tests' size column).")
    ] = "1048576,16777216,268435456",
    tables: Annotated[Path | None, typer.Option("--tables", help="Measured tables to compare with.")] = None,
    cost_model: Annotated[
        CostModel, typer.Option("--cost-model", help="Ours, or the formulas of NCCL's own tuner.")
    ] = CostModel.MESHWRIGHT,
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", help="ring, tree, nvls, nvls_tree, pat, one_shot, two_shot or copy_engine."),
    ] = None,
    launch: Annotated[
        Launch | None, typer.Option("--launch", help="What a time contains: default queued, device time alone.")
    ] = None,
    known_every: Annotated[
        int | None, typer.Option("--known-every", min=2, help="Give away every Nth row of a table, score the others.")
    ] = None,
    profile: options.Profile = None,
    strict: options.Strict = False,
    json: options.Json = False,
) -> None:
    """Predict the time of a collective by message size, or compare with a file of measured tables."""
    summary = None
    if known_every is not None and tables is None:
        raise UserError("--known-every splits a file of measured tables", remedy="give one with --tables")
    measured = measurements(profile, strict=strict)
    if tables is not None:
        rows, summary = table_rows(
            tables, cost_model=cost_model.value, profile=measured.profile, known_every=known_every
        )
    else:
        machine = read_cluster(cluster, gpus, gpu=gpu)
        for doubt in (*cluster_caveats(machine), *measured.check(machine)):
            output.warn(f"warning: {doubt}")
        rows = predicted_rows(
            machine,
            op,
            _sizes(sizes),
            gpus=gpus,
            cost_model=cost_model.value,
            profile=measured.profile,
            launch=launch.value if launch else None,
            algorithm=algorithm,
        )
    if json:
        document = {"schema_version": output.SCHEMA_VERSION, "rows": rows}
        output.emit_json(document if summary is None else {**document, "summary": summary})
        return
    _print(rows)
    if summary is not None:
        _print_scores(summary)


def _sizes(text: str) -> list[int]:
    sizes = []
    for part in text.split(","):
        word = part.strip()
        if not (word.isascii() and word.isdigit() and 0 < int(word[:16]) <= 1 << 44):
            raise UserError(
                f"--bytes has {part!r}", why="sizes are whole numbers of bytes", remedy="--bytes 1024,1048576"
            )
        sizes.append(int(word))
    return sizes


def _print(rows: Sequence[dict[str, Any]]) -> None:
    screen = console()
    for (machine, op, gpus), group in groupby(rows, key=lambda row: (row["machine"], row["op"], row["gpus"])):
        table = Table(box=None, pad_edge=False)
        for heading in ("bytes", "us (80% range)", "busbw GB/s", "measured us", "error"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("algorithm")
        for row in group:
            time, seen, error = row["time_s"], row.get("measured_s"), row.get("error")
            table.add_row(
                f"{row['bytes']:,}",
                f"{time['value'] * 1e6:.1f} ({time['low'] * 1e6:.1f}-{time['high'] * 1e6:.1f})",
                f"{row['busbw_bytes_per_s'] / 1e9:.1f}",
                "-" if seen is None else f"{seen * 1e6:.1f}",
                "-" if error is None else f"{error:+.1%}",
                str(row.get("algorithm") or "-"),
            )
        screen.print(printable(f"{op} of {gpus} GPUs on {machine}"))
        screen.print(table)


def _print_scores(summary: dict[str, Any]) -> None:
    for skipped in summary["skipped"]:
        print(printable(f"skipped table {skipped['id']} ({skipped['machine']}): {skipped['reason']}"))
    overall = summary["overall"]
    if overall is not None:
        print(
            f"{overall['points']} measured points: mean absolute error {overall['mean_error']:.1%}, median "
            f"{overall['median_error']:.1%}, inside the 80% interval {overall['within_interval']:.0%}"
        )
