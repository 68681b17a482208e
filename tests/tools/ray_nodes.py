"""A real Ray of two nodes on this machine, for tests and by hand.

    python -m venv /tmp/ray && /tmp/ray/bin/pip install 'ray[default]' -e '.[exec]'
    python -m tests.tools.ray_nodes FOLDER /tmp/ray/bin      starts it, prints how to use it, ends it with Ctrl-C

Each node is a raylet with a host name and a network of its own, four CPUs and four GPUs that are only counted. Root is
needed for that.

Source: `ray start --help`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.tools import node_networks
from tests.tools.node_networks import Networks

ROOT = Path(__file__).resolve().parents[2]
GPUS = 4
READY_S = 120.0


@dataclass
class RayCluster:
    """A Ray that runs. `environment` is what planner needs."""

    folder: Path
    programs: Path  # the folder of its `ray` and `python3`
    networks: Networks
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return next(iter(self.networks.addresses.values()))

    @property
    def environment(self) -> dict[str, str]:
        return {"RAY_API_SERVER_ADDRESS": f"http://{self.head}:8265"}

    def start_node(self, name: str) -> None:
        """Start the raylet of a node; the first is the head."""
        address = self.networks.addresses[name]
        head = ["--head", "--port=6379", "--dashboard-host=0.0.0.0"] if address == self.head else []
        joined = head or [f"--address={self.head}:6379"]
        counts = ["--num-cpus=4", f"--num-gpus={GPUS}", "--object-store-memory=80000000", "--disable-usage-stats"]
        words = [str(self.programs / "ray"), "start", "--block", f"--node-ip-address={address}", *joined, *counts]
        temporary = ["--temp-dir", str(self.folder / name)] if head else []
        environment = {
            **os.environ,
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "MESHWRIGHT_TEST_NODE": name,
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "5",
        }
        with (self.folder / f"{name}.out").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                self.networks.inside(name, [*words, *temporary]),
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kill all processes of a node, as the loss of its power does."""
        # Ray's agents write their names over their environment: they are known by what started them.
        with suppress(psutil.Error):
            for process in psutil.Process(self.processes[name].pid).children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("MESHWRIGHT_TEST_NODE") == name:
                    process.kill()
        self.processes[name].wait()

    def jobs(self) -> list[dict[str, Any]]:
        """Return the jobs that were submitted."""
        asked = f"{self.environment['RAY_API_SERVER_ADDRESS']}/api/jobs/"
        with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310 - our own
            return [one for one in json.load(answer) if one["submission_id"]]

    def wait_ready(self, nodes: int | None = None) -> None:
        ends, asked = time.monotonic() + READY_S, f"{self.environment['RAY_API_SERVER_ADDRESS']}/api/v0/nodes"
        wanted = self.networks.count if nodes is None else nodes
        while time.monotonic() < ends:
            with suppress(OSError), urllib.request.urlopen(asked, timeout=5) as answer:  # noqa: S310 - our own
                if answer.read().count(b'"ALIVE"') >= wanted:
                    return
            time.sleep(0.5)
        raise RuntimeError("\n".join(path.read_text(errors="replace") for path in self.folder.glob("*.out")))


def missing(programs: Path | None) -> list[str]:
    """Return what keeps a cluster from being started here; nothing where it can."""
    here = programs is not None and (programs / "ray").is_file()
    return [*node_networks.missing(), *([] if here else ["ray"])]


@contextmanager
def cluster(folder: Path, programs: Path, *, resolved: bool = True) -> Iterator[RayCluster]:
    """Start a cluster below a folder and yield it."""
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin"
    folder.mkdir(parents=True, exist_ok=True)
    with node_networks.connected(Networks("mr", "10.213.8", 2), resolved=resolved) as networks:
        found = RayCluster(folder, programs, networks)
        try:
            for number, name in enumerate(networks.addresses, start=1):
                found.start_node(name)
                found.wait_ready(number)
            yield found
        finally:
            for name in found.processes:
                found.kill(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", type=Path)
    options = parser.parse_args()
    if lacking := missing(options.programs):
        print(f"cannot be started here: {', '.join(lacking)}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # and so undo what was changed
    with cluster(options.folder, options.programs) as running, suppress(KeyboardInterrupt):
        print("".join(f"export {name}={value}\n" for name, value in running.environment.items()), end="", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
