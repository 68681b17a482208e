"""From labels to a graph: which hubs and links a machine must have for its pairs to be called what they are called.

NVLink: if the counts printed for one GPU's pairs add up to more links than any GPU has, they are the same links seen
from each peer, so there is a switch: one hub, each GPU on it with its own count. Otherwise the links are cables between
GPUs. PCIe: devices that see each other as PIX share a switch, groups that see each other as PXB share the one above,
everything else meets at the CPU of its NUMA node, and CPUs meet over the socket interconnect. The labels say where a
path goes, never how fast it is; a virtual machine's labels do not even say that, which `confidence` records.
"""

from __future__ import annotations

from dataclasses import dataclass

from topology.cluster import Link, LinkKind, LinkState, Source, Vertex, VertexKind
from topology.machine import GpuFacts, Machine, components

MAX_LINKS = 18  # of one GPU, Hopper and Blackwell; Rubin has 36 and always switches
UNKNOWN_CPU = "cpu_unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkPlan:
    """How one island is wired: a hub, or cables between its GPUs. `sure` is False where labels allow both."""

    gpus: tuple[int, ...]
    hub: str | None
    sure: bool


def nvlink_plans(machine: Machine, max_links: int | None = None) -> list[NvlinkPlan]:
    """Decide hub or cables for each island. `max_links` is the link count of the GPU model, where it is known."""
    limit = max_links or MAX_LINKS
    plans: list[NvlinkPlan] = []
    hubs = 0
    for island in machine.islands():
        said = {machine.gpus[index].switched for index in island} - {None}
        over = any(machine.nv_sum(gpu) > limit for gpu in island)
        hub = over or (True in said) or any(_scattered(machine, gpu) for gpu in island)
        if said == {False} and not over:
            hub = False
        # A slice of a switched machine (two or three of its GPUs) can look like cables.
        counts = {machine.nv.get((a, b), 0) for at, a in enumerate(island) for b in island[at + 1 :]}
        sure = hub or bool(said) or len(counts) > 1 or len(island) * max(counts, default=0) < MAX_LINKS
        plans.append(NvlinkPlan(gpus=tuple(island), hub=f"nvswitch{hubs}" if hub else None, sure=sure))
        hubs += hub
    return plans


def _scattered(machine: Machine, index: int) -> bool:
    """Link ends of one GPU at more addresses than it has peers: those are switches (`nvlink -R`)."""
    peers = len(machine.counts.get(index, ()))
    return peers > 0 and len(machine.gpus[index].remotes) > peers


def link_count(machine: Machine, index: int) -> int:
    """Links of a GPU that can be relied on: the smallest count that any source gives."""
    gpu = machine.gpus[index]
    counts = [*gpu.active.values()]
    if machine.nv_total(index):
        counts.append(machine.nv_total(index))
    return min(counts, default=0)


def usual_count(machine: Machine, gpus: tuple[int, ...]) -> int:
    """The link count most GPUs of a group have, the larger one on a tie."""
    counts = [max([*machine.gpus[gpu].active.values(), machine.nv_total(gpu)]) for gpu in gpus]
    return max(counts, key=lambda count: (counts.count(count), count), default=0)


def off_fabric(machine: Machine, plans: list[NvlinkPlan]) -> list[int]:
    """GPUs without a single working link on a machine whose other GPUs share an NVSwitch fabric."""
    if not any(plan.hub for plan in plans):
        return []
    joined = {gpu for plan in plans if plan.hub for gpu in plan.gpus if link_count(machine, gpu) > 0}
    return [index for index in sorted(machine.gpus) if index not in joined]


def nvlink_fabric(
    machine: Machine, plans: list[NvlinkPlan], *, multicast: bool, trusted: bool
) -> tuple[list[Vertex], list[Link]]:
    """Return hubs and NVLink links. `trusted` is False while the fabric manager has not finished."""
    vertices: list[Vertex] = []
    links: list[Link] = []
    state = LinkState.UP if trusted else LinkState.UNKNOWN
    lost = off_fabric(machine, plans)
    first_hub = next((plan.hub for plan in plans if plan.hub), None)
    for plan in plans:
        confidence = (1.0 if plan.sure else 0.7) if trusted else 0.3
        if plan.hub:
            vertices.append(Vertex(id=plan.hub, kind=VertexKind.NVSWITCH, multicast=multicast))
            usual = usual_count(machine, plan.gpus)
            for index in plan.gpus:
                count = link_count(machine, index)
                if index in lost:
                    continue
                links.append(
                    Link(
                        a=f"gpu{index}",
                        b=plan.hub,
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
            if count and pair[0] in plan.gpus:
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
    """Return PCIe switches, CPUs and the links of the host path for every device."""
    devices = [f"gpu{index}" for index in sorted(machine.gpus)] + [nic.label for nic in machine.nics]
    rate = {f"gpu{index}": gpu.pcie_bytes_per_s for index, gpu in machine.gpus.items()}
    rate |= {nic.label: nic.pcie_bytes_per_s for nic in machine.nics}
    tray = {f"gpu{index}": gpu.tray for index, gpu in machine.gpus.items()}
    tray |= {nic.label: nic.tray for nic in machine.nics}
    narrow = {f"gpu{gpu.index}" for gpu in machine.gpus.values() if gpu.narrowed}
    vertices: list[Vertex] = []
    links: list[Link] = []

    def switch(below: list[str], label: str) -> str:
        name = f"pcie{len(vertices)}"
        vertices.append(Vertex(id=name, kind=VertexKind.PCIE_SWITCH, tray=tray[leaves[below[0]][0]]))
        links.extend(
            _pcie(device, name, label, rate.get(device), confidence, narrow=device in narrow) for device in below
        )
        leaves[name] = [leaf for device in below for leaf in leaves[device]]
        return name

    # `tops` are the vertices that still need a way up; `leaves` the devices below each of them.
    leaves: dict[str, list[str]] = {device: [device] for device in devices}
    tops = devices
    for label in ("PIX", "PXB"):
        near = {"PIX"} if label == "PIX" else {"PIX", "PXB"}
        joined = [
            (a, b)
            for at, a in enumerate(tops)
            for b in tops[at + 1 :]
            if any(machine.path(x, y) in near for x in leaves[a] for y in leaves[b])
        ]
        groups = components(tops, joined)
        grouped = {member for group in groups for member in group}
        tops = [top for top in tops if top not in grouped] + [switch(group, label) for group in groups]
    cpus = _cpus(machine, tops, leaves)
    for top in tops:
        cpu, sure = cpus[top]
        if all(vertex.id != cpu for vertex in vertices):
            vertices.append(Vertex(id=cpu, kind=VertexKind.CPU, tray=tray[leaves[top][0]]))
        label = _up_label(machine, top, tops, leaves)
        trust = confidence * (1.0 if sure else 0.7 if cpu != UNKNOWN_CPU else 0.3)
        links.append(_pcie(top, cpu, label, rate.get(top), trust, narrow=top in narrow))
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
            top = next(top for top in tops if f"gpu{index}" in leaves[top])
            links.append(
                Link(
                    a=f"gpu{index}",
                    b=cpus[top][0],
                    kind=LinkKind.C2C,
                    nccl_bytes_per_s=gpu.c2c_bytes_per_s,
                    label="C2C",
                )
            )
    return vertices, links


def _pcie(a: str, b: str, label: str, rate: float | None, confidence: float, *, narrow: bool) -> Link:
    return Link(
        a=a,
        b=b,
        kind=LinkKind.PCIE,
        bytes_per_s=rate,
        label=label,
        state=LinkState.DEGRADED if narrow else LinkState.UP,
        source=Source.DATASHEET if rate is not None else Source.ASSUMED,
        confidence=confidence,
    )


def _up_label(machine: Machine, top: str, tops: list[str], leaves: dict[str, list[str]]) -> str:
    """The nearest class by which this device sees others above its switches; empty when none was printed."""
    seen = {machine.path(x, y) for other in tops if other != top for x in leaves[top] for y in leaves[other]}
    return next((label for label in ("PHB", "NODE", "SYS") if label in seen), "")


def _cpus(machine: Machine, tops: list[str], leaves: dict[str, list[str]]) -> dict[str, tuple[str, bool]]:
    """Return for each top vertex its CPU and whether a source named the NUMA node (else it follows from the labels)."""
    numa: dict[str, tuple[int, int] | None] = {}
    for top in tops:
        gpus = [machine.gpus[int(leaf[3:])] for leaf in leaves[top] if leaf in _gpu_vertices(machine)]
        nics = [nic for nic in machine.nics if nic.label in leaves[top]]
        nodes = [(gpu.numa, gpu.tray) for gpu in gpus] + [(nic.numa, nic.tray) for nic in nics]
        numa[top] = next(((node, tray) for node, tray in nodes if node is not None), None)
    trays = len({gpu.tray for gpu in machine.gpus.values()})
    found: dict[str, tuple[str, bool]] = {}
    for top, node in numa.items():
        if node is not None:
            found[top] = (f"cpu{node[0]}" if trays < 2 else f"cpu{node[1]}.{node[0]}", True)
    near = [
        (a, b)
        for at, a in enumerate(tops)
        for b in tops[at + 1 :]
        if any(machine.path(x, y) in {"PHB", "NODE"} for x in leaves[a] for y in leaves[b])
    ]
    groups = components(tops, near)
    placed = {top for group in groups for top in group}
    groups += [[top] for top in tops if top not in placed]
    free = (f"cpu{n}" for n in range(len(tops) + len(found) + 1) if all(f"cpu{n}" != cpu for cpu, _ in found.values()))
    for group in groups:
        known = next((found[top][0] for top in group if top in found), None)
        if known is None:
            # SYS to another group is a statement that this one hangs on a CPU of its own; silence is not.
            apart = any(
                machine.path(x, y) == "SYS"
                for top in group
                for other in tops
                if other not in group and _has_gpu(machine, leaves[other])
                for x in leaves[top]
                for y in leaves[other]
            )
            known = next(free) if len(group) > 1 or (apart and _has_gpu(machine, leaves[group[0]])) else UNKNOWN_CPU
        for top in group:
            found.setdefault(top, (known, False))
    return found


def _gpu_vertices(machine: Machine) -> set[str]:
    return {f"gpu{index}" for index in machine.gpus}


def _has_gpu(machine: Machine, devices: list[str]) -> bool:
    return not _gpu_vertices(machine).isdisjoint(devices)
