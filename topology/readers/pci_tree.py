"""The position of a device in the PCI tree, and nvidia-smi's class for the path between two devices.

Used when there is no `topo -m` output, and to find the PCIe class of GPU pairs for which the matrix prints NVLink.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PciPlace:
    """`bridges` are addresses from the root down. NCCL lists a switch once, sysfs lists each of its ports."""

    busid: str
    host: str  # the host bridge (sysfs) or cpu element (NCCL) the tree hangs on
    bridges: tuple[str, ...] = ()
    numa: int | None = None
    tray: int = 0
    ports_listed: bool = False


def path_class(a: PciPlace, b: PciPlace) -> str | None:
    """Return PIX, PXB, PHB, NODE or SYS; None when the devices are in different trays or nothing is known of NUMA."""
    if a.tray != b.tray:
        return None
    shared = 0
    for left, right in zip(a.bridges, b.bridges, strict=False):
        if left != right:
            break
        shared += 1
    if a.host == b.host and shared:
        beyond = max(len(a.bridges), len(b.bridges)) - shared
        return "PIX" if beyond <= (1 if a.ports_listed else 0) else "PXB"
    if a.host == b.host:
        return "PHB"
    if a.numa is None or b.numa is None:
        return None
    return "NODE" if a.numa == b.numa else "SYS"
