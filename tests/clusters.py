"""Clusters for tests of costs, built from datasheet numbers without the catalogue."""

from __future__ import annotations

import itertools

from topology.cluster import (
    Cluster,
    Fabric,
    FabricKind,
    Gpu,
    GpuKind,
    Link,
    LinkKind,
    Nic,
    Node,
    NodeGroup,
    Vertex,
    VertexKind,
)

# name: architecture, capability, links, GB/s a link, NCCL's GB/s a link, PCIe GB/s, multicast
_KINDS = {
    "a100": ("Ampere", 80, 12, 25.0, 20.0, 31.5, False),
    "h100": ("Hopper", 90, 18, 25.0, 20.6, 63.0, True),
    "h200": ("Hopper", 90, 18, 25.0, 20.6, 63.0, True),
    "b200": ("Blackwell", 100, 18, 50.0, 40.1, 63.0, True),
    "b300": ("Blackwell Ultra", 103, 18, 50.0, 40.1, 121.0, True),
    "gb200": ("Blackwell", 100, 18, 50.0, 40.1, 63.0, True),
    "gb300": ("Blackwell Ultra", 103, 18, 50.0, 40.1, 121.0, True),
    "l40s": ("Ada", 89, 0, 0.0, 0.0, 31.5, False),
    "rtxpro6000": ("Blackwell", 120, 0, 0.0, 0.0, 63.0, False),
    "gb10": ("Blackwell", 121, 0, 0.0, 0.0, 63.0, False),
    "b60": ("Xe2", 0, 0, 0.0, 0.0, 31.5, False),
    "mi300x": ("CDNA3", 0, 7, 64.0, 0.0, 63.0, False),
    "mi355x": ("CDNA4", 0, 7, 76.5, 0.0, 63.0, False),
}


def kind(name: str) -> GpuKind:
    architecture, capability, links, link, nccl, pcie, _ = _KINDS[name]
    return GpuKind(
        name=name,
        title=name,
        architecture=architecture,
        compute_capability=capability,
        sm_count=132,
        memory_bytes=80 * 2**30,
        memory_bytes_per_s=3e12,
        peak_flops={"bfloat16": 1e15},
        nvlink_links=links,
        nvlink_bytes_per_s=link * 1e9,
        nvlink_nccl_bytes_per_s=nccl * 1e9,
        pcie_bytes_per_s=pcie * 1e9,
    )


def cluster(
    gpu: str, gpus: int = 8, *, nodes: int = 1, nics: int = 8, nic_gbit: float = 400.0, joined: str = "nvswitch"
) -> Cluster:
    """Return `nodes` nodes of `gpus` GPUs joined by "nvswitch", "mesh" or "pcie"."""
    what = kind(gpu)
    multicast = _KINDS[gpu][-1]
    vertices: tuple[Vertex, ...] = ()
    links: list[Link] = []
    rate, nccl = what.nvlink_links * what.nvlink_bytes_per_s, what.nvlink_links * what.nvlink_nccl_bytes_per_s
    if joined == "nvswitch" and what.nvlink_links:
        vertices = (Vertex(id="nvswitch", kind=VertexKind.NVSWITCH, multicast=multicast),)
        links = [
            Link(a=f"gpu{i}", b="nvswitch", kind=LinkKind.NVSWITCH, bytes_per_s=rate, nccl_bytes_per_s=nccl, count=18)
            for i in range(gpus)
        ]
    elif joined == "mesh":
        each = what.nvlink_links // (gpus - 1)
        links = [
            Link(a=f"gpu{a}", b=f"gpu{b}", kind=LinkKind.NVLINK, bytes_per_s=each * what.nvlink_bytes_per_s, count=each)
            for a, b in itertools.combinations(range(gpus), 2)
        ]
    node = Node(
        name=f"{gpu}-x{gpus}",
        gpus=tuple(Gpu(index=i, kind=gpu) for i in range(gpus)),
        vertices=vertices,
        links=tuple(links),
        nics=tuple(Nic(label=f"nic{i}", bytes_per_s=nic_gbit * 1e9 / 8) for i in range(nics)),
    )
    return Cluster(
        name=node.name,
        gpu_kinds=(what,),
        groups=(NodeGroup(node=node, count=nodes),),
        fabric=Fabric(kind=FabricKind.RAIL_OPTIMISED),
    )


_WORDS = {
    "gb300": "gb300",
    "gb200": "gb200",
    "b300": "b300",
    "b200": "b200",
    "h200": "h200",
    "h100": "h100",
    "a100": "a100",
    "mi355x": "mi355x",
    "mi300x": "mi300x",
    "b60": "b60",
    "6000": "rtxpro6000",
    "blackwell": "b200",
}


def cluster_of(text: str, gpus: int, nodes: int, interconnect: str) -> Cluster | None:
    """Stand in for the catalogue when tables are read."""
    words = f"{text} {interconnect}".lower()
    gpu = next((name for word, name in _WORDS.items() if word in words), None)
    if gpu is None:
        return None
    if "nvl72" in words:
        return cluster(gpu, 72)
    if gpu.startswith("mi"):
        return cluster(gpu, 8, joined="mesh")
    if "bridge" in words:
        return cluster(gpu, gpus, joined="mesh")
    per_node = -(-gpus // nodes) if nodes > 1 else max(8, gpus)
    return cluster(gpu, per_node, nodes=nodes, joined="nvswitch" if kind(gpu).nvlink_links else "pcie")
