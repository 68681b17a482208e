"""Host names and networks of their own for the nodes of a cluster on this machine: namespaces behind a bridge.

Root is needed, and Debian's iproute2 and util-linux. The names may stand in /etc/hosts meanwhile.

Sources: ip-netns(8), nsenter(1), unshare(1).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("ip", "nsenter", "unshare")
HOSTS = Path("/etc/hosts")


@dataclass(frozen=True)
class Networks:
    """Nodes NAME1, NAME2, ... with addresses of one network of 254."""

    name: str
    network: str  # such as 10.213.7
    count: int

    @property
    def addresses(self) -> dict[str, str]:
        """Return the address of each node."""
        return {f"{self.name}{number}": f"{self.network}.{number}" for number in range(1, self.count + 1)}

    @property
    def here(self) -> str:
        """Return this machine's address for the nodes."""
        return f"{self.network}.254"

    def inside(self, name: str, words: Sequence[str], *, host: str | None = None) -> list[str]:
        """Return the command that runs another one on a node, which has its name or that of `host` there."""
        apart = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "sh", "-c"]
        return [*apart, 'hostname "$1"; shift; exec "$@"', "sh", host or name, *words]


def missing(programs: Sequence[str] = ()) -> list[str]:
    """Return what keeps nodes from being made here, and which other programs are not here; nothing where all is."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    absent = [name for name in (*PROGRAMS, *programs) if shutil.which(name, path=path) is None]
    if absent or os.geteuid():
        return [*absent, *(["root"] if os.geteuid() else [])]
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0
    return [] if made else ["the right to make namespaces"]


@contextmanager
def connected(found: Networks, *, resolved: bool = True) -> Iterator[Networks]:
    """Make the nodes' networks; with `resolved` their names stand in /etc/hosts meanwhile."""
    _disconnect(found)  # what a killed run left
    try:
        _connect(found)
        with named(found.addresses if resolved else {}):
            yield found
    finally:
        _disconnect(found)


@contextmanager
def named(addresses: Mapping[str, str]) -> Iterator[None]:
    """Let names lead to addresses on this machine and its nodes."""
    lines = "".join(f"{address} {name} # a test of meshwright\n" for name, address in addresses.items())
    try:
        HOSTS.write_text(HOSTS.read_text() + lines)
        yield
    finally:
        HOSTS.write_text(HOSTS.read_text().replace(lines, "") if lines else HOSTS.read_text())


def _connect(found: Networks) -> None:
    bridge = f"{found.name}bridge"
    _ip(f"link add {bridge} type bridge")
    _ip(f"addr add {found.here}/24 dev {bridge}")
    _ip(f"link set {bridge} up")
    for name, address in found.addresses.items():
        _ip(f"netns add {name}")
        _ip(f"link add {name} type veth peer name eth0 netns {name}")
        _ip(f"link set {name} master {bridge} up")
        _ip(f"-n {name} addr add {address}/24 dev eth0")
        _ip(f"-n {name} link set eth0 up")
        _ip(f"-n {name} link set lo up")


def _disconnect(found: Networks) -> None:
    # A network goes when its last process does; its link to the bridge goes at once.
    links = [*(f"link del {name}" for name in found.addresses), f"link del {found.name}bridge"]
    for words in (*links, *(f"netns del {name}" for name in found.addresses)):
        with suppress(subprocess.CalledProcessError):
            _ip(words)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)
