"""Infer the graph of switches and links from the path class of each pair of devices.

NVLink: if the counts printed for one GPU's pairs add up to more links than any GPU has, the pairs share the same links,
so there is a switch: one hub, and each GPU on it with its own count. Otherwise the links are cables between GPUs. PCIe:
devices of class PIX share a switch, groups of class PXB share the switch above, everything else meets at the CPU of its
NUMA node, and CPUs meet over the socket interconnect. A class says where a path goes, not how fast it is; in a virtual
machine it may not even say that, and the links get a lower `confidence`.
"""

from __future__ import annotations

from dataclasses import dataclass

from topology.cluster import Link, LinkKind, LinkState, Source, Vertex, VertexKind
from topology.probe.machine import GpuFacts, Machine, components

MAX_LINKS = 18  # of one GPU, Hopper and Blackwell; Rubin has 36 and always switches
UNKNOWN_CPU = "cpu_unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkWiring:
    """How a group of GPUs is wired: to a switch named `hub`, or by cables (None). `certain`: labels allow only this."""

    gpus: tuple[int, ...]
    hub: str | None
    certain: bool


def nvlink_wirings(machine: Machine, max_links: int | None = None) -> list[NvlinkWiring]:
    """Decide hub or cables for each NVLink group. `max_links` is the link count of the GPU model, where known."""
    limit = max_links or MAX_LINKS
    wirings: list[NvlinkWiring] = []
    hubs = 0
    for island in machine.islands():
        reported = {machine.gpus[index].switched for index in island} - {None}
        over = any(machine.nv_sum(gpu) > limit for gpu in island)
        hub = over or (True in reported) or any(_ends_at_switches(machine, gpu) for gpu in island)
        if reported == {False} and not over:
            hub = False
        # A slice of a switched machine (two or three of its GPUs) can look like cables.
        counts = {machine.nv.get((a, b), 0) for at, a in enumerate(island) for b in island[at + 1 :]}
        certain = hub or bool(reported) or len(counts) > 1 or len(island) * max(counts, default=0) < MAX_LINKS
        wirings.append(NvlinkWiring(gpus=tuple(island), hub=f"nvswitch{hubs}" if hub else None, certain=certain))
        hubs += hub
    return wirings


def _ends_at_switches(machine: Machine, index: int) -> bool:
    """Whether a GPU's links end at more addresses than it has peers, which are then switches (`nvlink -R`)."""
    peers = len(machine.counts.get(index, ()))
    return peers > 0 and len(machine.gpus[index].remotes) > peers


def link_count(machine: Machine, index: int) -> int:
    """Return the smallest NVLink count that any source gives for a GPU."""
    gpu = machine.gpus[index]
    counts = [*gpu.active.values()]
    if machine.nv_total(index):
        counts.append(machine.nv_total(index))
    return min(counts, default=0)


def most_common_link_count(machine: Machine, gpus: tuple[int, ...]) -> int:
    """Return the link count that most GPUs of a group have, the larger one on a tie."""
    counts = [max([*machine.gpus[gpu].active.values(), machine.nv_total(gpu)]) for gpu in gpus]
    return max(counts, key=lambda count: (counts.count(count), count), default=0)


def gpus_off_fabric(machine: Machine, wirings: list[NvlinkWiring]) -> list[int]:
    """Return the GPUs without a working link on a machine whose other GPUs share an NVSwitch fabric."""
    if not any(wiring.hub for wiring in wirings):
        return []
    joined = {gpu for wiring in wirings if wiring.hub for gpu in wiring.gpus if link_count(machine, gpu) > 0}
    return [index for index in sorted(machine.gpus) if index not in joined]


def nvlink_fabric(
    machine: Machine, wirings: list[NvlinkWiring], *, multicast: bool, trusted: bool
) -> tuple[list[Vertex], list[Link]]:
    """Return the switches and NVLink links. `trusted` is False while the fabric is not ready."""
    vertices: list[Vertex] = []
    links: list[Link] = []
    state = LinkState.UP if trusted else LinkState.UNKNOWN
    lost = gpus_off_fabric(machine, wirings)
    first_hub = next((wiring.hub for wiring in wirings if wiring.hub), None)
    for wiring in wirings:
        confidence = (1.0 if wiring.certain else 0.7) if trusted else 0.3
        if wiring.hub:
            vertices.append(Vertex(id=wiring.hub, kind=VertexKind.NVSWITCH, multicast=multicast))
            usual = most_common_link_count(machine, wiring.gpus)
            for index in wiring.gpus:
                count = link_count(machine, index)
                if index in lost:
                    continue
                links.append(
                    Link(
                        a=f"gpu{index}",
                        b=wiring.hub,
                        kind=LinkKind.NVSWITCH,
                        bytes_per_s=_line_rate([machine.gpus[index]], count),
                        count=count,
                        label=f"NV{count}",
                        state=LinkState.DEGRADED if count < usual and trusted else state,
                        confidence=confidence,
                    )
                )
            continue
        for pair, count in sorted(machine.nv.items()):
            if count and pair[0] in wiring.gpus:
                ends = [machine.gpus[index] for index in pair]
                # Which cable lost its links is not known from counts per GPU, so both ends are marked.
                weak = any(min(end.active.values(), default=count) < machine.nv_sum(end.index) for end in ends)
                links.append(
                    Link(
                        a=f"gpu{pair[0]}",
                        b=f"gpu{pair[1]}",
                        kind=LinkKind.NVLINK,
                        bytes_per_s=_line_rate(ends, count),
                        count=count,
                        label=f"NV{count}",
                        state=LinkState.DEGRADED if weak and trusted else state,
                        confidence=confidence,
                    )
                )
    links += [
        Link(
            a=f"gpu{index}",
            b=first_hub,
            kind=LinkKind.NVSWITCH,
            bytes_per_s=0.0,
            count=0,
            label="NV0",
            state=LinkState.ABSENT,
        )
        for index in lost
        if first_hub is not None
    ]
    links += [
        Link(a=f"gpu{a}", b=f"gpu{b}", kind=LinkKind.NVLINK, label="XGMI", confidence=1.0)
        for a, b in sorted(machine.xgmi)
    ]
    return vertices, links


def _line_rate(ends: list[GpuFacts], count: int) -> float | None:
    rates = [end.line_bytes_per_s for end in ends if end.line_bytes_per_s]
    return min(rates) * count if rates and count else None


def host_fabric(machine: Machine, *, confidence: float) -> tuple[list[Vertex], list[Link]]:
    """Return the PCIe switches, the CPUs, and the links from every device up to them."""
    devices = [f"gpu{index}" for index in sorted(machine.gpus)] + [nic.label for nic in machine.nics]
    rate = {f"gpu{index}": gpu.pcie_bytes_per_s for index, gpu in machine.gpus.items()}
    rate |= {nic.label: nic.pcie_bytes_per_s for nic in machine.nics}
    tray = {f"gpu{index}": gpu.tray for index, gpu in machine.gpus.items()}
    tray |= {nic.label: nic.tray for nic in machine.nics}
    degraded = {f"gpu{gpu.index}" for gpu in machine.gpus.values() if gpu.downgraded}
    vertices: list[Vertex] = []
    links: list[Link] = []

    def switch(below: list[str], label: str) -> str:
        name = f"pcie{len(vertices)}"
        vertices.append(Vertex(id=name, kind=VertexKind.PCIE_SWITCH, tray=tray[leaves[below[0]][0]]))
        links.extend(
            _pcie(device, name, label, rate.get(device), confidence, degraded=device in degraded) for device in below
        )
        leaves[name] = [leaf for device in below for leaf in leaves[device]]
        return name

    # `roots`: vertices that have no uplink yet. `leaves`: the devices below each vertex.
    leaves: dict[str, list[str]] = {device: [device] for device in devices}
    roots = devices
    for label in ("PIX", "PXB"):
        near = {"PIX"} if label == "PIX" else {"PIX", "PXB"}
        joined = [
            (a, b)
            for at, a in enumerate(roots)
            for b in roots[at + 1 :]
            if any(machine.path(x, y) in near for x in leaves[a] for y in leaves[b])
        ]
        groups = components(roots, joined)
        grouped = {member for group in groups for member in group}
        roots = [root for root in roots if root not in grouped] + [switch(group, label) for group in groups]
    cpus = _cpus(machine, roots, leaves)
    for root in roots:
        cpu, certain = cpus[root]
        if all(vertex.id != cpu for vertex in vertices):
            vertices.append(Vertex(id=cpu, kind=VertexKind.CPU, tray=tray[leaves[root][0]]))
        label = _uplink_class(machine, root, roots, leaves)
        trust = confidence * (1.0 if certain else 0.7 if cpu != UNKNOWN_CPU else 0.3)
        links.append(_pcie(root, cpu, label, rate.get(root), trust, degraded=root in degraded))
    sockets = [vertex for vertex in vertices if vertex.kind is VertexKind.CPU]
    links += [
        Link(
            a=first.id,
            b=second.id,
            kind=LinkKind.SMP,
            label="SYS",
            source=Source.ASSUMED,
            confidence=confidence * (0.3 if UNKNOWN_CPU in {first.id, second.id} else 1.0),
        )
        for at, first in enumerate(sockets)
        for second in sockets[at + 1 :]
        if first.tray == second.tray
    ]
    for index, gpu in sorted(machine.gpus.items()):
        if gpu.c2c_bytes_per_s:
            root = next(root for root in roots if f"gpu{index}" in leaves[root])
            links.append(
                Link(
                    a=f"gpu{index}",
                    b=cpus[root][0],
                    kind=LinkKind.C2C,
                    nccl_bytes_per_s=gpu.c2c_bytes_per_s,
                    label="C2C",
                )
            )
    return vertices, links


def _pcie(a: str, b: str, label: str, rate: float | None, confidence: float, *, degraded: bool) -> Link:
    return Link(
        a=a,
        b=b,
        kind=LinkKind.PCIE,
        bytes_per_s=rate,
        label=label,
        state=LinkState.DEGRADED if degraded else LinkState.UP,
        source=Source.DATASHEET if rate is not None else Source.ASSUMED,
        confidence=confidence,
    )


def _uplink_class(machine: Machine, root: str, roots: list[str], leaves: dict[str, list[str]]) -> str:
    """Return the nearest path class from `root` to any other root; empty when none was printed."""
    seen = {machine.path(x, y) for other in roots if other != root for x in leaves[root] for y in leaves[other]}
    return next((label for label in ("PHB", "NODE", "SYS") if label in seen), "")


def _cpus(machine: Machine, roots: list[str], leaves: dict[str, list[str]]) -> dict[str, tuple[str, bool]]:
    """Return the CPU of each root, and whether a source names its NUMA node (else inferred from the classes)."""
    numa: dict[str, tuple[int, int] | None] = {}
    for root in roots:
        gpus = [machine.gpus[int(leaf[3:])] for leaf in leaves[root] if leaf in _gpu_vertices(machine)]
        nics = [nic for nic in machine.nics if nic.label in leaves[root]]
        nodes = [(gpu.numa, gpu.tray) for gpu in gpus] + [(nic.numa, nic.tray) for nic in nics]
        numa[root] = next(((node, tray) for node, tray in nodes if node is not None), None)
    trays = len({gpu.tray for gpu in machine.gpus.values()})
    found: dict[str, tuple[str, bool]] = {}
    for root, node in numa.items():
        if node is not None:
            found[root] = (f"cpu{node[0]}" if trays < 2 else f"cpu{node[1]}.{node[0]}", True)
    near = [
        (a, b)
        for at, a in enumerate(roots)
        for b in roots[at + 1 :]
        if any(machine.path(x, y) in {"PHB", "NODE"} for x in leaves[a] for y in leaves[b])
    ]
    groups = components(roots, near)
    placed = {root for group in groups for root in group}
    groups += [[root] for root in roots if root not in placed]
    free = (f"cpu{n}" for n in range(len(roots) + len(found) + 1) if all(f"cpu{n}" != cpu for cpu, _ in found.values()))
    for group in groups:
        known = next((found[root][0] for root in group if root in found), None)
        if known is None:
            # Class SYS to another group means that this group has a CPU of its own; a missing class means nothing.
            apart = any(
                machine.path(x, y) == "SYS"
                for root in group
                for other in roots
                if other not in group and _has_gpu(machine, leaves[other])
                for x in leaves[root]
                for y in leaves[other]
            )
            known = next(free) if len(group) > 1 or (apart and _has_gpu(machine, leaves[group[0]])) else UNKNOWN_CPU
        for root in group:
            found.setdefault(root, (known, False))
    return found


def _gpu_vertices(machine: Machine) -> set[str]:
    return {f"gpu{index}" for index in machine.gpus}


def _has_gpu(machine: Machine, devices: list[str]) -> bool:
    return not _gpu_vertices(machine).isdisjoint(devices)
