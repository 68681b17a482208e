"""Collectives measured on a machine of ours compared with the model, which was not fitted to them.

Run as `python -m tests.bench.profile_table OUT.md CLUSTER PROFILE`. Two columns: from catalogue numbers alone, and with
every fourth size of the profile known and the others predicted.
"""

import argparse
import datetime as dt
from collections import defaultdict
from pathlib import Path

import numpy as np

from simulator.collectives.cost import CollectiveModel
from simulator.collectives.launch_mode import LaunchMode
from simulator.collectives.measured import MeasuredCollectives
from topology.catalog.cluster_file import load_cluster
from topology.profile.profile import CollectiveSample, read_profile
from topology.rates.groups import GroupShape

BANDS = ((65536, "<= 64 KiB"), (2**20, "<= 1 MiB"), (2**25, "<= 32 MiB"), (2**40, "> 32 MiB"))


def errors(model: CollectiveModel, samples: list[CollectiveSample]) -> dict[tuple[str, str], list[float]]:
    """Signed relative errors by (launch mode, size band) and by (launch mode, op)."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for s in samples:
        shape = GroupShape(ranks=s.ranks, ranks_per_node=s.ranks)
        predicted = float(model.time_s(s.op, float(s.nbytes), shape, launch=LaunchMode(s.launch)))
        band = next(name for bound, name in BANDS if s.nbytes <= bound)
        for key in ((s.launch, band), (s.launch, s.op), (s.launch, "all")):
            found[key].append(predicted / s.time_s - 1)
    return found


def main(out: Path, cluster_name: str, profile_path: str) -> None:
    """Write the table."""
    cluster = load_cluster(cluster_name)
    profile = read_profile(profile_path, cluster=cluster)
    samples = sorted(profile.collectives, key=lambda s: (s.op, s.ranks, s.launch, s.nbytes))
    sizes = sorted({s.nbytes for s in samples})
    known = [s for s in samples if sizes.index(s.nbytes) % 4 == 0]
    others = [s for s in samples if sizes.index(s.nbytes) % 4]
    alone = errors(CollectiveModel(cluster), others)
    given = errors(CollectiveModel(cluster, measured=MeasuredCollectives(known)), others)
    lines = [
        f"# Collectives on {profile.gpu}: predicted against our own measurement",
        "",
        f"Made on {dt.datetime.now(tz=dt.UTC):%Y-%m-%d} by `python -m tests.bench.profile_table {out.name} {cluster_name} {Path(profile_path).name}`.",
        f"Measured {profile.taken_at} by `planner doctor --measure`; driver {profile.driver}, {profile.versions}.",
        "The model's curves come from public nccl-tests tables, none of them of this machine. *every 4th known*: the",
        "profile gives every fourth size, the others are predicted. Both columns are scored on those others.",
        "Launch: *queued* is device time of a full stream, *graph* a replayed CUDA graph, *eager* a loop of calls from",
        "Python, which below about 1 MiB measures this host's speed at issuing them (27 to 50 us here), not the network.",
        "",
        "| launch | rows of | points | catalogue alone: mean absolute | bias | every 4th known: mean absolute | bias |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for key in sorted(alone):
        a, g = np.array(alone[key]), np.array(given[key])
        lines.append(
            f"| {key[0]} | {key[1]} | {len(a)} | {np.abs(a).mean():.1%} | {a.mean():+.1%} "
            f"| {np.abs(g).mean():.1%} | {g.mean():+.1%} |"
        )
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cluster")
    parser.add_argument("profile")
    options = parser.parse_args()
    main(options.out, options.cluster, options.profile)
