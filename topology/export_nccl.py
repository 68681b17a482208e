"""The cluster as NCCL's topology file (`NCCL_TOPO_FILE`). Format: NVIDIA/nccl @5067397c src/graph/xml.cc."""

from __future__ import annotations

import math
from dataclasses import replace

from topology.cluster import Cluster, Gpu, Link, LinkKind, Nic, Node, VertexKind
from topology.errors import BadCluster
from topology.nccl_xml import BRIDGE_CLASS, GPU_CLASS, NIC_CLASS, SWITCH_CLASS, Element, write_xml
from topology.node_rates import link_rates
from topology.platform import PCIE_BYTES_PER_S, pcie_generation

ANY_NVSWITCH = "fffffff:ff:ff.0"  # what NCCL itself writes where it sees one fabric and no single switch
GT_PER_S = {"gen3": "8.0", "gen4": "16.0", "gen5": "32.0", "gen6": "64.0"}
# The processors from which NCCL takes the rate between sockets (topo.cc): Arm, AMD, or a recent Intel.
ARM = {"arch": "arm64"}
AMD = {"arch": "x86_64", "vendor": "AuthenticAMD", "familyid": "175", "modelid": "1"}
INTEL = {"arch": "x86_64", "vendor": "GenuineIntel", "familyid": "6", "modelid": "143"}
AMD_NCCL_BYTES_PER_S = 16e9


def to_nccl_xml(cluster: Cluster, node: int = 0, tray: int = 0) -> str:
    """Return one host as an `NCCL_TOPO_FILE`: a node, or one tray of a rack. Raises BadCluster if there is none.

    NCCL wants one operating system per file and joins the trays of an NVLink domain itself.

    Bus ids that are not known are invented, in order; NCCL matches GPUs by bus id, so such a file is for simulation.
    A GPU whose NVLinks are gone keeps an `nvlink` element with count 0: without one, NCCL asks the driver again.
    """
    host = _tray(_node_at(cluster, node), tray)
    if not host.gpus:
        raise BadCluster(f"node {node} of {cluster.name} has no tray {tray}")
    return write_xml(_Host(cluster, host).system())


def _tray(node: Node, tray: int) -> Node:
    return replace(
        node,
        gpus=tuple(gpu for gpu in node.gpus if gpu.tray == tray),
        nics=tuple(nic for nic in node.nics if nic.tray == tray),
        vertices=tuple(v for v in node.vertices if v.tray == tray or v.kind is VertexKind.NVSWITCH),
    )


def _node_at(cluster: Cluster, number: int) -> Node:
    left = number
    for group in cluster.groups:
        if 0 <= left < group.count:
            return group.node
        left -= group.count
    raise BadCluster(f"{cluster.name} has {cluster.node_count} nodes, there is no node {number}")


class _Host:
    """One host on its way to a tree: children by parent, bus ids by vertex."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.cluster, self.node = cluster, node
        self.gpus = {gpu.vertex: gpu for gpu in node.gpus}
        self.nics = {nic.vertex: nic for nic in node.nics}
        switches = [v.id for v in node.vertices if v.kind in {VertexKind.PCIE_SWITCH, VertexKind.ROOT_PORT}]
        self.cpus = [v.id for v in node.vertices if v.kind is VertexKind.CPU] or ["cpu0"]
        self.bus = {gpu.vertex: gpu.pci_bus_id or f"0000:{0x10 + i:02x}:00.0" for i, gpu in enumerate(node.gpus)}
        self.bus |= {switch: f"0001:{i:02x}:00.0" for i, switch in enumerate(switches)}
        self.bus |= {nic: f"0002:{i:02x}:00.0" for i, nic in enumerate(self.nics)}
        self.up: dict[str, Link] = {}
        self.below: dict[str, list[str]] = {}
        self._hang()

    def _hang(self) -> None:
        """Find each device's parent by walking outwards from the CPUs; what no link reaches hangs on the first CPU."""
        seen, frontier = set(self.cpus), list(self.cpus)
        while frontier:
            parent = frontier.pop(0)
            for link in self.node.links:
                if link.kind not in {LinkKind.PCIE, LinkKind.C2C} or parent not in {link.a, link.b}:
                    continue
                child = link.b if link.a == parent else link.a
                if child in seen or child not in self.bus or (parent in self.gpus or parent in self.nics):
                    continue
                seen.add(child)
                self.up[child] = link
                self.below.setdefault(parent, []).append(child)
                frontier.append(child)
        for vertex in [*self.gpus, *self.nics]:
            if vertex not in seen:
                self.below.setdefault(self.cpus[0], []).append(vertex)

    def system(self) -> Element:
        processors = tuple(
            Element(
                tag="cpu",
                attributes={"numaid": str(number), "affinity": "ffffffff", **self._processor()},
                children=self._devices(cpu),
            )
            for number, cpu in enumerate(self.cpus)
        )
        return Element(tag="system", attributes={"version": "1"}, children=processors)

    def _processor(self) -> dict[str, str]:
        if any(link.kind is LinkKind.C2C for link in self.node.links):
            return ARM
        sockets = (link for link in self.node.links if link.kind is LinkKind.SMP)
        return AMD if any(link.nccl_bytes_per_s == AMD_NCCL_BYTES_PER_S for link in sockets) else INTEL

    def _devices(self, parent: str) -> tuple[Element, ...]:
        return tuple(self._device(vertex) for vertex in self.below.get(parent, []))

    def _device(self, vertex: str) -> Element:
        """Return a PCI device with what it is and what hangs below it."""
        kind, inside = BRIDGE_CLASS, tuple[Element, ...]()
        if vertex in self.gpus:
            kind, inside = GPU_CLASS, (self._gpu(self.gpus[vertex]),)
        elif vertex in self.nics:
            kind, inside = NIC_CLASS, (self._nic(self.nics[vertex]),)
        rate = self._slot_bytes_per_s(vertex)
        generation = pcie_generation(rate)
        lanes = max(1, min(16, 2 ** round(math.log2(max(1.0, 16 * rate / PCIE_BYTES_PER_S[generation])))))
        return Element(
            tag="pci",
            attributes={
                "busid": _one_line(self.bus[vertex]),
                "class": kind,
                "link_speed": f"{GT_PER_S[generation]} GT/s PCIe",
                "link_width": str(lanes),
            },
            children=(*inside, *self._devices(vertex)),
        )

    def _slot_bytes_per_s(self, vertex: str) -> float:
        """Return the rate of a device's slot. Where no PCIe link is known, the datasheets of the GPUs say what it is."""
        link = self.up.get(vertex)
        if link is None or link.kind is not LinkKind.PCIE:
            link = Link(a=vertex, b=self.cpus[0], kind=LinkKind.PCIE)
        return link_rates(self.cluster, self.node, link)[0]

    def _gpu(self, gpu: Gpu) -> Element:
        kind = self.cluster.kind(gpu.kind)
        links = []
        for link in self.node.links:
            if gpu.vertex not in {link.a, link.b} or link.kind not in {LinkKind.NVLINK, LinkKind.NVSWITCH}:
                continue
            other = link.b if link.a == gpu.vertex else link.a
            count = link.count if gpu.healthy and link_rates(self.cluster, self.node, link)[0] > 0 else 0
            if link.kind is LinkKind.NVSWITCH:
                links.append(_nvlink(ANY_NVSWITCH, count, SWITCH_CLASS))
            elif other in self.bus:
                links.append(_nvlink(_one_line(self.bus[other]), count, GPU_CLASS))
        link_up = self.up.get(gpu.vertex)
        if link_up is not None and link_up.kind is LinkKind.C2C:
            megabytes = round(link_rates(self.cluster, self.node, link_up)[0] / 1e6)
            links.append(Element(tag="c2c", attributes={"bw": str(megabytes), "count": "1"}))
        return Element(
            tag="gpu",
            attributes={
                "dev": str(gpu.index),
                "sm": str(kind.compute_capability),
                "rank": str(list(self.gpus).index(gpu.vertex)),
                "gdr": "1",
            },
            children=tuple(links),
        )

    def _nic(self, nic: Nic) -> Element:
        number = list(self.nics).index(nic.vertex)
        net = {
            "name": _one_line(nic.label),
            "dev": str(number),
            "speed": str(round((nic.bytes_per_s or 0.0) * 8 / 1e6)),  # Mb/s
            "port": "1",
            "latency": "0.000000",
            "guid": f"0x{number + 1:x}",
            "maxconn": "131072",
            "gdr": "1" if self.cluster.fabric is not None and self.cluster.fabric.rdma else "0",
        }
        return Element(tag="nic", children=(Element(tag="net", attributes=net),))


def _nvlink(target: str, count: int, kind: str) -> Element:
    return Element(tag="nvlink", attributes={"target": target, "count": str(count), "tclass": kind})


def _one_line(text: str) -> str:
    """Return a name without the control characters that XML 1.0 cannot hold."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
