"""The nodes of a run meet before their ranks start, so that missing nodes are soon known by name.

The host of the rendezvous listens at its port until every other node has sent its name, and then notifies all of them.
torch's own rendezvous at the same port follows; it can wait for slow imports, since all nodes are present.

Network interfaces: NCCL's documentation of NCCL_SOCKET_IFNAME has prefixes of names separated by commas, = before exact
names, ^ before excluded ones; without it InfiniBand interfaces, then any except docker's and lo. Gloo takes exact
names.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import psutil

from executor.launch.local_ranks import Rendezvous
from executor.launch.nodes import CONNECT_S, POLL_S, absent_words, connect, own_addresses

HOST_S = 8.0  # the host waits longer than its guests, so that they report a closed port first
MOST_BYTES = 1024  # of a name, or of the reason why the nodes do not meet
COMPLETE = "complete"
LAST_CHOICE = ("docker", "lo")
VARIABLES = {"cuda": "NCCL_SOCKET_IFNAME", "cpu": "GLOO_SOCKET_IFNAME"}


def why_no_meeting(meeting: Rendezvous, node: str, patience_s: float) -> str:
    """Return why not all nodes meet at the endpoint within about `patience_s` seconds; an empty string if they do.

    `node` is this agent's name, NAME-PID.
    """
    host, _, port = meeting.endpoint.rpartition(":")
    ours = meeting.address == host if meeting.address else _leads_here(host, int(port))
    server = _listen(int(port)) if ours else None
    if server is None:  # also on a second agent of one machine, which finds the port in use
        return _visit(meeting, node, patience_s)
    with server:
        return _host(server, meeting, node, patience_s + HOST_S)


def _listen(port: int) -> socket.socket | None:
    """Return a socket that listens at a port of all addresses; None if the port is in use."""
    with suppress(OSError):
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    with suppress(OSError):
        return socket.create_server(("", port))
    return None


def _leads_here(host: str, port: int) -> bool:
    with suppress(OSError):
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        return bool({str(one[4][0]) for one in found} & own_addresses())
    return False


def _host(server: socket.socket, meeting: Rendezvous, node: str, patience_s: float) -> str:
    """Wait for the other nodes' names, and send each of them the outcome."""
    ends = time.monotonic() + patience_s
    with ExitStack() as opened:
        guests: dict[str, socket.socket] = {}
        while 1 + len(guests) < meeting.count and (left := ends - time.monotonic()) > 0:
            server.settimeout(left)
            with suppress(OSError):
                guest = opened.enter_context(server.accept()[0])
                guest.settimeout(CONNECT_S)
                said = ""
                with suppress(OSError):
                    said = _line(guest)
                word, _, name = said.partition(" ")
                if word == meeting.run_id and name:
                    guests[name] = guest
                else:  # not a node of this run, or a slow one that tries again
                    guest.close()
            guests = {name: guest for name, guest in guests.items() if _waits(guest)}
        absent = _absent_words([node, *guests], meeting, patience_s)
        for guest in guests.values():
            with suppress(OSError):
                guest.sendall(f"{absent or COMPLETE}\n".encode())
                guest.recv(1)  # guests close first, so that no closing connection keeps the port busy here
        return absent


def _waits(guest: socket.socket) -> bool:
    """Return whether a guest that has sent its name is still connected."""
    with suppress(OSError):
        return not select.select([guest], [], [], 0)[0] or guest.recv(1, socket.MSG_PEEK) != b""
    return False


def _visit(meeting: Rendezvous, node: str, patience_s: float) -> str:
    """Send this node's name to the host and return its answer."""
    ends = time.monotonic() + patience_s
    while True:
        found = connect(meeting.endpoint, ends - time.monotonic())
        if isinstance(found, str):
            return f"{_name(node)} does not reach {meeting.endpoint}, where the nodes meet: {found}"
        with found, suppress(OSError):
            found.settimeout(patience_s + 2 * HOST_S)
            found.sendall(f"{meeting.run_id} {node}\n".encode())
            if answer := _line(found):
                return "" if answer == COMPLETE else answer
        if time.monotonic() >= ends:
            return f"{_name(node)} had no answer at {meeting.endpoint}, where nodes meet: another program has the port"
        time.sleep(POLL_S)


def _line(source: socket.socket) -> str:
    """Return the first line that arrives; an empty string if it does not end within bounds."""
    text = b""
    while not text.endswith(b"\n") and len(text) < MOST_BYTES and (more := source.recv(MOST_BYTES)):
        text += more
    return text.decode(errors="replace").strip() if text.endswith(b"\n") else ""


def _absent_words(here: Sequence[str], meeting: Rendezvous, waited_s: float) -> str:
    """Return a sentence on missing nodes; empty if there are none."""
    if len(here) >= meeting.count:
        return ""
    what = f"{len(here)} of {meeting.count} nodes began within {waited_s:.0f} s"
    return f"{what} ({', '.join(map(_name, here[:8]))}){absent_words(here, meeting.names)}"


def _name(node: str) -> str:
    return node.rpartition("-")[0]


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
