"""Reports a node of a job as a line of JSON: `python -m executor.launch.node_check --names a,b --file F`.

`planner doctor --launcher` starts it on every node of a short job. The first node listens at `--endpoint`, the
rendezvous of a run, and the others report whether they reach it. Only the standard library and psutil.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from executor.launch.nodes import connect, node_name
from executor.launch.roll_call import interfaces
from topology.versions import driver_version, versions

MEET_S = 20.0  # seconds for the nodes to reach the first one


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report, and return 0."""
    parser = argparse.ArgumentParser(prog="executor.launch.node_check")
    parser.add_argument("--names", default="", help="of all nodes, with commas")
    parser.add_argument("--file", required=True, help="which all nodes must see")
    parser.add_argument("--endpoint", default="", help="HOST:PORT of the rendezvous; nothing for one node")
    parser.add_argument("--address", default="", help="this node's address in the cluster, where it has one")
    options = parser.parse_args(argv)
    names = [*filter(None, options.names.split(","))]
    reached = meet(options.endpoint, first=names[:1] == [node_name()], others=len(names) - 1)
    found = {
        "node": node_name(),
        "host": socket.gethostname(),
        "versions": {**versions(), **({"driver": driver} if (driver := driver_version()) else {})},
        "gpu_devices": len([*Path("/dev").glob("nvidia[0-9]*")]),
        "sees_file": Path(options.file).is_file(),
        "resolved": {name: addresses(name) for name in names},
        **reached,
        "interfaces": interfaces(),
        "nccl_interface": os.environ.get("NCCL_SOCKET_IFNAME", ""),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def addresses(name: str) -> list[str]:
    """Return the addresses of a name on this node; empty if the name is unknown."""
    try:
        return sorted({str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def meet(endpoint: str, *, first: bool, others: int) -> dict[str, Any]:
    """Listen at the endpoint until the others have connected, or connect to it; return whether the port was free, and
    why it cannot be reached.
    """
    if not endpoint or others < 1:
        return {"port_free": True, "unreached": ""}
    if not first:
        found = connect(endpoint, MEET_S)
        if isinstance(found, socket.socket):
            found.close()
        return {"port_free": True, "unreached": found if isinstance(found, str) else ""}
    try:
        server = socket.create_server(("", int(endpoint.rpartition(":")[2])))
    except OSError:
        return {"port_free": False, "unreached": ""}
    ends, came = time.monotonic() + MEET_S, 0
    with server:
        while came < others and (left := ends - time.monotonic()) > 0:
            server.settimeout(left)
            with suppress(TimeoutError):
                server.accept()[0].close()
                came += 1
    return {"port_free": True, "unreached": ""}


if __name__ == "__main__":
    sys.exit(main())
