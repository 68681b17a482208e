"""Network interfaces of a node, and whether those named by environment variables can be used.

Source: NCCL's documentation of NCCL_SOCKET_IFNAME: prefixes of names separated by commas, = before exact names, ^
before excluded ones; without it InfiniBand interfaces, then any except docker's and lo. Gloo takes exact names.
"""

from __future__ import annotations

import os
import socket

import psutil

LAST_CHOICE = ("docker", "lo")
VARIABLES = {"cuda": "NCCL_SOCKET_IFNAME", "cpu": "GLOO_SOCKET_IFNAME"}


def interfaces() -> list[str]:
    """Return the names of the interfaces that are up and have an address, in the order in which NCCL takes them."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    named = [
        name
        for name, found in psutil.net_if_addrs().items()
        if name in up and any(one.family in {socket.AF_INET, socket.AF_INET6} for one in found)
    ]
    return sorted(named, key=lambda name: (not name.startswith("ib"), name.startswith(LAST_CHOICE), name))


def why_no_interface(device: str) -> str:
    """Return why ranks of this node could not connect to other nodes by the interfaces named in the environment; an
    empty string if they could, or none is named.
    """
    variable = VARIABLES[device]
    asked = os.environ.get(variable, "")
    if not asked or asked.startswith("^"):
        return ""
    here = interfaces()
    exact = device == "cpu" or asked.startswith("=")
    words = tuple(filter(None, asked.lstrip("=").split(",")))
    taken = [name for name in here if (name in words if exact else name.startswith(words))]
    if not taken:
        return f"{variable} is {asked}, and there are {', '.join(here)}"
    if all(name == "lo" for name in taken):
        return f"{variable} is {asked}, which no other node reaches; there are {', '.join(here)}"
    return ""
