"""Write examples/validation/collectives.{md,json}: our collective model against NCCL's formulas on published tables.

    python -m tests.bench.collective_table TABLES [--out examples/validation]

TABLES is shaped like nccl-tests exports (`{"tables": [...]}`). Every figure is recomputed; nothing is read from an
earlier run. Tables of the generations that the constants were fitted on are kept apart from all others, and the fit is
repeated without 8-GPU groups and without every other size to show what it predicts there.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from pathlib import Path

import numpy as np

from simulator.collectives.nccl_tables import BANDS, Score, TableEvaluation, TableRow, evaluate, read_tables, score
from tests.bench.fit_collectives import FITTED, fit, rows_by_protocol
from topology.codec import to_builtins, write_text

FAULTY = ("with 0 NVLinks", "KVM")  # machines whose own reports say what is wrong with them
FITTED_ON = (
    "**In sample or not.** All curves are fitted by GPU generation on the machines whose name starts with "
    + ", ".join(f"`{name}`" for name in FITTED)
    + ", so their rows are in sample (`Refitted without a part` below is not). Single constants were read off others: "
    "NVLS of Blackwell off `AWS P6-B200` and `GB200 NVL72`, send/recv off `HGX B200 x8` and `8x A100 NVLink`, the host's "
    "share of a waited-for call off `8x H200`, network start-up and hops off `OCI 128 GPUs` and the two-node H200, RTX "
    "6000D and GB10 tables, efficiency of xGMI and PCIe off the MI300X, MI355X and RTX PRO 6000 peaks, oneCCL off `b60`."
)
KNOWN_MISSES = (
    "- `KVM with 4 vNUMA`: the VM hides the PCIe switches and blocks GPUDirect; a datasheet cannot know.",
    "- `H100 PCIe x2, NVLink bridge`: 116 of 300 GB/s measured; the same bridge on A100 PCIe gives 208. Not understood.",
    "- `one GPU with 0 NVLinks` is predicted as healthy: its topology is not in the table. An absent link goes to PCIe.",
    "- `OCI 128 GPUs`: network ports are not stated; 8 x 400 Gb/s is assumed, 81 GB/s a port was reached.",
    "- `8x A100 (NVLink3)` up to 16 MiB: twice the time of the other A100 tables; its NCCL version is not stated.",
    "- `GB200 NVL4`: 55 us at 8 bytes and 35 us at 1 MiB, against 16 and 20 us on another tray.",
    "- PCIe boxes: peer access, ACS and shared uplinks decide, and are not in a datasheet. Measure them.",
)


def percent(found: Score | None) -> str:
    return "-" if found is None else f"{found.mean_error:.1%}"


def by_machine(ours: TableEvaluation, nccl: TableEvaluation, known: TableEvaluation) -> list[str]:
    names = [name for _, name in BANDS]
    head = ["machine", "points", "ours", "ours, median", "in interval", "NCCL 2.30.7", "every 4th size known", *names]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    for machine, found in ours.by_machine.items():
        bands = ours.by_machine_and_band[machine]
        cells = [
            machine,
            str(found.points),
            percent(found),
            f"{found.median_error:.1%}",
            f"{found.within_interval:.0%}",
            percent(nccl.by_machine.get(machine)),
            percent(known.by_machine.get(machine)),
            *(percent(bands.get(name)) for name in names),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def by_band(ours: TableEvaluation, nccl: TableEvaluation) -> list[str]:
    lines = ["| size | points | ours | in interval | NCCL 2.30.7 |", "|---|--:|--:|--:|--:|"]
    for name, found in ours.by_band.items():
        other = nccl.by_band.get(name)
        lines.append(f"| {name} | {found.points} | {percent(found)} | {found.within_interval:.0%} | {percent(other)} |")
    return lines


def nvlink(rows: tuple[TableRow, ...], machines: set[str], *, ops: set[str] | None = None) -> Score | None:
    return score(row for row in rows if row.machine in machines and (ops is None or row.op in ops))


def ranges(ours: TableEvaluation) -> list[str]:
    """Return how wide ranges are and should be: 80 % of the points inside, each machine without a fault counted
    once.
    """
    errors: dict[float, dict[str, list[float]]] = {}
    for row in ours.rows:
        if row.measured_s and not any(words in row.machine for words in FAULTY):
            width = round(row.time_s.high / row.time_s.value - 1, 2)
            mine = errors.setdefault(width, {}).setdefault(row.machine, [])
            mine.append(abs(row.measured_s / row.time_s.value - 1))
    lines = [
        "| half-width | machines | points | inside, machines alike | half-width for 80 % | 80 % of the worst machine |"
    ]
    lines.append("|--:|--:|--:|--:|--:|--:|")
    for width, machines in sorted(errors.items()):
        inside = [float(np.mean(np.array(found) <= width)) for found in machines.values()]
        points = np.concatenate([np.array(found) for found in machines.values()])
        weights = np.concatenate([np.full(len(found), 1 / len(found)) for found in machines.values()])
        order = np.argsort(points)
        enough = points[order][np.searchsorted(np.cumsum(weights[order]), 0.8 * len(machines) - 1e-9)]
        worst = max(float(np.quantile(found, 0.8)) for found in machines.values())
        lines.append(
            f"| {width:.2f} | {len(machines)} | {len(points)} | {np.mean(inside):.0%} | {enough:.2f} | {worst:.2f} |"
        )
    return lines


def left_out(tables: list[dict[str, object]]) -> list[str]:
    """Refit without a part and return the error on that part, per generation."""
    lines = ["| generation | left out | points left out | error there |", "|---|---|--:|--:|"]
    for machine in FITTED:
        for label in ("8-GPU groups", "every other size"):
            errors: list[float] = []
            for (name, kind), rows in rows_by_protocol(tables).items():
                if name != machine:
                    continue
                eight = rows[:, 1] == 8
                held = eight if label == "8-GPU groups" else np.log2(rows[:, 2]).astype(int) % 2 == 1
                # A curve with fewer than 40 points left (LL128 and NVLS mostly run on 8 GPUs) cannot be refitted.
                if held.sum() == 0 or (~held).sum() < 40:
                    continue
                x, law = fit(kind, rows[~held])
                errors += list(np.abs(law(x, rows[held]) / rows[held, 3] - 1))
            if errors:
                lines.append(f"| {machine} | {label} | {len(errors)} | {np.mean(errors):.1%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--out", type=Path, default=Path("examples/validation"))
    options = parser.parse_args()
    tables = read_tables(options.tables)
    ours, nccl = evaluate(tables), evaluate(tables, model="nccl")
    known = evaluate(tables, known_every=4)
    used = {row.machine for row in ours.rows if row.machine.split()[0] in FITTED}
    tuned = {"all_reduce", "all_gather", "reduce_scatter"}
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    command = f"python -m tests.bench.collective_table {options.tables.name}"
    same = nvlink(ours.rows, used, ops=tuned)
    text = [
        "# Collective times: predicted against published nccl-tests tables",
        "",
        f"Made on {today} by `{command}` (Python {sys.version.split()[0]}). Errors are mean absolute relative errors of",
        "the time, from catalogue numbers alone unless a column says that sizes were known. The interval is meant to hold",
        "80 % of measurements. NCCL 2.30.7 is its tuner's formulas (simulator/collectives/nccl_model.py), which do not cover",
        "all-to-all and send/recv. Two runs of the same point differ by 3.3 % in the median.",
        "",
        f"- NVLink machines of the fit, all-reduce, all-gather, reduce-scatter: ours {percent(same)}, NCCL's formulas "
        + percent(nvlink(nccl.rows, used, ops=tuned)),
        f"- Same machines, all-to-all too: ours {percent(nvlink(ours.rows, used))}.",
        f"- Same, every 4th size known: {percent(nvlink(known.rows, used))} on the other sizes.",
        f"- All machines and ops: ours {percent(ours.overall)}, NCCL's formulas {percent(nccl.overall)}.",
        "",
        FITTED_ON,
        "",
        "## By machine",
        "",
        *by_machine(ours, nccl, known),
        "",
        "## By size",
        "",
        *by_band(ours, nccl),
        "",
        "## Refitted without a part",
        "",
        *left_out(tables),
        "",
        "## Ranges",
        "",
        *ranges(ours),
        "",
        "## Known misses",
        "",
        *KNOWN_MISSES,
        "",
        "## Skipped",
        "",
        *(f"- {table.machine} (table {table.id}): {table.reason}" for table in ours.skipped),
        "",
    ]
    summary = {
        "schema_version": 1,
        "date": today,
        "command": command,
        "meshwright": {"overall": ours.overall, "by_machine": ours.by_machine_and_band, "by_band": ours.by_band},
        "nccl": {"overall": nccl.overall, "by_machine": nccl.by_machine_and_band, "by_band": nccl.by_band},
        "every_4th_size_known": {"overall": known.overall, "by_machine": known.by_machine_and_band},
        "skipped": ours.skipped,
    }
    write_text(options.out / "collectives.md", "\n".join(text))
    write_text(options.out / "collectives.json", json.dumps(to_builtins(summary), indent=1) + "\n")
    print("\n".join(text[8:12]))


if __name__ == "__main__":
    main()
