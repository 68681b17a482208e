"""Write a cluster as NCCL's topology file (`NCCL_TOPO_FILE`). Format: NVIDIA/nccl @5067397c src/graph/xml.cc."""

from __future__ import annotations

import math
from dataclasses import replace
from xml.etree.ElementTree import Element, SubElement  # built here, never parsed

from topology.catalog.platform import PCIE_BYTES_PER_S, pcie_generation
from topology.cluster import Cluster, Gpu, Link, LinkKind, Nic, Node, VertexKind
from topology.errors import BadCluster, Infeasible
from topology.rates.node_rates import link_rates
from topology.readers.nccl_xml import BRIDGE_CLASS, GPU_CLASS, NIC_CLASS, SWITCH_CLASS, write_xml

ANY_NVSWITCH = "fffffff:ff:ff.0"  # what NCCL writes where a node has one fabric and NCCL sees no single switch
GT_PER_S = {"gen3": "8.0", "gen4": "16.0", "gen5": "32.0", "gen6": "64.0"}
# The processors from which NCCL takes the rate between sockets (topo.cc): Arm, AMD, or a recent Intel.
ARM = {"arch": "arm64"}
AMD = {"arch": "x86_64", "vendor": "AuthenticAMD", "familyid": "175", "modelid": "1"}
INTEL = {"arch": "x86_64", "vendor": "GenuineIntel", "familyid": "6", "modelid": "143"}
AMD_NCCL_BYTES_PER_S = 16e9


def to_nccl_xml(cluster: Cluster, node: int = 0, tray: int = 0) -> str:
    """Return one host as an `NCCL_TOPO_FILE`: a node, or one tray of a rack. Raises BadCluster if there is none.

    NCCL reads one file per operating system and merges the trays of an NVLink domain itself.

    Bus ids that are not known are invented, in order; NCCL matches GPUs by bus id, so such a file is for simulation.
    A GPU whose NVLinks are gone keeps an `nvlink` element with count 0: without one, NCCL asks the driver again.
    """
    if not cluster.gpu_count:
        raise Infeasible(f"{cluster.name} shows no GPU", why="there is no host of GPUs to describe")
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
    """The PCI tree of one host: `bus` ids by vertex, `uplink` of each device, `children` by parent."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.cluster, self.node = cluster, node
        self.gpus = {gpu.vertex: gpu for gpu in node.gpus}
        self.nics = {nic.vertex: nic for nic in node.nics}
        switches = [v.id for v in node.vertices if v.kind in {VertexKind.PCIE_SWITCH, VertexKind.ROOT_PORT}]
        self.cpus = [v.id for v in node.vertices if v.kind is VertexKind.CPU] or ["cpu0"]
        self.bus = {gpu.vertex: gpu.pci_bus_id or f"0000:{0x10 + i:02x}:00.0" for i, gpu in enumerate(node.gpus)}
        self.bus |= {switch: f"0001:{i:02x}:00.0" for i, switch in enumerate(switches)}
        self.bus |= {nic: f"0002:{i:02x}:00.0" for i, nic in enumerate(self.nics)}
        self.uplink: dict[str, Link] = {}
        self.children: dict[str, list[str]] = {}
        self._attach_devices()

    def _attach_devices(self) -> None:
        """Set the parent of each device by walking from the CPUs; devices without a link go below the first CPU."""
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
                self.uplink[child] = link
                self.children.setdefault(parent, []).append(child)
                frontier.append(child)
        for vertex in [*self.gpus, *self.nics]:
            if vertex not in seen:
                self.children.setdefault(self.cpus[0], []).append(vertex)

    def system(self) -> Element:
        root = Element("system", {"version": "1"})
        for number, cpu in enumerate(self.cpus):
            processor = {"numaid": str(number), "affinity": "ffffffff", **self._processor()}
            SubElement(root, "cpu", processor).extend(self._devices(cpu))
        return root

    def _processor(self) -> dict[str, str]:
        if any(link.kind is LinkKind.C2C for link in self.node.links):
            return ARM
        sockets = (link for link in self.node.links if link.kind is LinkKind.SMP)
        return AMD if any(link.nccl_bytes_per_s == AMD_NCCL_BYTES_PER_S for link in sockets) else INTEL

    def _devices(self, parent: str) -> list[Element]:
        return [self._device(vertex) for vertex in self.children.get(parent, [])]

    def _device(self, vertex: str) -> Element:
        """Return a PCI device with its GPU or NIC element and the devices below it."""
        kind, inside = BRIDGE_CLASS, list[Element]()
        if vertex in self.gpus:
            kind, inside = GPU_CLASS, [self._gpu(self.gpus[vertex])]
        elif vertex in self.nics:
            kind, inside = NIC_CLASS, [self._nic(self.nics[vertex])]
        rate = self._slot_bytes_per_s(vertex)
        generation = pcie_generation(rate)
        lanes = max(1, min(16, 2 ** round(math.log2(max(1.0, 16 * rate / PCIE_BYTES_PER_S[generation])))))
        device = Element(
            "pci",
            {
                "busid": _one_line(self.bus[vertex]),
                "class": kind,
                "link_speed": f"{GT_PER_S[generation]} GT/s PCIe",
                "link_width": str(lanes),
            },
        )
        device.extend([*inside, *self._devices(vertex)])
        return device

    def _slot_bytes_per_s(self, vertex: str) -> float:
        """Return the bytes/s of a device's slot; from the GPUs' datasheets where no PCIe link is known."""
        link = self.uplink.get(vertex)
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
        link_up = self.uplink.get(gpu.vertex)
        if link_up is not None and link_up.kind is LinkKind.C2C:
            megabytes = round(link_rates(self.cluster, self.node, link_up)[0] / 1e6)
            links.append(Element("c2c", {"bw": str(megabytes), "count": "1"}))
        element = Element(
            "gpu",
            {
                "dev": str(gpu.index),
                "sm": str(kind.compute_capability),
                "rank": str(list(self.gpus).index(gpu.vertex)),
                "gdr": "1",
            },
        )
        element.extend(links)
        return element

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
        port = Element("nic")
        SubElement(port, "net", net)
        return port


def _nvlink(target: str, count: int, kind: str) -> Element:
    return Element("nvlink", {"target": target, "count": str(count), "tclass": kind})


def _one_line(text: str) -> str:
    """Return a name without the control characters that XML 1.0 cannot hold."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
