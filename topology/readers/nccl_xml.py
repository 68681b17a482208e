"""NCCL's topology and graph files (`NCCL_TOPO_FILE`, `NCCL_TOPO_DUMP_FILE`, `NCCL_GRAPH_DUMP_FILE`), and RCCL's.

A file is kept as the tree it is, so that reading and writing lose nothing, attributes we do not know included. The
typed view next to it knows the elements of NCCL 2.30 (src/graph/xml.cc): system/cpu/pci/{gpu/{nvlink,c2c},nic/net},
RCCL's `xgmi`, and graphs/graph/channel. Files shipped by clouds have no `gpu` elements; NCCL fills them in by address.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from xml.etree.ElementTree import Element, ParseError, indent, tostring

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import iterparse

from topology.errors import BadInput
from topology.units import MIB, in_mib

MAX_BYTES = 8 * MIB
MAX_DEPTH = 64
MAX_ELEMENTS = 100_000

KNOWN_ATTRIBUTES = {
    "system": {"version"},
    "cpu": {"numaid", "affinity", "arch", "vendor", "familyid", "modelid", "host_hash"},
    "pci": {
        *("busid", "class", "vendor", "device", "subsystem_vendor", "subsystem_device"),
        *("link_speed", "link_width"),
    },
    "gpu": {"dev", "sm", "rank", "gdr", "mlopart", "gcn", "arch"},
    "nvlink": {"target", "count", "tclass"},
    "xgmi": {"target", "count", "tclass"},
    "c2c": {"bw", "count"},
    "nic": set(),
    "net": {*("name", "dev", "speed", "port", "latency", "guid", "maxconn", "gdr", "coll", "keep", "net"), "gin"},
    "graphs": {"version"},
    "graph": {
        *("id", "pattern", "crossnic", "nchannels", "speedintra", "speedinter", "latencyinter"),
        *("typeintra", "typeinter", "samechannels"),
    },
    "channel": set(),
}
# PCI classes: display controller (3D), network controller (InfiniBand), bridges.
GPU_CLASS = "0x030200"
NIC_CLASS = "0x020700"
SWITCH_CLASS = "0x068000"
BRIDGE_CLASS = "0x060400"


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkElement:
    """`count` links to `target`; a target of class 0x068000 is an NVSwitch, 0x030200 a GPU. `xgmi` is AMD's."""

    target: str
    count: int
    tclass: str
    xgmi: bool = False

    @property
    def to_switch(self) -> bool:
        return self.tclass == SWITCH_CLASS


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A leaf of the PCI tree. `bridges` are the addresses above it, from the CPU down."""

    busid: str
    device_class: str
    cpu: int  # position of the cpu element in the file
    bridges: tuple[str, ...] = ()
    link_speed_bytes_per_s: float | None = None  # one direction, after line coding; None when a VM hides it
    link_width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuElement:
    pci: PciDevice
    dev: int | None = None  # None where the file leaves the gpu element to NCCL
    rank: int | None = None
    sm: int | None = None
    mlopart: int | None = None  # half of a GPU that is split into two (Vera Rubin)
    links: tuple[NvlinkElement, ...] = ()
    c2c_bytes_per_s: float | None = None  # NCCL: bw [MB/s] x count


@dataclass(frozen=True, slots=True, kw_only=True)
class NetElement:
    name: str
    cpu: int
    pci: PciDevice | None  # None for a network device without a PCI address (virtual machines, Wi-Fi, VPN)
    dev: int | None = None
    port: int | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuElement:
    numa: int | None  # None where the file says -1
    affinity: str | None = None
    arch: str | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTopology:
    cpus: tuple[CpuElement, ...]
    gpus: tuple[GpuElement, ...]
    nets: tuple[NetElement, ...]
    devices: tuple[PciDevice, ...]  # leaves that are neither: NICs that the file names by address only
    bridges: tuple[PciDevice, ...] = ()
    unknown: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclGraph:
    """One search result: `channels` list ("gpu" or "net", device number) in ring or chain order."""

    id: int | None
    pattern: int | None
    channel_count: int | None
    channels: tuple[tuple[tuple[str, int | None], ...], ...]


def parse_xml(text: str, *, where: str = "the NCCL file") -> Element:
    """Return the element tree. Raises BadInput: not XML, entities or a DTD, too large, too deep, too many elements."""
    raw = text.encode("utf-8", errors="surrogatepass")
    if len(raw) > MAX_BYTES:
        raise BadInput(f"{where} is larger than {in_mib(MAX_BYTES)}", remedy="pass a smaller file")
    root: Element | None = None
    depth = seen = 0
    try:
        for event, node in iterparse(io.BytesIO(raw), events=("start", "end"), forbid_dtd=True):
            root = node if root is None else root
            depth += 1 if event == "start" else -1
            seen += event == "start"
            if depth > MAX_DEPTH or seen > MAX_ELEMENTS:
                raise BadInput(f"{where} is nested too deep or too long", remedy="pass one machine's file")
    except (ParseError, DefusedXmlException, ValueError, UnicodeError, LookupError) as error:
        raise BadInput(f"{where} is not readable XML", why=str(error) or type(error).__name__) from error
    if root is None:
        raise BadInput(f"{where} has no single root element")
    return root


def write_xml(root: Element) -> str:
    """Return the tree as indented text."""
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def unknown_parts(root: Element) -> tuple[str, ...]:
    """Name the elements and attributes that this reader does not interpret (they are kept all the same)."""
    found: dict[str, None] = {}
    for element in root.iter():
        known = KNOWN_ATTRIBUTES.get(element.tag)
        if known is None:
            found[f"<{element.tag[:60]}>"] = None
            continue
        for name in element.attrib:
            if name not in known:
                found[f"{element.tag}.{name[:60]}"] = None
    return tuple(found)


def read_topology(root: Element) -> NcclTopology:
    """Return the typed view of a `system` tree. Raises BadInput for another root; odd values become `problems`."""
    if root.tag != "system":
        raise BadInput(f"<{root.tag[:40]}> is not a NCCL topology", why="its root element is <system>")
    cpus: list[CpuElement] = []
    gpus: list[GpuElement] = []
    nets: list[NetElement] = []
    leaves: list[PciDevice] = []
    bridging: list[PciDevice] = []
    problems: list[str] = []
    for cpu in (child for child in root if child.tag == "cpu"):
        place = len(cpus)
        numa = _int(cpu.get("numaid"), problems, "cpu numaid")
        cpus.append(
            CpuElement(
                numa=numa if numa is not None and numa >= 0 else None,
                affinity=cpu.get("affinity"),
                arch=cpu.get("arch"),
                host=cpu.get("host_hash"),
            )
        )
        # Depth is bounded by parse_xml; the stack keeps file order.
        stack: list[tuple[Element, PciDevice | None, tuple[str, ...]]] = [(cpu, None, ())]
        while stack:
            element, pci, bridges = stack.pop()
            if element.tag == "pci":
                pci = _pci(element, place, bridges, problems)
                if pci.device_class == BRIDGE_CLASS or any(child.tag == "pci" for child in element):
                    bridging.append(pci)
                    bridges = (*bridges, pci.busid)
                elif not any(node.tag in {"gpu", "net"} for node in element.iter()):
                    if pci.device_class[:6] in {"0x0302", "0x0300"}:
                        gpus.append(GpuElement(pci=pci))
                    else:
                        leaves.append(pci)
            elif element.tag == "gpu" and pci is not None:
                gpus.append(_gpu(element, pci, problems))
                continue
            elif element.tag == "net":
                nets.append(_net(element, pci, place, problems))
                continue
            stack.extend((child, pci, bridges) for child in reversed(element))
    return NcclTopology(
        cpus=tuple(cpus),
        gpus=tuple(gpus),
        nets=tuple(nets),
        devices=tuple(leaves),
        bridges=tuple(bridging),
        unknown=unknown_parts(root),
        problems=tuple(problems),
    )


def read_graphs(root: Element) -> tuple[NcclGraph, ...]:
    """Return the search results of a `graphs` tree. Raises BadInput for another root."""
    if root.tag != "graphs":
        raise BadInput(f"<{root.tag[:40]}> is not a NCCL graph file", why="its root element is <graphs>")
    sink: list[str] = []
    graphs = []
    for graph in (child for child in root if child.tag == "graph"):
        attributes = graph.attrib
        graphs.append(
            NcclGraph(
                id=_int(attributes.get("id"), sink, "graph id"),
                pattern=_int(attributes.get("pattern"), sink, "graph pattern"),
                channel_count=_int(attributes.get("nchannels"), sink, "graph nchannels"),
                channels=tuple(
                    tuple((step.tag, _int(step.get("dev"), sink, "dev")) for step in channel)
                    for channel in graph
                    if channel.tag == "channel"
                ),
            )
        )
    return tuple(graphs)


def pcie_bytes_per_s(gt_per_s: float, lanes: int) -> float:
    """Return what a PCIe link carries in one direction: gen 1-2 lose 1/5 to 8b/10b coding, gen 3-5 2/130, later
    generations 14 of every 256 bytes of a flit (PCI-SIG base specification 6.0: 242 bytes of payload and headers).
    """
    coding = 0.8 if gt_per_s <= 5 else 128 / 130 if gt_per_s <= 32 else 242 / 256
    return gt_per_s * 1e9 * lanes * coding / 8


def normal_busid(busid: str) -> str:
    """Spell a PCI address `domain:bus:device.function` in lower case with a domain of four digits where it fits.

    nvidia-smi prints eight digits of domain, sysfs and NCCL four.
    """
    match = re.fullmatch(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])", busid.strip().lower())
    if match is None:
        return busid.strip().lower()
    domain = int(match.group(1) or "0", 16)
    return f"{domain:04x}:{match.group(2)}:{match.group(3)}.{match.group(4)}"


def _pci(element: Element, cpu: int, bridges: tuple[str, ...], problems: list[str]) -> PciDevice:
    attributes = element.attrib
    width = _int(attributes.get("link_width"), problems, "link_width")
    speed = re.match(r"\s*([0-9]{1,3}(?:\.[0-9]+)?)\s*GT/s", attributes.get("link_speed", ""))
    rate = pcie_bytes_per_s(float(speed.group(1)), width) if speed and width and 0 < width <= 64 else None
    return PciDevice(
        busid=normal_busid(attributes.get("busid", "")),
        device_class=attributes.get("class", ""),
        cpu=cpu,
        bridges=bridges,
        link_speed_bytes_per_s=rate,
        link_width=width or None,
    )


def _gpu(element: Element, pci: PciDevice, problems: list[str]) -> GpuElement:
    attributes = element.attrib
    links: list[NvlinkElement] = []
    c2c: float | None = None
    for child in element:
        if child.tag in {"nvlink", "xgmi"}:
            count = _int(child.get("count"), problems, f"{child.tag} count")
            target = normal_busid(child.get("target", ""))
            if count is None or count < 0:
                problems.append(f"{child.tag} of {pci.busid} has no usable count; it is not used")
                continue
            tclass = child.get("tclass", "")
            links.append(NvlinkElement(target=target, count=count, tclass=tclass, xgmi=child.tag == "xgmi"))
        elif child.tag == "c2c":
            rate, count = _float(child.get("bw")), _int(child.get("count"), problems, "c2c count")
            c2c = rate * 1e6 * count if rate is not None and count is not None else None
    return GpuElement(
        pci=pci,
        dev=_int(attributes.get("dev"), problems, "gpu dev"),
        rank=_int(attributes.get("rank"), problems, "gpu rank"),
        sm=_int(attributes.get("sm"), problems, "gpu sm"),
        mlopart=_int(attributes.get("mlopart"), problems, "gpu mlopart"),
        links=tuple(links),
        c2c_bytes_per_s=c2c,
    )


def _net(element: Element, pci: PciDevice | None, cpu: int, problems: list[str]) -> NetElement:
    attributes = element.attrib
    speed = _float(attributes.get("speed"))
    return NetElement(
        name=attributes.get("name", ""),
        cpu=cpu,
        pci=pci,
        dev=_int(attributes.get("dev"), problems, "net dev"),
        port=_int(attributes.get("port"), problems, "net port"),
        bytes_per_s=speed * 1e6 / 8 if speed is not None and speed > 0 else None,
    )


def _int(text: str | None, problems: list[str], what: str) -> int | None:
    """NCCL writes numbers as decimal or 0x hexadecimal. Anything else is a problem, not a zero."""
    if text is None or text == "":
        return None
    if re.fullmatch(r"[+-]?(?:0x[0-9a-fA-F]{1,16}|[0-9]{1,18})", text):
        return int(text, 16) if "x" in text else int(text)
    problems.append(f"{what} is {text[:40]!r}, not a number")
    return None


def _float(text: str | None) -> float | None:
    if text is None or not re.fullmatch(r"[+-]?[0-9]{1,12}(?:\.[0-9]{1,12})?", text):
        return None
    return float(text)
