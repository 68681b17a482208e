"""From a few facts about a machine to a full `Cluster`: the builder behind catalogue, cases and small cluster files.

A `Platform` says what a datasheet says: which GPU, how many, what joins them, how many network ports of which speed
and what they are attached to. `build` turns that into GPUs, vertices and links with a rate each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations

from topology.catalog.gpus import bridges, gpu_kind
from topology.cluster import (
    Cluster,
    Fabric,
    FabricKind,
    Finding,
    Gpu,
    GpuKind,
    Link,
    LinkKind,
    Nic,
    Node,
    NodeGroup,
    Severity,
    Source,
    Vertex,
    VertexKind,
    part_of_node,
)
from topology.errors import BadCluster

# Half of what an NVSwitch crossing takes: ASTRA-sim's validated H100 network (inputs/network/hgx_h100_8gpu.yml).
NVSWITCH_PORT_LATENCY_S = 936.25e-9
RDMA_LATENCY_S = 5e-6  # of a network between nodes, end to end (assumed)
GBIT = 1e9 / 8
# PCIe x16, one direction: nominal, and NCCL's model (topo.cc: width x speed / 80).
PCIE_BYTES_PER_S = {"gen3": 15.75e9, "gen4": 31.5e9, "gen5": 63e9, "gen6": 121e9}
PCIE_NCCL_BYTES_PER_S = {"gen3": 12e9, "gen4": 24e9, "gen5": 48e9, "gen6": 96e9}
INTERCONNECTS = ("nvswitch", "nvlink", "pcie")
MAX_GPUS_PER_NODE = 576  # the largest NVLink domain announced

# GPU pairs of the 8-GPU hybrid cube mesh and the links between them: NVIDIA/nccl issue 671, `nvidia-smi topo -m` of
# a DGX-1 with V100.
CUBE_MESH = (
    *((0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2)),
    *((2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2)),
)


# One UPI link at 11.2 GT/s, two bytes a transfer: the slowest connection between two sockets of this age (assumed).
SMP_BYTES_PER_S = 22.4e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A machine as a datasheet describes it. `trays` share one NVLink domain; counts of the rest are per tray.

    `bridges` lists directly linked GPU pairs as (a, b) or (a, b, links). `switches` is how many PCIe switches the
    GPUs of a tray are spread over (0: straight to the CPUs); `nics_on` (switch, cpu) is what NICs are attached to.
    """

    name: str
    gpu: str
    gpus_per_node: int
    interconnect: str
    title: str = ""
    aliases: tuple[str, ...] = ()
    usual_for: tuple[str, ...] = ()  # GPU kinds whose cases get this platform's defaults
    multicast: bool = False
    bridges: tuple[tuple[int, ...], ...] = ()
    trays: int = 1
    cpus: int = 2
    switches: int = 0
    smp_bytes_per_s: float = 0.0
    smp_nccl_bytes_per_s: float = 0.0
    nics: int = 0
    nic_gbit: float = 0.0
    nics_on: str = "switch"
    fabric: str | None = None
    oversubscription: float = 1.0
    nodes_per_leaf: int = 32
    fabric_latency_s: float = RDMA_LATENCY_S
    rdma: bool = True
    pcie: str | None = None  # slot generation, when it is not the card's own
    notes: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)


def build(platform: Platform, *, nodes: int = 1) -> Cluster:
    """Return `nodes` identical nodes of a platform as a cluster. Raises BadCluster where the numbers cannot be."""
    _check(platform, nodes)
    kind = gpu_kind(platform.gpu)
    fabric = None
    if platform.fabric is not None and platform.nics and platform.nic_gbit > 0:
        fabric = Fabric(
            kind=FabricKind(platform.fabric),
            oversubscription=platform.oversubscription,
            nodes_per_leaf=platform.nodes_per_leaf,
            latency_s=platform.fabric_latency_s,
            rdma=platform.rdma,
        )
    findings = tuple(
        Finding(severity=Severity.INFO, what=note, why=f"catalogue entry {platform.name}", consequence="", remedy="")
        for note in platform.notes
    )
    return Cluster(
        name=platform.name,
        gpu_kinds=(kind,),
        groups=(NodeGroup(node=_node(platform, kind), count=nodes),),
        fabric=fabric,
        findings=findings,
    )


def joined_text(platform: Platform, interconnect: str) -> str:
    """Return the assumption that GPUs of a node are joined as in `platform`, by the vendor's name of the links."""
    links = "xGMI" if interconnect == "nvlink" and gpu_kind(platform.gpu).by_amd else interconnect
    return f"GPUs of a node joined by {links}, as in {platform.name}"


def pcie_generation(bytes_per_s: float) -> str:
    """Return the PCIe generation whose x16 rate is nearest to `bytes_per_s`."""
    return min(PCIE_BYTES_PER_S, key=lambda gen: abs(PCIE_BYTES_PER_S[gen] - bytes_per_s))


def _check(platform: Platform, nodes: int) -> None:
    wrong = []
    if not 1 <= platform.gpus_per_node <= MAX_GPUS_PER_NODE:
        wrong.append(f"gpus_per_node is {platform.gpus_per_node}, expected 1 to {MAX_GPUS_PER_NODE}")
    if not 1 <= nodes <= 10**6:
        wrong.append(f"nodes is {nodes}, expected 1 to 1000000")
    if platform.interconnect not in INTERCONNECTS:
        wrong.append(f"interconnect is {platform.interconnect!r}, expected one of {', '.join(INTERCONNECTS)}")
    if platform.fabric is not None and platform.fabric not in tuple(FabricKind):
        wrong.append(f"fabric is {platform.fabric!r}, expected one of {', '.join(FabricKind)}")
    if platform.pcie is not None and platform.pcie not in PCIE_BYTES_PER_S:
        wrong.append(f"pcie is {platform.pcie!r}, expected one of {', '.join(PCIE_BYTES_PER_S)}")
    if not 0 <= platform.nic_gbit <= 1600:
        wrong.append(f"a network port of {platform.nic_gbit} Gb/s, expected 0 to 1600")
    if not 1 <= platform.nodes_per_leaf <= 10**6:
        wrong.append(f"nodes_per_leaf is {platform.nodes_per_leaf}, expected 1 to 1000000")
    if not 1 <= platform.oversubscription <= 1000:
        wrong.append(f"oversubscription is {platform.oversubscription}, expected 1 to 1000")
    for bridge in platform.bridges:
        ends = bridge[:2]
        if len(bridge) not in {2, 3} or len(set(ends)) != 2 or not all(0 <= g < platform.gpus_per_node for g in ends):
            wrong.append(f"bridge {list(bridge)} does not join two of the {platform.gpus_per_node} GPUs")
        elif len(bridge) == 3 and not 1 <= bridge[2] <= 64:
            wrong.append(f"bridge {list(bridge)} has {bridge[2]} links, expected 1 to 64")
    if len({frozenset(bridge[:2]) for bridge in platform.bridges}) != len(platform.bridges):
        wrong.append("a pair of GPUs is bridged twice")
    if wrong:
        raise BadCluster(f"{platform.name} cannot be built: {'; '.join(wrong)}", remedy="correct these values")


def _node(platform: Platform, kind: GpuKind) -> Node:
    """Lay out one node: GPUs and ports spread evenly over switches, switches over CPUs, tray by tray."""
    count = platform.gpus_per_node
    trays = min(platform.trays, count)
    per_tray = -(-count // trays)
    own = pcie_generation(kind.pcie_bytes_per_s)
    # A faster slot runs at the card's generation.
    generation = min(platform.pcie or own, own, key=PCIE_BYTES_PER_S.__getitem__)
    slot = min(kind.pcie_bytes_per_s, PCIE_BYTES_PER_S[generation])
    slot_nccl = PCIE_NCCL_BYTES_PER_S[generation]
    cpus, switches = min(platform.cpus, per_tray), min(platform.switches, per_tray)
    vertices: list[Vertex] = []
    links: list[Link] = []
    nics: list[Nic] = []
    gpus: list[Gpu] = []
    parent: dict[str, str] = {}  # GPU or NIC -> the switch or CPU it is attached to

    def attach(child: str, on: str, rate: float = slot, nccl_rate: float = slot_nccl) -> None:
        parent[child] = on
        link = Link(a=child, b=on, kind=LinkKind.PCIE, label=generation, bytes_per_s=rate, nccl_bytes_per_s=nccl_rate)
        links.append(link)

    for tray in range(trays):
        cpu_ids = [f"cpu{tray * cpus + c}" for c in range(cpus)]
        vertices += [Vertex(id=cpu, kind=VertexKind.CPU, tray=tray) for cpu in cpu_ids]
        links += [
            Link(
                a=a,
                b=b,
                kind=LinkKind.SMP,
                bytes_per_s=platform.smp_bytes_per_s or SMP_BYTES_PER_S,
                nccl_bytes_per_s=platform.smp_nccl_bytes_per_s or None,
                source=Source.ASSUMED,
                confidence=0.3,
            )
            for a, b in combinations(cpu_ids, 2)
        ]
        switch_ids = [f"pci{tray * switches + s}" for s in range(switches)]
        for position, switch in enumerate(switch_ids):
            vertices.append(Vertex(id=switch, kind=VertexKind.PCIE_SWITCH, tray=tray))
            attach(switch, cpu_ids[position * cpus // switches])
        for position in range(min(per_tray, count - tray * per_tray)):
            index = tray * per_tray + position
            gpu = Gpu(index=index, kind=kind.name, numa=tray * cpus + position * cpus // per_tray, tray=tray)
            gpus.append(gpu)
            if kind.c2c_bytes_per_s:
                cpu = cpu_ids[position * cpus // per_tray]
                parent[gpu.vertex] = cpu
                links.append(Link(a=gpu.vertex, b=cpu, kind=LinkKind.C2C, bytes_per_s=kind.c2c_bytes_per_s))
            elif switches:
                attach(gpu.vertex, switch_ids[position * switches // per_tray])
            else:
                attach(gpu.vertex, cpu_ids[position * cpus // per_tray])
        for port in range(platform.nics):
            rate = platform.nic_gbit * GBIT
            hosts = switch_ids if switches and platform.nics_on == "switch" else cpu_ids
            on = hosts[port * len(hosts) // platform.nics]
            nic = Nic(
                label=f"mlx5_{tray * platform.nics + port}",
                bytes_per_s=rate,
                rail=port if platform.fabric == FabricKind.RAIL_OPTIMISED else None,
                numa=cpu_ids.index(on) + tray * cpus if on in cpu_ids else None,
                tray=tray,
            )
            nics.append(nic)
            attach(nic.vertex, on, max(slot, rate), max(slot_nccl, rate))
    links += _scale_up(platform, kind, gpus)
    if platform.interconnect == "nvswitch" and count > 1:
        vertices.append(Vertex(id="nvswitch", kind=VertexKind.NVSWITCH, multicast=platform.multicast))
    near = {str(g.index): _closest_nics(g, nics, parent) for g in gpus}
    return Node(
        name=platform.name,
        gpus=tuple(gpus),
        vertices=tuple(vertices),
        nics=tuple(nics),
        links=tuple(links),
        pairs=_pairs(gpus, links, parent),
        closest_nics={index: labels for index, labels in near.items() if labels},
    )


def _closest_nics(gpu: Gpu, nics: list[Nic], parent: dict[str, str]) -> tuple[str, ...]:
    """Return the ports on the GPU's own switch or CPU, else those of its tray."""
    same = tuple(nic.label for nic in nics if parent[nic.vertex] == parent[gpu.vertex])
    return same or tuple(nic.label for nic in nics if nic.tray == gpu.tray)


def _scale_up(platform: Platform, kind: GpuKind, gpus: list[Gpu]) -> list[Link]:
    """Return the NVLink (or xGMI) links: ports to the hub, bridges as given, or an even mesh."""
    if platform.interconnect == "pcie" and not platform.bridges:
        return []
    if not kind.nvlink_links:
        if platform.bridges or (platform.interconnect != "pcie" and len(gpus) > 1):
            raise BadCluster(
                f"{kind.name} has no NVLink", remedy='say "interconnect": "pcie", or name the GPU that is meant'
            )
        return []
    if platform.interconnect == "nvswitch":
        if len(gpus) == 1:
            return []  # nothing to switch
        return [_nvlink(g.vertex, "nvswitch", kind.nvlink_links, kind, LinkKind.NVSWITCH) for g in gpus]
    bridges = platform.bridges or _usual_bridges(kind, len(gpus))
    degree: dict[int, int] = {}
    for bridge in bridges:
        for end in bridge[:2]:
            degree[end] = degree.get(end, 0) + 1
    result = []
    for bridge in bridges:
        # Unless stated, a GPU spreads its links evenly over its bridges.
        links = bridge[2] if len(bridge) == 3 else kind.nvlink_links // max(degree[bridge[0]], degree[bridge[1]])
        if links < 1:
            raise BadCluster(
                f"{kind.name} has {kind.nvlink_links} NVLinks, too few for the bridges of GPU {bridge[0]}",
                remedy="list fewer bridges",
            )
        a, b = sorted(bridge[:2])
        result.append(_nvlink(f"gpu{a}", f"gpu{b}", links, kind, LinkKind.NVLINK))
    used: dict[str, int] = {}
    for link in result:
        for vertex in (link.a, link.b):
            used[vertex] = used.get(vertex, 0) + link.count
    too_many = [end for end, links in used.items() if links > kind.nvlink_links]
    if too_many:
        raise BadCluster(
            f"bridges use more NVLinks than a {kind.name} has ({kind.nvlink_links}): {', '.join(too_many)}",
            remedy="lower the link counts",
        )
    return result


def _usual_bridges(kind: GpuKind, count: int) -> tuple[tuple[int, ...], ...]:
    """Return direct links as such GPUs usually have them: cube mesh, full mesh, or pairs for cards with a bridge."""
    if kind.architecture in {"Volta", "Pascal"} and count == 8 and kind.nvlink_links == 6:
        return CUBE_MESH
    if kind.name not in bridges() and count - 1 <= kind.nvlink_links:
        return tuple(combinations(range(count), 2))
    return tuple((first, first + 1) for first in range(0, count - 1, 2))


def _nvlink(a: str, b: str, count: int, kind: GpuKind, link_kind: LinkKind) -> Link:
    return Link(
        a=a,
        b=b,
        kind=link_kind,
        count=count,
        bytes_per_s=count * kind.nvlink_bytes_per_s,
        nccl_bytes_per_s=count * kind.nvlink_nccl_bytes_per_s or None,
        latency_s=NVSWITCH_PORT_LATENCY_S if link_kind is LinkKind.NVSWITCH else 0.0,
        label=f"NV{count}",
    )


def _pairs(gpus: list[Gpu], links: list[Link], parent: dict[str, str]) -> dict[str, str]:
    """Return the class nvidia-smi would print for each pair: NV#, PIX on one switch, NODE on one CPU, else SYS."""
    hub = {link.a: link.label for link in links if link.kind is LinkKind.NVSWITCH}
    direct = {(link.a, link.b): link.label for link in links if link.kind is LinkKind.NVLINK}
    result = {}
    for a, b in combinations(gpus, 2):
        on_a, on_b = parent[a.vertex], parent[b.vertex]
        if a.vertex in hub and b.vertex in hub:
            label = hub[a.vertex]
        elif (a.vertex, b.vertex) in direct:
            label = direct[a.vertex, b.vertex]
        elif on_a == on_b:
            label = "PIX" if on_a.startswith("pci") else "NODE"
        else:
            label = "NODE" if parent.get(on_a, on_a) == parent.get(on_b, on_b) else "SYS"
        result[f"{a.index}-{b.index}"] = label
    return result


def take_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """Return the first `gpus` GPUs of `cluster`: whole nodes, then, if it is less than one, a part of a node.

    A count that is not a multiple of the node size takes the last node whole, since a node is what one rents. A part
    of a node is marked by a finding. Raises BadCluster for less than one GPU or more than there are.
    """
    if gpus < 1:
        raise BadCluster(f"{gpus} GPUs asked of {cluster.name}", remedy="ask for at least one")
    if gpus > cluster.gpu_count:
        raise BadCluster(
            f"{cluster.name} has {cluster.gpu_count} GPU{'s' * (cluster.gpu_count > 1)}, {gpus} were asked for",
            remedy=f"--gpus {cluster.gpu_count} at most; or a larger --cluster, such as --cluster "
            f"{-(-gpus // cluster.gpus_per_node)}x{cluster.gpus_per_node}x{cluster.slowest_kind.name}",
        )
    first = cluster.groups[0].node
    if gpus < len(first.gpus):
        finding = Finding(
            severity=Severity.INFO,
            what=f"{gpus} of {len(first.gpus)} GPUs of a {first.name} node",
            why="fewer GPUs were asked for than a node has",
            consequence="the rest of the node is taken to be idle; its network ports are not used",
            remedy="",
        )
        node = part_of_node(first, gpus)
        return replace(cluster, groups=(NodeGroup(node=node),), findings=(*cluster.findings, finding))
    groups, left = [], gpus
    for group in cluster.groups:
        if left <= 0:
            break
        count = min(group.count, -(-left // len(group.node.gpus)))
        groups.append(replace(group, count=count))
        left -= count * len(group.node.gpus)
    return replace(cluster, groups=tuple(groups))


def grow(cluster: Cluster, gpus: int) -> Cluster:
    """Return `cluster`, extended to `gpus` GPUs: its first node gets copies of its last GPU with the same links.

    For costing what was measured on a larger machine of the same kind. A cluster with enough GPUs is returned as it is.
    """
    if gpus <= cluster.gpu_count:
        return cluster
    node = cluster.groups[0].node
    last = node.gpus[-1]
    more = [replace(last, index=last.index + 1 + n, uuid=None, pci_bus_id=None) for n in range(gpus - len(node.gpus))]

    def rewired(end: str, gpu: str) -> str:
        return gpu if end == last.vertex else end

    links = [
        replace(link, a=rewired(link.a, gpu.vertex), b=rewired(link.b, gpu.vertex))
        for gpu in more
        for link in node.links
        if last.vertex in {link.a, link.b}
    ]
    grown = replace(node, gpus=(*node.gpus, *more), links=(*node.links, *links))
    return replace(cluster, groups=(NodeGroup(node=grown),))
