"""Whether mean clocks of measured steps are those at which their kernels' energy is what the power limit allows.

    python3 tests/bench/power_account.py > table.md

Each kind of work draws a share of what products draw. A step in which the parts `share` of the time go to kinds of
draw `draw` runs at the clock (K * sum(draw * share)) ** -power_exponent of efficiency.toml, where that is less than the
limit of the clock. Draws are fitted to steps of one GPU and judged on steps of several, in which NCCL works as well.
Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from simulator.kernels.roofline import efficiency

RUNS = Path(__file__).parents[2] / "examples" / "validation" / "fresh.jsonl"
ATTENTION = re.compile("sdpa|flash|fmha|attention", re.IGNORECASE)
PRODUCTS = re.compile("nvjet|gemm|cutlass|xmma", re.IGNORECASE)
KINDS = ("products", "attention", "other kernels", "NCCL alongside", "NCCL alone", "idle")
LIMITED_HZ = 1.90e9  # below it, power and not the highest clock decides
FEWEST_PRODUCTS = 0.25  # of a step: the others are bound by memory or by their host


@dataclass(frozen=True, slots=True)
class Step:
    """A measured step: its mean clock, and the part of its time that each of KINDS takes."""

    gpu: str
    several: bool
    clock_hz: float
    shares: tuple[float, ...]


def steps() -> list[Step]:
    """Return the runs whose clocks were measured and whose kernels were profiled."""
    found = []
    for line in RUNS.read_text("utf-8").splitlines():
        run = json.loads(line)
        measured = run.get("measured") or {}
        profiled = measured.get("profiled")
        if not measured.get("mean_sm_clock_hz") or not profiled:
            continue
        whole, of = measured["step_s"], {"attention": 0.0, "products": 0.0}
        for kernel in profiled["longest"]:
            kind = "attention" if ATTENTION.search(kernel["name"]) else "products"
            if kind == "attention" or PRODUCTS.search(kernel["name"]):
                of[kind] += kernel["seconds"]
        alone = profiled["exposed_collectives_s"]
        parts = (
            of["products"],
            of["attention"],
            max(profiled["computing_s"] - sum(of.values()), 0.0),
            profiled["collectives_s"] - alone,
            alone,
            max(whole - profiled["computing_s"] - alone, 0.0),
        )
        degrees = [run["plan"][axis] for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp")]
        shares = tuple(part / whole for part in parts)
        found.append(Step(run["host"]["gpu"], int(np.prod(degrees)) > 1, measured["mean_sm_clock_hz"], shares))
    return [one for one in found if one.clock_hz < LIMITED_HZ and one.shares[0] > FEWEST_PRODUCTS]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    exponent = efficiency("hopper").power_exponent
    found = steps()
    print(f"| GPU | steps of | steps | {' | '.join(KINDS)} | clock: bias | rms |")
    print("|---|---|--:|" + "--:|" * (len(KINDS) + 2))
    for gpu in sorted({one.gpu for one in found}):
        single = np.array([False] * len(KINDS))
        draws = np.zeros(len(KINDS))
        for several in (False, True):
            some = [one for one in found if one.gpu == gpu and one.several == several]
            shares = np.array([one.shares for one in some])
            clocks = np.array([one.clock_hz for one in some])
            if not several:
                single = np.array([True, True, True, False, False, True])
                draws[single], _ = nnls(shares[:, single], clocks ** (-1 / exponent))
            else:  # NCCL's own, at the draws of one GPU
                left = clocks ** (-1 / exponent) - shares[:, single] @ draws[single]
                draws[~single], _ = nnls(shares[:, ~single], left)
            off = (shares @ draws) ** -exponent / clocks - 1
            drawn = " | ".join(f"{x / draws[0]:.2f}" if x or several else "-" for x in draws)
            print(
                f"| {gpu} | {'several GPUs' if several else 'one GPU'} | {len(some)} | {drawn}"
                f" | {off.mean():+.1%} | {np.sqrt((off**2).mean()):.1%} |"
            )


if __name__ == "__main__":
    main()
