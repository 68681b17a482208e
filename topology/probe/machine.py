"""Combine what the sources say of one machine: the step between the readers and the `Cluster`.

Each source identifies GPUs differently. nvidia-smi and NVML count them in PCI order; NCCL's XML has `dev` numbers, or
only addresses; sysfs has addresses. GPUs are matched by address where two sources have it, else by index. Values that
differ between sources are all kept (link counts per source), and `topology.probe.checks` compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeVar

from topology.cluster import Cluster, Finding, Severity
from topology.readers.matrix_text import is_affinity
from topology.readers.nccl_xml import GpuElement, NcclGraph, NcclTopology, normal_busid
from topology.readers.nvml import NvmlGpu, NvmlSnapshot
from topology.readers.smi_nvlink import NvlinkReport
from topology.readers.smi_p2p import P2pMatrix
from topology.readers.smi_query import QueriedGpu
from topology.readers.smi_topo import TopoMatrix, nv_count
from topology.readers.sysfs import PciPlace, SysfsSnapshot, path_class

T = TypeVar("T", int, str)
MOST_NUMA = 2**16  # nodes; NVML's own bound


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What the readers returned. An empty field means that the source was not available."""

    topo: TopoMatrix | None = None
    p2p: tuple[P2pMatrix, ...] = ()
    nvlink: NvlinkReport | None = None
    nvlink_text: str = ""  # all link listings, one after the other: blocks of the same GPU merge
    query: tuple[QueriedGpu, ...] = ()
    nccl: NcclTopology | None = None
    graphs: tuple[NcclGraph, ...] = ()
    nvml: NvmlSnapshot | None = None
    sysfs: SysfsSnapshot | None = None
    saved: Cluster | None = None
    unreachable: tuple[tuple[str, str], ...] = ()  # address of a GPU that nvidia-smi cannot reach, its words
    findings: list[Finding] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class GpuFacts:
    index: int
    uuid: str | None = None
    name: str | None = None
    pci: str | None = None
    memory_bytes: int | None = None
    numa: int | None = None
    numa_affinity: str | None = None
    cpu_affinity: str | None = None
    tray: int = 0
    sm: int | None = None
    place: PciPlace | None = None
    pcie_bytes_per_s: float | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    c2c_bytes_per_s: float | None = None
    active: dict[str, int] = field(default_factory=dict)  # source -> NVLinks in use
    listed: int | None = None  # NVLinks that some source lists, in use or not
    line_bytes_per_s: float | None = None  # per link, as `nvlink -s` prints it
    remotes: dict[str, int] = field(default_factory=dict)  # address of a far end -> links (`nvlink -R`)
    switched: bool | None = None  # the far ends are NVSwitches (True), GPUs (False), or unknown
    mig: bool | None = None
    nvml: NvmlGpu | None = None

    @property
    def downgraded(self) -> bool:
        """Whether the PCIe link runs with fewer lanes than it could."""
        return bool(self.pcie_width and self.pcie_width_max and self.pcie_width < self.pcie_width_max)


@dataclass(slots=True, kw_only=True)
class NicFacts:
    label: str
    name: str | None = None
    pci: str | None = None
    place: PciPlace | None = None
    numa: int | None = None
    tray: int = 0
    bytes_per_s: float | None = None
    pcie_bytes_per_s: float | None = None
    up: bool | None = None


@dataclass(slots=True, kw_only=True)
class Machine:
    """One machine: `pairs` are labels to show, `nv` NVLink counts, `classes` the host path class of two devices."""

    gpus: dict[int, GpuFacts] = field(default_factory=dict)
    nics: list[NicFacts] = field(default_factory=list)
    pairs: dict[tuple[int, int], str] = field(default_factory=dict)
    nv: dict[tuple[int, int], int] = field(default_factory=dict)
    classes: dict[tuple[str, str], str] = field(default_factory=dict)
    counts: dict[int, list[int]] = field(default_factory=dict)  # GPU -> NVLink counts of its pairs, none of them zero
    xgmi: set[tuple[int, int]] = field(default_factory=set)  # pairs joined by AMD's direct links, one each
    printed: bool = False  # the labels and classes were printed by nvidia-smi
    hides_nvlink: bool = False  # they leave NVLink out (`topo -mp`)

    def path(self, a: str, b: str) -> str | None:
        return self.classes.get((a, b)) or self.classes.get((b, a))

    def islands(self) -> list[list[int]]:
        """Return the groups of two or more GPUs that NVLink connects, directly or through switches."""
        return components(sorted(self.gpus), [*(pair for pair, count in self.nv.items() if count), *self.xgmi])

    def nv_total(self, index: int) -> int:
        """Return the largest link count of this GPU's pairs, which is its number of links if there are switches."""
        return max(self.counts.get(index, ()), default=0)

    def nv_sum(self, index: int) -> int:
        """Return the sum of the link counts of this GPU's pairs, which is its number of links if there are cables."""
        return sum(self.counts.get(index, ()))


def components(members: list[T], joined: list[tuple[T, T]]) -> list[list[T]]:
    """Return the connected components with two members or more, each in the order of `members`."""
    parent = {member: member for member in members}

    def root(member: T) -> T:
        while parent[member] != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    for a, b in joined:
        if a in parent and b in parent:
            parent[root(b)] = root(a)
    groups: dict[T, list[T]] = {}
    for member in members:
        groups.setdefault(root(member), []).append(member)
    return [group for group in groups.values() if len(group) > 1]


def combine_sources(evidence: Evidence) -> Machine:
    """Combine the sources. Contradictions about which GPU is which become findings in `evidence`."""
    machine = Machine()
    _from_topo(machine, evidence.topo)
    _from_nvlink(machine, evidence.nvlink)
    _from_query(machine, evidence.query)
    _from_nvml(machine, evidence.nvml, evidence.findings)
    _from_nccl(machine, evidence.nccl)
    _from_sysfs(machine, evidence.sysfs, evidence.findings)
    if not machine.gpus:  # tables of peer access alone
        for index in (index for table in evidence.p2p if table.status for index in table.gpus):
            _gpu(machine, index)
    _add_path_classes(machine)
    _detect_switches(machine)
    _add_switched_pairs(machine)
    for pair, count in machine.nv.items():
        for index in pair if count else ():
            machine.counts.setdefault(index, []).append(count)
    for a in sorted(machine.gpus):
        for b in sorted(machine.gpus):
            if a < b and (a, b) not in machine.pairs:
                label = f"NV{machine.nv[a, b]}" if machine.nv.get((a, b)) else machine.path(f"gpu{a}", f"gpu{b}")
                label = "XGMI" if (a, b) in machine.xgmi else label
                if label is not None and not machine.printed:
                    machine.pairs[a, b] = label
    return machine


def _gpu(machine: Machine, index: int) -> GpuFacts:
    return machine.gpus.setdefault(index, GpuFacts(index=index))


def _from_topo(machine: Machine, topo: TopoMatrix | None) -> None:
    if topo is None:
        return
    machine.printed, machine.hides_nvlink = True, topo.hides_nvlink
    for index in topo.gpus:
        gpu, affinity = _gpu(machine, index), topo.affinity.get(index)
        if affinity is not None:
            gpu.cpu_affinity = affinity.cpu if affinity.cpu != "N/A" else None
            gpu.numa_affinity = affinity.numa
            gpu.numa = first_node(affinity.numa)
    for key, label in topo.pairs.items():
        a, b = map(int, key.split("-"))
        machine.pairs[a, b] = label
        if nv_count(label):
            machine.nv[a, b] = nv_count(label)
        elif not label.startswith("NV"):
            machine.classes[f"gpu{a}", f"gpu{b}"] = label
    for nic in topo.nics:
        name = topo.legend.get(nic) or (None if re.fullmatch(r"NIC[0-9]+", nic) else nic)
        machine.nics.append(NicFacts(label=nic, name=name))
    for index, classes in topo.gpu_nics.items():
        for nic, label in classes.items():
            machine.classes[f"gpu{index}", nic] = label
    machine.classes.update(topo.nic_pairs)


def first_node(numa: str | None) -> int | None:
    """Return the lowest NUMA node of a column such as `0` or `0,3-9`; nodes of GPU memory have higher numbers."""
    if numa is None or not is_affinity(numa) or numa == "N/A":
        return None
    lowest = min(int(part.partition("-")[0]) for part in numa.strip(",").split(","))
    return lowest if lowest < MOST_NUMA else None


def _from_nvlink(machine: Machine, report: NvlinkReport | None) -> None:
    for block in report.gpus if report is not None else ():
        gpu = _gpu(machine, block.index)
        gpu.name, gpu.uuid = gpu.name or block.name, gpu.uuid or block.uuid
        gpu.mig = True if block.mig_uuids else gpu.mig
        if block.active is not None:
            gpu.active["nvlink -s"] = block.active
        if block.links:
            gpu.listed = len(block.links)
        gpu.remotes = {normal_busid(remote): count for remote, count in block.remotes.items()}
        rates = [link.bytes_per_s for link in block.links if link.active and link.bytes_per_s]
        gpu.line_bytes_per_s = min(rates) if rates else gpu.line_bytes_per_s


def _from_query(machine: Machine, queried: tuple[QueriedGpu, ...]) -> None:
    for reading in queried:
        gpu = _gpu(machine, reading.index)
        gpu.name, gpu.uuid = gpu.name or reading.name, gpu.uuid or reading.uuid
        gpu.pci = gpu.pci or (normal_busid(reading.pci_bus_id) if reading.pci_bus_id else None)
        gpu.memory_bytes = reading.memory_bytes
        gpu.pcie_width, gpu.pcie_width_max = reading.pcie_width, reading.pcie_width_max
        gpu.mig = reading.mig if reading.mig is not None else gpu.mig


def _from_nvml(machine: Machine, snapshot: NvmlSnapshot | None, findings: list[Finding]) -> None:
    for reading in snapshot.gpus if snapshot is not None else ():
        if reading.lost:
            _forget(machine, reading.index)
            continue
        gpu = _gpu(machine, reading.index)
        if gpu.uuid and reading.uuid and gpu.uuid != reading.uuid:
            findings.append(
                Finding(
                    code="two_identities",
                    gpus=(reading.index,),
                    severity=Severity.WARNING,
                    what=f"GPU {reading.index} has two identities",
                    why=f"nvidia-smi says {gpu.uuid}, NVML says {reading.uuid}",
                    consequence="readings of two GPUs may be mixed under one index",
                    remedy="read all sources in the same container at the same time",
                )
            )
        gpu.nvml = reading
        gpu.uuid, gpu.name = reading.uuid or gpu.uuid, reading.name or gpu.name
        gpu.pci = normal_busid(reading.pci_bus_id) if reading.pci_bus_id else gpu.pci
        gpu.memory_bytes = reading.memory_bytes or gpu.memory_bytes
        gpu.numa = gpu.numa if gpu.numa is not None else reading.numa
        gpu.pcie_width = reading.pcie_width if reading.pcie_width is not None else gpu.pcie_width
        gpu.pcie_width_max = reading.pcie_width_max if reading.pcie_width_max is not None else gpu.pcie_width_max
        gpu.mig = reading.mig if reading.mig is not None else gpu.mig
        if reading.links is not None:
            gpu.active["NVML"] = sum(link.active for link in reading.links)
            gpu.listed = gpu.listed or len(reading.links) or None
            kinds = {link.remote_type for link in reading.links if link.active}
            gpu.switched = True if "switch" in kinds else False if "gpu" in kinds else gpu.switched


def _forget(machine: Machine, index: int) -> None:
    """Leave out a GPU that a source lists and the driver cannot reach."""
    machine.gpus.pop(index, None)
    machine.pairs = {pair: label for pair, label in machine.pairs.items() if index not in pair}
    machine.nv = {pair: count for pair, count in machine.nv.items() if index not in pair}
    machine.classes = {ends: label for ends, label in machine.classes.items() if f"gpu{index}" not in ends}


def nccl_indices(nccl: NcclTopology, known: dict[str, int]) -> list[int]:
    """Return the index of each GPU of the file: by PCI address if another source has it, else its `dev` number.

    Where `dev` repeats (several trays, or halves of one GPU), the `rank` is used. Where neither is unique, GPUs are
    counted in the order of their addresses, as nvidia-smi does.
    """
    if nccl.gpus and all(gpu.pci.busid in known for gpu in nccl.gpus):
        found = [known[gpu.pci.busid] for gpu in nccl.gpus]
        if len(set(found)) == len(found):
            return found
    for choice in ([gpu.dev for gpu in nccl.gpus], [gpu.rank for gpu in nccl.gpus]):
        indices = [index for index in choice if index is not None and 0 <= index < 10**6]
        if len(set(indices)) == len(nccl.gpus):
            return indices
    order = sorted(range(len(nccl.gpus)), key=lambda at: (nccl.gpus[at].pci.busid, at))
    return [order.index(at) for at in range(len(order))]


def _from_nccl(machine: Machine, nccl: NcclTopology | None) -> None:
    if nccl is None:
        return
    hosts = list(dict.fromkeys(cpu.host for cpu in nccl.cpus))
    known = {gpu.pci: gpu.index for gpu in machine.gpus.values() if gpu.pci}
    indices = nccl_indices(nccl, known)
    at_address = {gpu.pci.busid: index for gpu, index in zip(nccl.gpus, indices, strict=True)}
    many = len(hosts) > 1

    def place(pci_bridges: tuple[str, ...], busid: str, cpu: int) -> PciPlace:
        return PciPlace(
            busid=busid,
            host=f"cpu{cpu}",
            bridges=pci_bridges,
            numa=nccl.cpus[cpu].numa,
            tray=hosts.index(nccl.cpus[cpu].host),
        )

    for reading, index in zip(nccl.gpus, indices, strict=True):
        gpu = _gpu(machine, index)
        gpu.place = place(reading.pci.bridges, reading.pci.busid, reading.pci.cpu)
        gpu.pci, gpu.sm, gpu.tray = gpu.pci or reading.pci.busid, reading.sm, gpu.place.tray
        gpu.numa = gpu.numa if gpu.numa is not None else gpu.place.numa
        gpu.pcie_bytes_per_s = reading.pci.link_speed_bytes_per_s
        gpu.c2c_bytes_per_s = reading.c2c_bytes_per_s
        if reading.links or (reading.dev is not None and any(other.links for other in nccl.gpus)):
            gpu.active["NCCL XML"] = _nccl_links(reading, nccl)
        if any(link.to_switch and link.count for link in reading.links):
            gpu.switched = True
        elif reading.links and not any(link.to_switch for link in reading.links):
            gpu.switched = False
        for link in reading.links:
            # With several trays an address names one GPU in each; such files have switches, never direct links.
            peer = at_address.get(link.target) if not many else None
            if peer is None or peer == index or not link.count:
                continue
            pair = (min(index, peer), max(index, peer))
            if link.xgmi:
                machine.xgmi.add(pair)
            elif pair not in machine.pairs or machine.hides_nvlink:
                machine.nv.setdefault(pair, link.count)
    nic_by_name = {nic.name: nic for nic in machine.nics if nic.name}
    for net in nccl.nets:
        nic = nic_by_name.get(net.name)
        if nic is None:
            nic = NicFacts(label=net.name or f"net{net.dev}", name=net.name or None)
            machine.nics.append(nic)
        nic.bytes_per_s, nic.tray = net.bytes_per_s, hosts.index(nccl.cpus[net.cpu].host)
        nic.numa = nccl.cpus[net.cpu].numa
        if net.pci is not None:
            nic.pci, nic.pcie_bytes_per_s = net.pci.busid, net.pci.link_speed_bytes_per_s
            nic.place = place(net.pci.bridges, net.pci.busid, net.cpu)
    for device in nccl.devices:
        if device.device_class[:4] == "0x02":
            facts = NicFacts(label=device.busid, pci=device.busid, numa=nccl.cpus[device.cpu].numa)
            facts.place = place(device.bridges, device.busid, device.cpu)
            facts.tray = facts.place.tray
            machine.nics.append(facts)
    _distinct_labels(machine)


def _nccl_links(reading: GpuElement, nccl: NcclTopology) -> int:
    """Return the NVLinks of one GPU. Each half of a split GPU (`mlopart`) lists the links of the whole."""
    total = sum(link.count for link in reading.links if not link.xgmi)
    halves = sum(1 for other in nccl.gpus if reading.mlopart is not None and other.pci.busid == reading.pci.busid)
    return total // max(halves, 1)


def _distinct_labels(machine: Machine) -> None:
    """Number the labels that repeat, such as `mlx5_0` of two trays, so that each names one vertex."""
    seen: dict[str, int] = {}
    for nic in machine.nics:
        count = seen[nic.label] = seen.get(nic.label, 0) + 1
        if count > 1:
            nic.label = f"{nic.label}#{count}"


def _from_sysfs(machine: Machine, sysfs: SysfsSnapshot | None, findings: list[Finding]) -> None:
    if sysfs is None:
        return
    by_address = {gpu.pci: gpu for gpu in machine.gpus.values() if gpu.pci}
    unmatched = [found for found in sysfs.gpus if found.place.busid not in by_address]
    nameless = [machine.gpus[index] for index in sorted(machine.gpus) if machine.gpus[index].pci is None]
    if unmatched and len(unmatched) == len(nameless):
        by_address.update({found.place.busid: gpu for found, gpu in zip(unmatched, nameless, strict=True)})
    elif unmatched and machine.gpus:
        findings.append(
            Finding(
                code="not_offered",
                severity=Severity.WARNING,
                what=f"{len(unmatched)} GPUs on the PCI bus are not offered by the driver",
                why=f"sysfs lists {', '.join(found.place.busid for found in unmatched[:16])}",
                consequence="plans use the remaining GPUs only",
                remedy="check the container's device list, or look for a lost GPU with `dmesg | grep Xid`",
            )
        )
    for found in sysfs.gpus:
        gpu = by_address.get(found.place.busid)
        if gpu is None:
            continue
        gpu.pci, gpu.place = found.place.busid, found.place
        gpu.numa = gpu.numa if gpu.numa is not None else found.place.numa
        gpu.pcie_bytes_per_s = found.link.bytes_per_s or gpu.pcie_bytes_per_s
        gpu.pcie_width = gpu.pcie_width or found.link.width
        gpu.pcie_width_max = gpu.pcie_width_max or found.link.width_max
    nic_by_name = {nic.name: nic for nic in machine.nics if nic.name}
    rdma = any(nic.rdma for nic in sysfs.nics)
    for reading in sysfs.nics:
        nic = next((nic_by_name[name] for name in (reading.name, *reading.interfaces) if name in nic_by_name), None)
        if nic is None:
            if machine.nics and (not reading.rdma) and rdma:
                continue  # a management port alongside a training fabric
            nic = NicFacts(label=reading.name, name=reading.name)
            machine.nics.append(nic)
        nic.bytes_per_s, nic.up, nic.place = reading.bytes_per_s or nic.bytes_per_s, reading.up, reading.place
        if reading.place is not None:
            nic.pci, nic.numa = reading.place.busid, reading.place.numa
        if reading.link is not None:
            nic.pcie_bytes_per_s = reading.link.bytes_per_s
    _distinct_labels(machine)


def _add_path_classes(machine: Machine) -> None:
    """Fill in path classes from the PCI tree where no matrix has one (no matrix, or NVLink pairs)."""
    places = [(f"gpu{gpu.index}", gpu.place) for _, gpu in sorted(machine.gpus.items()) if gpu.place is not None]
    places += [(nic.label, nic.place) for nic in machine.nics if nic.place is not None]
    for at, (a, first) in enumerate(places):
        for b, second in places[at + 1 :]:
            if machine.path(a, b) is None and first.host and second.host and first.ports_listed == second.ports_listed:
                label = path_class(first, second)
                if label is not None:
                    machine.classes[a, b] = label


def _detect_switches(machine: Machine) -> None:
    """Mark GPUs whose links end at no GPU's address as switched; needs every GPU's address."""
    addresses = {gpu.pci: gpu.index for gpu in machine.gpus.values() if gpu.pci}
    if len(addresses) < len(machine.gpus) or len(addresses) < 2:
        return
    for gpu in machine.gpus.values():
        if gpu.remotes and gpu.switched is None:
            gpu.switched = not any(remote in addresses for remote in gpu.remotes)


def _add_switched_pairs(machine: Machine) -> None:
    """Add the pairs of switched GPUs, with the smaller link count of the two."""
    switched = [gpu for _, gpu in sorted(machine.gpus.items()) if gpu.switched and any(gpu.active.values())]
    for at, first in enumerate(switched):
        for second in switched[at + 1 :]:
            pair = (first.index, second.index)
            if pair not in machine.nv and (pair not in machine.pairs or machine.hides_nvlink):
                machine.nv[pair] = min(max(first.active.values()), max(second.active.values()))
