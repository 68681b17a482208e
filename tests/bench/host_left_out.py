"""How well runs of one kind of layer are predicted from the other kinds on the same host.

    python tests/bench/host_left_out.py

Kinds are the narrow runs of the shipped profiles, by runtime and plan; each is left out in turn, and costs are fitted
to the rest (`simulator.fitting.host_fit`). A row is a choice of how much costs may differ from the described ones
beyond the host's speed; errors are logarithms of predicted over measured steps.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from simulator.calibration.calibration import Calibration  # noqa: E402 - the path comes first
from simulator.fitting import host_fit, runtime_fit  # noqa: E402
from topology import codec  # noqa: E402
from topology.catalog.cluster_file import load_cluster  # noqa: E402
from topology.profile.profile import read_profile  # noqa: E402

PROFILES = (
    "h200x4", "h200x2", "h200x1", "h200x1_draw11", "h200x1_draw12", "h200x2_draw5", "h200x2_draw6", "h200x2_draw7",
    "h200x2_draw8", "h200x2_draw9", "h200x2_draw10", "h200x2_draw25", "h200x2_fresh", "h200x2_next", "h200x4_draw1",
    "h200x4_draw3", "h200x4_draw4", "h100x4_draw2",
)  # fmt: skip
CHOICES = ((0.4, 0.15), (0.3, 0.1), (0.2, 0.1), (0.1, 0.1))  # spreads of costs and of launches
Runs = tuple[str, host_fit.HostRuns, list[str]]


def runs_in(name: str) -> list[Runs]:
    """Return the narrow runs of a profile by runtime, with the kind of each."""
    profile, machine = (
        read_profile(ROOT / f"examples/profiles/{name}.json"),
        load_cluster("dgx-h100" if name.startswith("h100") else "h200x4"),
    )
    gpu, found = Calibration(gpu=machine.slowest_kind), []
    for key, runs in runtime_fit._by_runtime(profile).items():
        fit = runtime_fit._Fit(runs, machine, gpu, 0.0)
        if fit.host_bound:
            kinds = [codec.fingerprint((run.plan, run.model.moe, run.runtime)) for run in fit.host_bound]
            found.append((key[0], fit.host_runs(), kinds))
    return found


def without(runs: host_fit.HostRuns, kept: list[int]) -> host_fit.HostRuns:
    return host_fit.HostRuns(
        described=runs.described,
        seconds=runs.seconds[kept],
        spreads=runs.spreads[kept],
        occurring=[runs.occurring[place] for place in kept],
        predict=lambda places, hosts: runs.predict([kept[place] for place in places], hosts),
    )


def missed(groups: list[Runs]) -> Iterator[tuple[str, float]]:
    """Yield (runtime, error) of every run, predicted from the kinds other than its own."""
    for index, (runtime, runs, kinds) in enumerate(groups):
        for kind in dict.fromkeys(kinds):
            kept = [place for place, other in enumerate(kinds) if other != kind]
            rest = [one[1] for place, one in enumerate(groups) if place != index]
            if not kept:
                continue
            costs = host_fit.fit_hosts([without(runs, kept), *rest]).costs[0]
            out = [place for place, other in enumerate(kinds) if other == kind]
            for place, seconds in zip(out, runs.predict(out, [costs] * len(out)), strict=True):
                yield runtime, math.log(float(seconds) / runs.seconds[place])


def main() -> None:
    profiles = [runs_in(name) for name in PROFILES]
    print("| spread of costs, of launches | runs | root mean square | meshwright | torchtitan |")
    print("|---|--:|--:|--:|--:|")
    for host_fit.COST_SPREAD, host_fit.LAUNCH_SPREAD in CHOICES:
        found = [one for groups in profiles for one in missed(groups)]
        rms = [
            np.sqrt(np.mean(np.square([error for of, error in found if runtime in {"", of}])))
            for runtime in ("", "meshwright", "torchtitan")
        ]
        print(f"| {host_fit.COST_SPREAD}, {host_fit.LAUNCH_SPREAD} | {len(found)} |", *(f"{one:.3f} |" for one in rms))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
