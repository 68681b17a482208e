"""What the machine is: GPUs, the switches and links between them, NICs, and the fabric between nodes.

A `Cluster` is a list of node groups, each one `Node` description and how often it occurs, so that 16,384 GPUs take as
much memory as eight. Costs and placements are derived from it in `topology.rates`; nothing here does I/O. Rates are
bytes per second **per direction**, each with its source.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

ASSUMED = "assumed: "  # how findings begin that state what a cluster's description left open
SCHEMA_VERSION = 1

# Share of a link's nominal rate that one large copy reaches: 396 of 450 GB/s between two H200 over NVSwitch, 55.4 of 63
# over PCIe 5 (nvbandwidth figures in stas00/ml-engineering, network/README.md).
COPY_SHARE = 0.88


class Source(StrEnum):
    """Where a number came from, most reliable first. Every estimate states its source."""

    MEASURED = "measured"
    FITTED = "fitted"
    DATASHEET = "datasheet"
    ASSUMED = "assumed"


class LinkKind(StrEnum):
    """The technology of a link. nvidia-smi's PCIe classes (`Link.label`) say where a path goes, not how fast it is."""

    NVLINK = "nvlink"  # GPU to GPU, `count` bonded links
    NVSWITCH = "nvswitch"  # GPU to an NVSwitch hub, `count` links of that GPU
    C2C = "c2c"  # GPU to the CPU of the same superchip
    PCIE = "pcie"  # device to switch, switch to root port, device to CPU
    SMP = "smp"  # CPU socket to CPU socket (UPI, xGMI)
    NETWORK = "network"  # NIC to leaf switch


class LinkState(StrEnum):
    UP = "up"
    DEGRADED = "degraded"
    ABSENT = "absent"
    UNKNOWN = "unknown"


class VertexKind(StrEnum):
    """Vertices of a node that are neither GPUs nor NICs; several GPUs share one and so its bandwidth."""

    NVSWITCH = "nvswitch"  # one hub for the whole NVSwitch fabric of the node
    PCIE_SWITCH = "pcie_switch"
    ROOT_PORT = "root_port"
    CPU = "cpu"  # one per NUMA node


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """One GPU model's datasheet and the best rates published for it.

    `peak_flops` and `achieved_flops` map a dtype name (`bfloat16`, `float16`, `float8`, `tfloat32`, `float32`) to
    dense FLOP/s. `achieved_flops` is the best large matmul anyone published, which the power limit keeps below the
    datasheet, and clocks above the rated one lift over it. `sources` says where each field is from.
    """

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    architecture: str
    compute_capability: int  # 90 for Hopper; 0 where CUDA has no number for it
    sm_count: int
    memory_bytes: int  # what the driver reports to a program, not the marketing figure
    memory_bytes_per_s: float
    peak_flops: dict[str, float]
    achieved_flops: dict[str, float] = field(default_factory=dict)
    l2_bytes: int = 0
    power_w: float = 0.0
    nvlink_links: int = 0
    nvlink_bytes_per_s: float = 0.0  # one link, one direction
    nvlink_nccl_bytes_per_s: float = 0.0  # what NCCL's topology model assumes for that link
    c2c_bytes_per_s: float = 0.0
    pcie_bytes_per_s: float = 0.0  # the whole host link, one direction
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def by_amd(self) -> bool:
        """Whether AMD makes it: its links are xGMI, not NVLink, and HIP and RCCL run on it."""
        return self.architecture.startswith("CDNA")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One physical GPU of a node. `index` is nvidia-smi's; `uuid` and `pci_bus_id` are what identifies it."""

    index: int
    kind: str  # name of a GpuKind of the cluster
    uuid: str | None = None
    pci_bus_id: str | None = None
    name: str | None = None  # as the driver prints it
    memory_bytes: int | None = None
    numa: int | None = None
    numa_affinity: str | None = None  # as printed; a list where several nodes are near (POWER9, GB200)
    cpu_affinity: str | None = None
    tray: int = 0  # compute tray (operating-system host) within the node, for racks that are one NVLink domain
    healthy: bool = True

    @property
    def vertex(self) -> str:
        return f"gpu{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network port. `label` is how the topology text names it (`mlx5_0`, `NIC0`); `rail` is its leaf switch."""

    label: str
    name: str | None = None
    bytes_per_s: float | None = None
    rail: int | None = None
    numa: int | None = None
    tray: int = 0
    up: bool = True
    pci_bus_id: str | None = None

    @property
    def vertex(self) -> str:
        return self.label


@dataclass(frozen=True, slots=True, kw_only=True)
class Vertex:
    """A hub inside the node: NVSwitch fabric, PCIe switch, root port or CPU socket."""

    id: str
    kind: VertexKind
    multicast: bool = False  # NVSwitch only: can reduce and multicast in the switch (NVLS)
    tray: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An undirected cable or trace between two vertices, each direction with the given rate.

    `bytes_per_s` is nominal; `nccl_bytes_per_s` is what NCCL's topology model gives it; `measured_bytes_per_s` is what
    a probe saw. `label` keeps the class the source printed (`NV18`, `PIX`, `SYS`).
    """

    a: str
    b: str
    kind: LinkKind
    bytes_per_s: float | None = None
    nccl_bytes_per_s: float | None = None
    measured_bytes_per_s: float | None = None
    latency_s: float = 0.0
    count: int = 1
    label: str = ""
    state: LinkState = LinkState.UP
    source: Source = Source.DATASHEET
    confidence: float = 1.0  # 0..1: how much the label says about the rate (a VM's SYS says nothing)

    @property
    def best_bytes_per_s(self) -> float | None:
        """The nominal rate to plan with, in bytes/s and direction; zero when the link is absent.

        Cost models start from nominal rates and apply an efficiency of their own. A measured rate is that of a copy,
        which reaches `COPY_SHARE` of a healthy link's nominal rate, so it is divided by that share and lowers the
        nominal rate only where the link delivers less.
        """
        if self.state is LinkState.ABSENT:
            return 0.0
        if self.measured_bytes_per_s is None:
            return self.bytes_per_s
        delivered = self.measured_bytes_per_s / COPY_SHARE
        return delivered if self.bytes_per_s is None else min(self.bytes_per_s, delivered)


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact about the machine that the user should know: what it is, the evidence, the consequence and the remedy.

    Programs use the stable `code`, the `gpus` that it is about, and `numbers`, the values in the sentences.
    """

    code: str = "note"
    severity: Severity
    what: str
    why: str
    consequence: str
    remedy: str
    gpus: tuple[int, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One scale-up unit: a host, or a rack whose trays share one NVLink domain.

    `pairs` keeps the printed class of every GPU pair (`"0-1": "NV18"`), lower index first, exactly as read.
    """

    name: str
    gpus: tuple[Gpu, ...]
    vertices: tuple[Vertex, ...] = ()
    nics: tuple[Nic, ...] = ()
    links: tuple[Link, ...] = ()
    pairs: dict[str, str] = field(default_factory=dict)
    closest_nics: dict[str, tuple[str, ...]] = field(default_factory=dict)  # GPU index -> NIC labels
    host_memory_bytes: int | None = None  # of all its operating-system hosts together; not known where none is given


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    node: Node
    count: int = 1


class FabricKind(StrEnum):
    RAIL_OPTIMISED = "rail-optimised"  # NIC i of every node on leaf i, spine above
    FAT_TREE = "fat-tree"  # all NICs of a node on one leaf
    ETHERNET = "ethernet"  # plain: one leaf, TCP or RoCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The network between nodes.

    `oversubscription` is downlink over uplink capacity of a leaf (1.0 is non-blocking); `nodes_per_leaf` is how many
    nodes share a leaf (a "pod"): traffic that leaves it crosses the spine.
    """

    kind: FabricKind
    oversubscription: float = 1.0
    nodes_per_leaf: int = 32
    latency_s: float = 5e-6
    rdma: bool = True
    source: Source = Source.DATASHEET


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """GPUs and everything between them. `groups` are in rank order: node 0 is the first node of the first group."""

    name: str
    gpu_kinds: tuple[GpuKind, ...]
    groups: tuple[NodeGroup, ...]
    fabric: Fabric | None = None
    findings: tuple[Finding, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def node_count(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def gpu_count(self) -> int:
        return sum(group.count * len(group.node.gpus) for group in self.groups)

    @property
    def gpus_per_node(self) -> int:
        """GPUs that every node has: the smallest count of all nodes."""
        return min(len(group.node.gpus) for group in self.groups)

    def kind(self, name: str) -> GpuKind:
        for kind in self.gpu_kinds:
            if kind.name == name:
                return kind
        raise KeyError(name)

    @property
    def slowest_kind(self) -> GpuKind:
        """The GPU model that bounds a synchronous step: the one with the lowest dense bfloat16 rate."""
        used = {gpu.kind for group in self.groups for gpu in group.node.gpus}
        return min((k for k in self.gpu_kinds if k.name in used), key=lambda k: k.peak_flops.get("bfloat16", 0.0))

    @property
    def gpu_memory_bytes(self) -> int:
        """Memory that every GPU has: that of the smallest GPU."""
        return min(
            gpu.memory_bytes if gpu.memory_bytes is not None else self.kind(gpu.kind).memory_bytes
            for group in self.groups
            for gpu in group.node.gpus
        )


def part_of_node(node: Node, gpus: int) -> Node:
    """Return `node` with its first `gpus` GPUs only, and the network ports nearest to them."""
    kept = node.gpus[:gpus]
    removed = {gpu.vertex for gpu in node.gpus[gpus:]}
    indices = {str(gpu.index) for gpu in kept}
    if node.closest_nics:
        near = {label for index, labels in node.closest_nics.items() if index in indices for label in labels}
        removed |= {nic.vertex for nic in node.nics if nic.label not in near and nic.name not in near}
    trays = {gpu.tray for gpu in kept}
    removed |= {v.id for v in node.vertices if v.tray not in trays and v.kind is not VertexKind.NVSWITCH}
    return replace(
        node,
        gpus=kept,
        vertices=tuple(vertex for vertex in node.vertices if vertex.id not in removed),
        nics=tuple(nic for nic in node.nics if nic.vertex not in removed),
        links=tuple(link for link in node.links if link.a not in removed and link.b not in removed),
        pairs={pair: label for pair, label in node.pairs.items() if set(pair.split("-")) <= indices},
        closest_nics={index: labels for index, labels in node.closest_nics.items() if index in indices},
    )
