"""`planner collective`: the time of a collective on a cluster, alone or compared with measured tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from planner.io import output
from planner.io.grids import console, grid
from planner.io.inputs import measurements, parse_bytes, read_cluster
from planner.io.printable import printable
from planner.requests.machines import Collective
from planner.validate.collective_rows import predicted_rows, table_rows
from topology.codec import JsonObject
from topology.errors import UserError
from topology.rates.reach import cluster_caveats, require_plannable
from topology.units import two_digits


def collective(asked: Collective) -> None:
    """Print what `planner collective` answers."""
    summary = None
    if asked.known_every is not None and asked.tables is None:
        raise UserError("--known-every splits a file of measured tables", remedy="give one with --tables")
    measured = measurements(asked.profile, strict=asked.strict)
    if asked.tables is not None:
        rows, summary = table_rows(
            asked.tables, cost_model=asked.cost_model.value, profile=measured.profile, known_every=asked.known_every
        )
    else:
        machine = read_cluster(asked.cluster, asked.gpus, gpu=asked.gpu)
        require_plannable(machine)
        for doubt in (*cluster_caveats(machine), *measured.check(machine)):
            output.warn(f"warning: {doubt}")
        rows = predicted_rows(
            machine,
            asked.op,
            _sizes(asked.sizes),
            gpus=asked.gpus,
            cost_model=asked.cost_model.value,
            profile=measured.profile,
            launch=asked.launch.value if asked.launch else None,
            algorithm=asked.algorithm,
        )
    if asked.json:
        document = {"schema_version": output.SCHEMA_VERSION, "rows": rows}
        output.emit_json(document if summary is None else {**document, "summary": summary})
        return
    _print(rows)
    if summary is not None:
        _print_scores(summary)


def _sizes(text: str) -> list[int]:
    sizes = [parse_bytes(part) for part in text.split(",")]
    for size in sizes:
        if not (1 <= size <= 1 << 44 and size.is_integer()):
            raise UserError(
                f"--bytes has {size:.12g} bytes",
                why=f"a message is a whole number of bytes, 1 to {1 << 44}",
                remedy="--bytes 1048576,512MiB,1GB",
            )
    return [int(size) for size in sizes]


def _us(seconds: float) -> str:
    return two_digits(seconds * 1e6)


def _print(rows: Sequence[JsonObject]) -> None:
    screen = console()
    for (machine, op, gpus), group in groupby(rows, key=lambda row: (row["machine"], row["op"], row["gpus"])):
        headings = ("bytes", "us (80% range)", "busbw GB/s", "measured us", "error", "algorithm")
        table = grid(headings, text=("algorithm",), gap=2)
        for row in group:
            time, seen, error = row["time_s"], row.get("measured_s"), row.get("error")
            table.add_row(
                f"{row['bytes']:,}",
                f"{_us(time['value'])} ({_us(time['low'])}-{_us(time['high'])})",
                two_digits(row["busbw_bytes_per_s"] / 1e9),
                "-" if seen is None else f"{seen * 1e6:.1f}",
                "-" if error is None else f"{error:+.1%}",
                str(row.get("algorithm") or "-"),
            )
        screen.print(printable(f"{op} of {gpus} GPUs on {machine}"))
        screen.print(table)


def _print_scores(summary: JsonObject) -> None:
    for skipped in summary["skipped"]:
        print(printable(f"skipped table {skipped['id']} ({skipped['machine']}): {skipped['reason']}"))
    overall = summary["overall"]
    if overall is not None:
        print(
            f"{overall['points']} measured points: mean absolute error {overall['mean_error']:.1%}, median "
            f"{overall['median_error']:.1%}, inside the 80% interval {overall['within_interval']:.0%}"
        )
