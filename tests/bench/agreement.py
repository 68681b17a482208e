"""How far analytical model and simulation are apart on random plans, term by term, worst last.

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
    told.sort(key=lambda pair: abs(pair[1].time_error))
    for drawn, both in told[-args.show :]:
        _show(drawn, both)
    errors = np.array([abs(both.time_error) for _, both in told])
    print(f"{np.mean(errors < 0.03):.1%} within 3%, {np.mean(errors < 0.01):.1%} within 1%, worst {errors.max():.1%}")


def _show(drawn: Drawn, both: Told) -> None:
    first, second = both.step_s
    print(f"{both.time_error:+7.1%} {1e3 * first:9.3f} {1e3 * second:9.3f} ms  {drawn.kind}")
    for name, (formula, simulated) in both.parts_s.items():
        if abs(formula - simulated) > 0.003 * second:
            print(f"{'':8}{1e3 * formula:9.3f} {1e3 * simulated:9.3f}  {name}")


if __name__ == "__main__":
    main()
