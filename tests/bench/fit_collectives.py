"""Fit the constants of simulator/collectives/curves.py to nccl-tests tables, by GPU generation.

    python -m tests.bench.fit_collectives tables.json [--leave-out n=8|odd-sizes]

Reads tables shaped like nccl-tests exports, assigns every row to the protocol NCCL's own formulas choose, and fits
each (generation, protocol) on log ratios, large ones counting as they are. Rows where two protocols are within 5 % by
NCCL's formulas count a fifth, since either may have run. Prints constants as Python and the error in sample; with
`--leave-out` fits without some rows and prints the error on those rows alone.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from simulator.collectives import nccl_model
from simulator.collectives.curves import P2P_CHANNELS, SECOND_CTA_BYTES

Floats = NDArray[np.float64]
OPS = ("all_reduce", "all_gather", "reduce_scatter")
FITTED = {"a100_sxm": (80, 240.0), "h200_sxm": (90, 370.8), "gb200": (100, 721.8)}  # machine -> capability, NCCL GB/s


def rows_by_protocol(tables: list[dict[str, Any]]) -> dict[tuple[str, str], Floats]:
    """Return {(machine, curve): array[op index, n, bytes, us, narrow, tie]}; all-to-all under "peer"."""
    found: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
    for table in tables:
        machine = table["machine"].split()[0]
        if machine not in FITTED:
            continue
        capability, nvlink = FITTED[machine]
        n, narrow = table["gpus"], table["dtype"] == "int8"
        communicator = nccl_model.NcclMachine(
            ranks=n, compute_capability=capability, nvlink=nvlink, nvls=capability >= 90
        )
        sizes = np.array([row["bytes"] for row in table["rows"]], dtype=float)
        times = [row["time_us"] for row in table["rows"]]
        if table["collective"] == "alltoall":
            found[machine, "peer"] += [(0, n, b, t, narrow, 0) for b, t in zip(sizes, times, strict=True)]
            continue
        op = table["collective"]
        lines = nccl_model.lines(communicator, op, allow_nvls=not narrow)
        grid = np.stack([nccl_model.line_time_us(communicator, op, line, sizes) for line in lines])
        best, ordered = grid.argmin(0), np.sort(grid, 0)
        for b, t, i, first, second in zip(sizes, times, best, ordered[0], ordered[1], strict=True):
            line = lines[i]
            tie = (
                second / first < 1.05 and "Simple" not in lines[int(np.argsort(grid[:, sizes == b][:, 0])[1])].protocol
            )
            found[machine, f"{line.algorithm}/{line.protocol}"].append((OPS.index(op), n, b, t, narrow, tie))
    return {key: np.array(rows, dtype=float) for key, rows in found.items()}


def curve_us(x: Floats, rows: Floats) -> Floats:
    """The law of collective_curves in us: x = base step reduce_step second p fill fill_MiB narrow, then sent, buffer by
    op.
    """
    op, n, b, narrow = rows[:, 0].astype(int), rows[:, 1], rows[:, 2], rows[:, 4]
    base, step, reduce_step, second, p, fill, fill_mib, extra = x[:8]
    sent, buffer = x[8:11][op], x[11:14][op]
    steps = np.where(op == 0, 2 * (n - 1), n - 1)
    latency = base + np.where(op == 0, reduce_step, step) * steps + second * b / (b + SECOND_CTA_BYTES * n)
    work = b * 1e-6 * (sent * steps / n + buffer * (1 + extra * narrow * (op != 1)))
    return np.asarray((latency**p + work**p) ** (1 / p) + fill * b / (b + fill_mib * 2**20))


def peer_us(x: Floats, rows: Floats) -> Floats:
    """All-to-all in us: x = base doubling ll_GBps simple p fill fill_MiB sent buffer channel_GBps."""
    n, b = rows[:, 1], rows[:, 2]
    base, doubling, ll, simple, p, fill, fill_mib, sent, buffer, channel = x
    peer = b / n
    start = doubling * np.log2(n)
    small = base + start + peer * 1e-3 / ll
    work = np.maximum(b * 1e-6 * (sent * (n - 1) / n + buffer), peer * 1e-3 / (channel * P2P_CHANNELS / n))
    bulk = ((simple + start) ** p + work**p) ** (1 / p) + fill * b / (b + fill_mib * 2**20)
    return np.asarray(np.minimum(small, bulk))


def fit(kind: str, rows: Floats) -> tuple[Floats, Callable[[Floats, Floats], Floats]]:
    """Fit one curve; return its parameters and the law."""
    if kind == "peer":
        law = peer_us
        start = [6.0, 0.5, 6.0, 13.0, 1.5, 10.0, 8.0, 2.0, 0.5, 22.0]
        low = [0.0, 0.0, 3.0, 3.0, 1.0, 0.0, 2.0, 0.0, 0.0, 12.0]
        high = [30.0, 5.0, 30.0, 40.0, 4.0, 60.0, 32.0, 10.0, 10.0, 40.0]
    else:
        law = curve_us
        ll, nvls = kind.endswith("/LL"), kind.startswith("nvls")
        start = [6.0, 1.5, 1.5, 1.0, 1.3, 5.0, 8.0, 0.1] + [2.0] * 6
        low = [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 2.0, 0.0] + [0.05] * 6
        high = [90.0, 20.0, 20.0, 10.0, 4.0, 90.0, 32.0, 0.5] + [30.0] * 6
        if ll:
            start[5] = low[5] = 0.0
            high[5] = 1e-9
        else:
            start[3] = 0.0
            high[3] = 1e-9
        if nvls:  # one group size only: its latency and work cannot be separated by n
            high[1] = high[2] = 1e-9
            high[8] = high[9] = high[10] = 0.0501
        if kind.endswith("LL128"):
            high[4], high[5] = 1.0001, 1e-9
    weight = np.where(rows[:, 5] > 0, 0.2, 1.0)
    target = rows[:, 3]
    found = least_squares(
        lambda at: np.log(law(at, rows) / target) * weight,
        np.clip(start, low, high),
        bounds=(low, high),
        x_scale=np.subtract(high, low),
        loss="soft_l1",
        f_scale=0.05,
    )
    return found.x, law


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--leave-out", choices=("n=8", "n=2", "odd-sizes"), default=None)
    options = parser.parse_args()
    tables = json.loads(options.tables.read_text(encoding="utf-8"))["tables"]
    for (machine, kind), rows in sorted(rows_by_protocol(tables).items()):
        held = np.zeros(len(rows), dtype=bool)
        if options.leave_out == "odd-sizes":
            held = np.log2(rows[:, 2]).astype(int) % 2 == 1
        elif options.leave_out:
            held = rows[:, 1] == int(options.leave_out[2:])
        if held.all():
            print(machine, kind, "nothing left to fit")
            continue
        x, law = fit(kind, rows[~held])
        error = np.abs(law(x, rows) / rows[:, 3] - 1)
        text = f"{machine} {kind}: {np.sum(~held)} rows, in sample {error[~held].mean():.1%}"
        if held.any():
            text += f", {held.sum()} left out {error[held].mean():.1%}"
        print(text, "\n   ", np.array2string(x, precision=3, suppress_small=True, max_line_width=200))


if __name__ == "__main__":
    main()
