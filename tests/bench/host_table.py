"""What hosts took for the layers in the shipped profiles: the fields of a runtime's [host], one line a profile.

    python tests/bench/host_table.py > table.md

Each line is the fit of one host's runs of one and two layers (`simulator.fitting.runtime_fit`); whole models are never
looked at.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from simulator.fitting.calibration_fit import calibrated  # noqa: E402 - the path comes first
from topology.catalog.cluster_file import load_cluster  # noqa: E402
from topology.profile.profile import read_profile  # noqa: E402

PROFILES = (
    "h200x2", "h200x2_fresh", "h200x2_next", "h200x4", "h200x4_draw1", "h100x4_draw2", "h200x4_draw3",
)  # fmt: skip
FIELDS = {
    "launch_s": 1e6,
    "fsdp_layer_s": 1e3,
    "ddp_layer_s": 1e3,
    "tp_layer_s": 1e3,
    "cp_layer_s": 1e3,
    "checkpoint_s": 1e3,
    "selective_s": 1e3,
    "step_s": 1e3,
    "cut_step_s": 1e3,
    "rest_s": 1e3,
    "fsdp_rest_s": 1e3,
    "tp_rest_s": 1e3,
    "cp_rest_s": 1e3,
    "data_token_s": 1e6,
}


def main() -> None:
    units = [f"{name.removesuffix('_s')} {'µs' if scale == 1e6 else 'ms'}" for name, scale in FIELDS.items()]
    print("| profile | runtime |", " | ".join(units), "|")
    print("|---|---|" + "--:|" * len(units))
    for name in PROFILES:
        found = calibrated(
            read_profile(ROOT / f"examples/profiles/{name}.json"),
            load_cluster("dgx-h100" if name.startswith("h100") else "h200x4"),
        )
        assert found is not None
        for (runtime, compiled), costs in sorted(found.runtimes.items()):
            if not compiled and "launch_s" in costs.host:
                cells = [f"{costs.host[f] * scale:.2g}" if f in costs.host else "" for f, scale in FIELDS.items()]
                print(f"| {name} | {runtime} |", " | ".join(cells), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    main()
