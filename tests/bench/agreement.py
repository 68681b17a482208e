"""How far closed form and simulation are apart on random plans, term by term, worst last.

python -m tests.bench.agreement --each 8 [--profile examples/profiles/h200x4.json] [--show 10]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from simulator.fitting.calibration_fit import calibrated
from tests.simulator.agreement_plans import Drawn, Told, draw_plans, tell
from topology.catalog.clusters import cluster
from topology.profile.profile import read_profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=8, help="plans of every runtime under every schedule")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--show", type=int, default=10, help="the worst so many plans, term by term")
    args = parser.parse_args()
    calibration = calibrated(read_profile(args.profile), cluster("h200x4")) if args.profile else None
    plans = draw_plans(args.each, seed=args.seed, calibration=calibration)
    told = [(drawn, tell(drawn)) for drawn in plans]
    for what in ("time_error", "memory_error"):
        told.sort(key=lambda pair: abs(getattr(pair[1], what)))
        for drawn, both in told[-args.show :]:
            _show(drawn, both, memory=what == "memory_error")
    for what in ("time_error", "memory_error"):
        errors = np.array([abs(getattr(both, what)) for _, both in told])
        print(
            f"{what}: {np.mean(errors < 0.03):.1%} within 3%, {np.mean(errors < 0.01):.1%} within 1%, worst {errors.max():.1%}"
        )


def _show(drawn: Drawn, both: Told, *, memory: bool) -> None:
    (first, second), error = (both.peak_bytes, both.memory_error) if memory else (both.step_s, both.time_error)
    unit, parts = (2**30, {}) if memory else (1e-3, both.parts_s)
    print(f"{error:+7.1%} {first / unit:9.3f} {second / unit:9.3f} {'GiB' if memory else 'ms'}  {drawn.kind}")
    for name, (formula, simulated) in parts.items():
        if abs(formula - simulated) > 0.003 * second:
            print(f"{'':8}{formula / unit:9.3f} {simulated / unit:9.3f}  {name}")


if __name__ == "__main__":
    main()
