"""Linux's sysfs, which needs no driver tool: the PCI tree, link speeds and widths, NUMA nodes, NICs, and memory.

Everything is read below a given root, so that tests can build a small tree. A missing file gives None, never an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from topology.readers.nccl_xml import pcie_bytes_per_s

NVIDIA = 0x10DE
MAX_ENTRIES = 4096
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """Speeds in GT/s per lane, widths in lanes, as the kernel reports them now and at most."""

    speed_gt: float | None = None
    speed_gt_max: float | None = None
    width: int | None = None
    width_max: int | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """One direction, with the lanes in use but the best speed: an idle link clocks down, it does not go narrow."""
        speed = self.speed_gt_max if self.speed_gt_max is not None else self.speed_gt
        return pcie_bytes_per_s(speed, self.width) if speed and self.width else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SysfsGpu:
    place: PciPlace
    link: PcieLink


@dataclass(frozen=True, slots=True, kw_only=True)
class SysfsNic:
    """`name` is the InfiniBand device if there is one, else the network interface."""

    name: str
    interfaces: tuple[str, ...] = ()
    rdma: bool = False
    place: PciPlace | None = None
    link: PcieLink | None = None
    bytes_per_s: float | None = None
    up: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SysfsSnapshot:
    gpus: tuple[SysfsGpu, ...] = ()
    nics: tuple[SysfsNic, ...] = ()
    memory_bytes: int | None = None  # of the host


def read_sysfs(root: str | Path = "/") -> SysfsSnapshot:
    """Read `root`/sys and `root`/proc. Never raises; an absent tree gives an empty snapshot."""
    sys = Path(root) / "sys"
    gpus = []
    for device in _entries(sys / "bus/pci/devices"):
        if _hex(device / "vendor") == NVIDIA and (_hex(device / "class") or 0) >> 8 in {0x0300, 0x0302}:
            place = _place(device)
            if place is not None:
                gpus.append(SysfsGpu(place=place, link=_link(device)))
    return SysfsSnapshot(
        gpus=tuple(sorted(gpus, key=lambda gpu: gpu.place.busid)),
        nics=tuple(_nics(sys)),
        memory_bytes=_memory_bytes(Path(root) / "proc/meminfo"),
    )


def _memory_bytes(path: Path) -> int | None:
    found = re.match(r"MemTotal:\s*([0-9]{1,15}) kB", _read(path) or "")
    return 1024 * int(found.group(1)) if found else None


def _nics(sys: Path) -> Iterator[SysfsNic]:
    interfaces: dict[str, list[str]] = {}
    for entry in _entries(sys / "class/net"):
        place = _place(entry / "device")
        if place is not None:
            interfaces.setdefault(place.busid, []).append(entry.name)
    claimed: set[str] = set()
    for entry in _entries(sys / "class/infiniband"):
        place = _place(entry / "device")
        names = interfaces.get(place.busid, []) if place else []
        claimed.update(names)
        state = _read(entry / "ports/1/state")
        rate = re.match(r"([0-9]{1,5}(?:\.[0-9]+)?)\s*Gb", _read(entry / "ports/1/rate") or "")
        yield SysfsNic(
            name=entry.name,
            interfaces=tuple(names),
            rdma=True,
            place=place,
            link=_link(entry / "device"),
            bytes_per_s=float(rate.group(1)) * 1e9 / 8 if rate else None,
            up="ACTIVE" in state if state else None,
        )
    for name in (name for names in interfaces.values() for name in names if name not in claimed):
        entry = sys / "class/net" / name
        speed = _positive(entry / "speed")  # Mb/s; -1 when the link is down
        state = _read(entry / "operstate")
        yield SysfsNic(
            name=name,
            interfaces=(name,),
            place=_place(entry / "device"),
            link=_link(entry / "device"),
            bytes_per_s=speed * 1e6 / 8 if speed is not None else None,
            up=state == "up" if state else None,
        )


def _place(device: Path) -> PciPlace | None:
    """Follow the link to the device's real directory; the directories above it are its bridges."""
    try:
        parts = device.resolve().parts
    except (OSError, RuntimeError):
        return None
    chain = [part for part in parts if _ADDRESS.fullmatch(part)]
    hosts = [part for part in parts if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)]
    if not chain or not device.exists():
        return None
    numa = _number(device / "numa_node")
    return PciPlace(
        busid=chain[-1],
        host=hosts[-1] if hosts else "",
        bridges=tuple(chain[:-1]),
        numa=int(numa) if numa is not None and numa >= 0 else None,
        ports_listed=True,
    )


def _link(device: Path) -> PcieLink:
    width, width_max = _positive(device / "current_link_width"), _positive(device / "max_link_width")
    return PcieLink(
        speed_gt=_positive(device / "current_link_speed"),
        speed_gt_max=_positive(device / "max_link_speed"),
        width=int(width) if width is not None else None,
        width_max=int(width_max) if width_max is not None else None,
    )


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())[:MAX_ENTRIES]
    except OSError:
        return []


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(4096).decode("utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _number(path: Path) -> float | None:
    match = re.match(r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?", _read(path) or "")
    return float(match.group()) if match else None


def _positive(path: Path) -> float | None:
    """Return a number above zero; None for zero and below, which drivers write for what they do not know."""
    number = _number(path)
    return number if number is not None and number > 0 else None


def _hex(path: Path) -> int | None:
    match = re.fullmatch(r"0x([0-9a-f]{1,8})", _read(path) or "")
    return int(match.group(1), 16) if match else None
