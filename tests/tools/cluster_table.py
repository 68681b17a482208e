"""What a person sees who runs plans through schedulers that are real: the table of examples/cluster/README.md.

    python -m tests.tools.cluster_table FOLDER [--ray BIN] [NAME ...]

It runs the cases named, such as slurm-smoke or ray-cancel, or all, and adds a line for each to FOLDER/rows.jsonl. Slurm
is that of `slurm_nodes`, Ray that of `ray_nodes`, Kubernetes that of `kube_api`; their nodes have networks of their own
on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.tools import cluster_cases as cases
from tests.tools import kube_api, ray_nodes, slurm_nodes
from tests.tools.cluster_cases import Case, Row

ROOT = Path(__file__).resolve().parents[2]

# Cases of one cluster, and how that is made.
SLURM: tuple[tuple[dict[str, Any], tuple[Callable[[Case, Any], Row], ...]], ...] = (
    (
        {},
        (
            cases.smoke,
            cases.plan,
            cases.tune,
            cases.tune_preempted,
            cases.tune_node_lost,
            cases.tune_each,
            cases.tune_each_preempted,
            cases.tune_each_killed,
            cases.cancel,
            cases.node_lost,
            cases.preempted,
            cases.requeued,
            cases.time_limit,
            cases.rank_killed,
            cases.controller_killed,
            cases.port_closed,
            cases.versions_differ,
            cases.wrong_interface,
        ),
    ),
    ({"resolved": False}, (cases.unresolved,)),
    ({"memory_mib": 500}, (cases.out_of_memory,)),
    ({"nodes": 3}, (cases.node_missing,)),
)

RAY = (
    cases.smoke,
    cases.plan,
    cases.tune,
    cases.tune_each,
    cases.cancel,
    cases.rank_killed,
    cases.budget_over,
    cases.no_room,
    cases.node_lost,
)

POD = (cases.smoke, cases.plan, cases.tune_pod, cases.cancel, cases.pod_lost, cases.pod_preempted, cases.pod_unresolved)
KUBERNETES = {
    "kubernetes": (*POD, cases.pods_too_long),
    "jobset": (*POD, cases.pods_too_long),
    "trainjob": (*POD, cases.budget_over),
}


def environment(cluster: Any, folder: Path) -> dict[str, str]:
    """Return what planner is started with: this checkout, this Python, and a folder of its own for runs."""
    paths = {
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    home = {"XDG_DATA_HOME": str(folder / "data"), "NO_COLOR": "1", "COLUMNS": "160"}
    return {**os.environ, **paths, **home, **cluster.environment}


def run_case(run: Callable[[Case, Any], Row], launcher: str, cluster: Any, folder: Path) -> None:
    """Run a case and add its row to the file."""
    name = f"{launcher}-{run.__name__}"
    case = Case(name=name, folder=folder / name, launcher=launcher, environment=environment(cluster, folder))
    row = run(case, cluster)
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1), flush=True)


def run_slurm(folder: Path, names: Sequence[str]) -> None:
    """Run the cases of Slurm that are named, or all."""
    if lacking := slurm_nodes.missing():
        print(f"Slurm cannot be started here: {', '.join(lacking)}", file=sys.stderr)
        return
    for number, (how, wanted) in enumerate(SLURM):
        todo = [one for one in wanted if not names or f"slurm-{one.__name__}" in names]
        if not todo:
            continue
        with slurm_nodes.cluster(folder / f"slurm{number}", **how) as cluster:
            for run in todo:
                cluster.wait_ready()
                run_case(run, "slurm", cluster, folder)
                with suppress(subprocess.SubprocessError):
                    cluster.ask("scancel", "-u", "root")
                    time.sleep(2)


def run_ray(folder: Path, names: Sequence[str], programs: Path | None) -> None:
    """Run the cases of Ray that are named, or all."""
    if programs is None or (lacking := ray_nodes.missing(programs)):
        print(f"Ray cannot be started here: {', '.join(lacking) if programs else '--ray'}", file=sys.stderr)
        return
    todo = [one for one in RAY if not names or f"ray-{one.__name__}" in names]
    if todo:
        with ray_nodes.cluster(folder / "ray", programs) as cluster:
            for run in todo:
                cluster.wait_ready()
                run_case(run, "ray", cluster, folder)


def run_kubernetes(folder: Path, names: Sequence[str]) -> None:
    """Run the cases of Kubernetes that are named, or all: a real kubectl, an API server of ours."""
    if lacking := kube_api.missing():
        print(f"Kubernetes cannot be imitated here: {', '.join(lacking)}", file=sys.stderr)
        return
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of the pods
    with kube_api.cluster(folder / "kube") as cluster:
        for launcher, wanted in KUBERNETES.items():
            for run in wanted:
                if not names or f"{launcher}-{run.__name__}" in names:
                    run_case(run, launcher, cluster, folder)
                    for plural, name in list(cluster.objects):
                        cluster.delete(plural, name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--ray", type=Path, help="folder of the programs of an environment that has ray and torch")
    options = parser.parse_intermixed_args()
    # So that what was changed is undone, and Ctrl-C reaches planner where a shell in the background ignores it.
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.default_int_handler)
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not options.names or any(one.startswith("slurm-") for one in options.names):
        run_slurm(folder, options.names)
    if not options.names or any(one.startswith("ray-") for one in options.names):
        run_ray(folder, options.names, options.ray)
    if not options.names or any(one.partition("-")[0] in KUBERNETES for one in options.names):
        run_kubernetes(folder, options.names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
