"""The cluster in the formats of other tools: NCCL's topology XML, ASTRA-sim's network file, SimAI's edge list.

Formats: NVIDIA/nccl @5067397c src/graph/xml.cc; astra-sim @518bd513 inputs/network/; aliyun/SimAI @071ec084
astra-sim-alibabacloud/inputs/topo/gen_Topo_Template.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from html import escape

from topology.cluster import Cluster, FabricKind, Gpu, Link, LinkKind, Nic, Node, VertexKind
from topology.errors import BadCluster, Infeasible
from topology.node_rates import HOST_LATENCY_S, NVLINK_LATENCY_S, NodeRates, link_rates, node_rates
from topology.platform import PCIE_BYTES_PER_S, pcie_generation

GPU_CLASS, SWITCH_CLASS, BRIDGE_CLASS, NIC_CLASS = "0x030200", "0x068000", "0x060400", "0x020700"
ANY_NVSWITCH = "fffffff:ff:ff.0"  # what NCCL itself writes where it sees one fabric and no single switch
GT_PER_S = {"gen3": "8.0", "gen4": "16.0", "gen5": "32.0", "gen6": "64.0"}


def to_nccl_xml(cluster: Cluster, node: int = 0, tray: int = 0) -> str:
    """Return one host as an `NCCL_TOPO_FILE`: a node, or one tray of a rack. Raises BadCluster if there is none.

    NCCL wants one operating system per file and joins the trays of an NVLink domain itself.

    Bus ids that are not known are invented, in order; NCCL matches GPUs by bus id, so such a file is for simulation.
    A GPU whose NVLinks are gone keeps an `nvlink` element with count 0: without one, NCCL asks the driver again.
    """
    host = _tray(_node_at(cluster, node), tray)
    if not host.gpus:
        raise BadCluster(f"node {node} of {cluster.name} has no tray {tray}")
    return "\n".join(_NcclFile(cluster, host).lines()) + "\n"


def _tray(node: Node, tray: int) -> Node:
    return replace(
        node,
        gpus=tuple(gpu for gpu in node.gpus if gpu.tray == tray),
        nics=tuple(nic for nic in node.nics if nic.tray == tray),
        vertices=tuple(v for v in node.vertices if v.tray == tray or v.kind is VertexKind.NVSWITCH),
    )


class _NcclFile:
    """One node on its way to XML: children by parent, bus ids by vertex."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.cluster, self.node = cluster, node
        self.gpus = {gpu.vertex: gpu for gpu in node.gpus}
        self.nics = {nic.vertex: nic for nic in node.nics}
        self.switches = [v.id for v in node.vertices if v.kind in {VertexKind.PCIE_SWITCH, VertexKind.ROOT_PORT}]
        self.cpus = [v.id for v in node.vertices if v.kind is VertexKind.CPU] or ["cpu0"]
        self.bus = {gpu.vertex: gpu.pci_bus_id or f"0000:{0x10 + i:02x}:00.0" for i, gpu in enumerate(node.gpus)}
        self.bus |= {switch: f"0001:{i:02x}:00.0" for i, switch in enumerate(self.switches)}
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

    def lines(self) -> Iterator[str]:
        yield '<system version="1">'
        for number, cpu in enumerate(self.cpus):
            yield f'  <cpu numaid="{number}" {self._processor()}>'
            for child in self.below.get(cpu, []):
                yield from self._device(child, "    ")
            yield "  </cpu>"
        yield "</system>"

    def _processor(self) -> str:
        """Return the CPU attributes from which NCCL takes the rate between sockets: Arm, AMD or a recent Intel."""
        if any(link.kind is LinkKind.C2C for link in self.node.links):
            return 'affinity="ffffffff" arch="arm64"'
        if any(link.kind is LinkKind.SMP and link.nccl_bytes_per_s == 16e9 for link in self.node.links):
            return 'affinity="ffffffff" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1"'
        return 'affinity="ffffffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"'

    def _device(self, vertex: str, indent: str) -> Iterator[str]:
        kind = GPU_CLASS if vertex in self.gpus else NIC_CLASS if vertex in self.nics else BRIDGE_CLASS
        link = self.up.get(vertex)
        rate = link_rates(self.cluster, self.node, link)[0] if link and link.kind is LinkKind.PCIE else 63e9
        speed = GT_PER_S[pcie_generation(rate)]
        lanes = max(1, min(16, 2 ** round(math.log2(max(1.0, 16 * rate / PCIE_BYTES_PER_S[pcie_generation(rate)])))))
        yield (
            f'{indent}<pci busid="{escape(self.bus[vertex])}" class="{kind}" link_speed="{speed} GT/s PCIe" '
            f'link_width="{lanes}">'
        )
        if vertex in self.gpus:
            yield from self._gpu(self.gpus[vertex], indent + "  ")
        elif vertex in self.nics:
            yield from self._nic(self.nics[vertex], indent + "  ")
        for child in self.below.get(vertex, []):
            yield from self._device(child, indent + "  ")
        yield f"{indent}</pci>"

    def _gpu(self, gpu: Gpu, indent: str) -> Iterator[str]:
        kind = self.cluster.kind(gpu.kind)
        rank = list(self.gpus).index(gpu.vertex)
        yield f'{indent}<gpu dev="{gpu.index}" sm="{kind.compute_capability}" rank="{rank}" gdr="1">'
        for link in self.node.links:
            if gpu.vertex not in {link.a, link.b} or link.kind not in {LinkKind.NVLINK, LinkKind.NVSWITCH}:
                continue
            other = link.b if link.a == gpu.vertex else link.a
            count = link.count if gpu.healthy and link_rates(self.cluster, self.node, link)[0] > 0 else 0
            if link.kind is LinkKind.NVSWITCH:
                yield f'{indent}  <nvlink target="{ANY_NVSWITCH}" count="{count}" tclass="{SWITCH_CLASS}"/>'
            elif other in self.bus:
                yield f'{indent}  <nvlink target="{escape(self.bus[other])}" count="{count}" tclass="{GPU_CLASS}"/>'
        link_up = self.up.get(gpu.vertex)
        if link_up is not None and link_up.kind is LinkKind.C2C:
            rate = link_rates(self.cluster, self.node, link_up)[0]
            yield f'{indent}  <c2c bw="{round(rate / 1e6)}" count="1"/>'
        yield f"{indent}</gpu>"

    def _nic(self, nic: Nic, indent: str) -> Iterator[str]:
        number = list(self.nics).index(nic.vertex)
        megabits = round((nic.bytes_per_s or 0.0) * 8 / 1e6)
        gdr = 1 if self.cluster.fabric is not None and self.cluster.fabric.rdma else 0
        yield f"{indent}<nic>"
        yield (
            f'{indent}  <net name="{escape(nic.label)}" dev="{number}" speed="{megabits}" port="1" latency="0.000000" '
            f'guid="0x{number + 1:x}" maxconn="131072" gdr="{gdr}"/>'
        )
        yield f"{indent}</nic>"


def _node_at(cluster: Cluster, number: int) -> Node:
    left = number
    for group in cluster.groups:
        if 0 <= left < group.count:
            return group.node
        left -= group.count
    raise BadCluster(f"{cluster.name} has {cluster.node_count} nodes, there is no node {number}")


def to_astra_sim(cluster: Cluster, *, between_nodes: str = "Switch") -> str:
    """Return the cluster as an ASTRA-sim analytical network file: one dimension in a node, one between nodes.

    Rates are GB/s per direction and GPU, latencies ns per link: a `Switch` is crossed by two. A measured rate that
    falls short of the nominal one lowers it. Raises Infeasible for what such dimensions cannot say: unlike nodes or GPUs, bridged pairs,
    meshes with gaps, or a GPU off the fabric.
    """
    if between_nodes not in {"Switch", "Ring", "FullyConnected"}:
        raise BadCluster(f"ASTRA-sim has no {between_nodes!r}", remedy="use Switch, Ring or FullyConnected")
    if len(cluster.groups) != 1:
        raise Infeasible(f"{cluster.name} has unlike nodes", why="an ASTRA-sim network is the same everywhere")
    rates, count = node_rates(cluster), len(cluster.groups[0].node.gpus)
    dimensions: list[tuple[str, int, float, float]] = []
    if count > 1:
        dimensions.append(_scale_up(rates, count))
    if cluster.node_count > 1:
        if cluster.fabric is None:
            raise Infeasible(f"nothing joins the nodes of {cluster.name}", remedy="give it network ports and a fabric")
        if cluster.fabric.oversubscription > 1 and cluster.node_count > cluster.fabric.nodes_per_leaf:
            raise Infeasible(
                f"the network of {cluster.name} is oversubscribed above the leaf",
                why="one dimension has one rate",
                remedy="export as an edge list instead",
            )
        per_gpu = sum(nic.bytes_per_s or 0.0 for nic in rates.node.nics if nic.up) / count
        latency = cluster.fabric.latency_s / (2 if between_nodes == "Switch" else 1)
        dimensions.append((between_nodes, cluster.node_count, per_gpu, latency))
    if not dimensions:
        raise Infeasible(f"{cluster.name} is a single GPU", why="there is no network to describe")

    kinds, counts, speeds, delays = zip(*dimensions, strict=True)
    return (
        f"# {cluster.name.encode('ascii', 'replace').decode().replace(chr(10), ' ')}\n"
        f"topology: [ {', '.join(kinds)} ]  # one entry per dimension, inside first\n"
        f"npus_count: [ {', '.join(map(str, counts))} ]\n"
        f"bandwidth: [ {', '.join(f'{rate / 1e9:.10g}' for rate in speeds)} ]  # GB/s, one direction\n"
        f"latency: [ {', '.join(f'{delay * 1e9:.10g}' for delay in delays)} ]  # ns per link\n"
    )


def _scale_up(rates: NodeRates, count: int) -> tuple[str, int, float, float]:
    """Return the dimension inside a node: Switch, FullyConnected or Ring, whichever it is."""
    every = range(count)
    name = rates.node.name
    if len(rates.on_fabric) < count:
        raise Infeasible(f"a GPU of {name} is off the fabric", why="the dimensions of ASTRA-sim have no gaps")
    ports = {rates.ports.get(gpu) for gpu in every}
    if len(ports) == 1 and None not in ports:
        _, rate, _ = rates.ports[0]
        return "Switch", count, rate, _port_latency(rates.node, LinkKind.NVSWITCH, NVLINK_LATENCY_S / 2)
    if rates.wires:
        speeds = {rate for rate, _ in rates.wires.values()}
        if len(speeds) == 1 and not rates.ports:
            latency = _port_latency(rates.node, LinkKind.NVLINK, NVLINK_LATENCY_S)
            if len(rates.wires) == count * (count - 1) // 2:
                return ("Ring" if count == 2 else "FullyConnected"), count, speeds.pop(), latency
            if count > 2 and set(rates.wires) == {(min(a, b), max(a, b)) for a in every for b in [(a + 1) % count]}:
                return "Ring", count, speeds.pop(), latency
        raise Infeasible(
            f"the NVLinks of {name} are neither a switch, a full mesh nor a ring",
            why="ASTRA-sim's analytical network has only these",
            remedy="export as an edge list instead",
        )
    # Without NVLink: a switch, if all GPUs hang on one PCIe switch or CPU alike.
    hubs = {tuple(rates.host.get(gpu.vertex, {}).items()) for gpu in rates.node.gpus}
    if len(hubs) == 1 and len(next(iter(hubs))) == 1:
        ((_, (rate, _)),) = hubs.pop()
        return "Switch", count, rate, HOST_LATENCY_S / 2
    raise Infeasible(
        f"the GPUs of {name} share PCIe uplinks or sockets unevenly",
        why="one dimension has one rate",
        remedy="export as an edge list instead",
    )


def _port_latency(node: Node, kind: LinkKind, default: float) -> float:
    latencies = [link.latency_s for link in node.links if link.kind is kind]
    return max(latencies, default=0.0) or default


def to_simai(cluster: Cluster, *, gpu_type: str | None = None) -> str:
    """Return the cluster as a SimAI topology: a header, the switch ids, and one line per link.

    Header: vertices, GPUs per node, NVSwitches, other switches, links, GPU type. Ids: GPUs, then one NVSwitch per node
    (its ports carry a GPU's whole NVLink rate), then leaves, then the spine. A GPU is tied to its leaf at the rate of
    its share of the node's ports: SimAI has no NICs. Raises Infeasible for nodes without one NVSwitch for all GPUs.
    """
    if len(cluster.groups) != 1:
        raise Infeasible(f"{cluster.name} has unlike nodes", why="SimAI's header has one count of GPUs per node")
    node, nodes = cluster.groups[0].node, cluster.node_count
    rates, per_node = node_rates(cluster), len(node.gpus)
    if per_node > 1 and ({rates.ports.get(gpu, ("",))[0] for gpu in range(per_node)} == {""} or not rates.uniform):
        raise Infeasible(
            f"the GPUs of {node.name} do not all hang on one NVSwitch",
            why="a SimAI topology joins the GPUs of a node by NVSwitches only",
        )
    kind = gpu_type or cluster.slowest_kind.name.split("-")[0].upper()
    gpus = nodes * per_node
    hubs = nodes if per_node > 1 else 0
    edges: list[tuple[int, int, float, float]] = []
    for number in range(gpus):
        if hubs:
            port = rates.ports[number % per_node][1]
            edges.append((number, gpus + number // per_node, port, NVLINK_LATENCY_S / 2))
    leaves: dict[tuple[int, int], int] = {}
    fabric = cluster.fabric
    share = sum(nic.bytes_per_s or 0.0 for nic in node.nics if nic.up) / per_node
    if nodes > 1 and fabric is not None and share > 0:
        on_rail = fabric.kind is FabricKind.RAIL_OPTIMISED
        rail_count = len({nic.rail for nic in node.nics}) if on_rail else 1
        load: dict[int, float] = {}
        for number in range(gpus):
            at = (number // per_node // fabric.nodes_per_leaf, number % per_node % rail_count)
            leaf = leaves.setdefault(at, gpus + hubs + len(leaves))
            load[leaf] = load.get(leaf, 0.0) + share
            edges.append((number, leaf, share, fabric.latency_s / 2))
        spine = gpus + hubs + len(leaves)
        full = fabric.nodes_per_leaf * share * per_node / rail_count
        edges += [(leaf, spine, full / fabric.oversubscription, fabric.latency_s / 2) for leaf in load]
    switches = len(leaves) + (1 if leaves else 0)
    header = f"{gpus + hubs + switches} {per_node} {hubs} {switches} {len(edges)} {kind}"
    ids = " ".join(str(i) for i in range(gpus, gpus + hubs + switches))
    lines = [f"{a} {b} {rate * 8 / 1e9:.10g}Gbps {latency * 1e3:.10g}ms 0" for a, b, rate, latency in edges]
    return "\n".join([header, ids, *lines]) + "\n"
