"""What a node of a job has, as a line of JSON: `python -m executor.launch.node_check --names a,b --file F --port P`.

`planner doctor --launcher` starts it on every node of a short job. Only the standard library and psutil.

Source: which interface NCCL takes, without NCCL_SOCKET_IFNAME: InfiniBand's, then any but docker's and lo (NCCL's
documentation of the variable).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from executor.launch.nodes import node_name
from executor.launch.versions import driver_version, versions

LAST_CHOICE = ("docker", "lo")


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is here, and return 0."""
    parser = argparse.ArgumentParser(prog="executor.launch.node_check")
    parser.add_argument("--names", default="", help="of all nodes, with commas")
    parser.add_argument("--file", required=True, help="which all nodes must see")
    parser.add_argument("--port", required=True, type=int, help="of the rendezvous")
    options = parser.parse_args(argv)
    found = {
        "node": node_name(),
        "host": socket.gethostname(),
        "versions": {**versions(), **({"driver": driver} if (driver := driver_version()) else {})},
        "gpu_devices": len([*Path("/dev").glob("nvidia[0-9]*")]),
        "sees_file": Path(options.file).is_file(),
        "resolved": {name: addresses(name) for name in filter(None, options.names.split(","))},
        "port_free": is_free(options.port),
        "interfaces": interfaces(),
        "nccl_interface": os.environ.get("NCCL_SOCKET_IFNAME", ""),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def addresses(name: str) -> list[str]:
    """Return the addresses that a name leads to here; none where it is not known."""
    try:
        return sorted({str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def is_free(port: int) -> bool:
    """Return whether a process of this node can listen on a port."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def interfaces() -> list[str]:
    """Return the names of the interfaces that are up and have an address, in the order in which NCCL takes them."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    named = [
        name
        for name, found in psutil.net_if_addrs().items()
        if name in up and any(one.family in {socket.AF_INET, socket.AF_INET6} for one in found)
    ]
    return sorted(named, key=lambda name: (not name.startswith("ib"), name.startswith(LAST_CHOICE), name))


if __name__ == "__main__":
    sys.exit(main())
