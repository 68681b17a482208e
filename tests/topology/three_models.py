"""Texts probed against a catalogue of three GPU models."""

from topology.cluster import GpuKind
from topology.errors import BadCluster
from topology.probe.from_text import probe_text


def kind(name, links, link_gigabytes, pcie_gigabytes=63.0, c2c=0.0):
    return GpuKind(
        name=name,
        title=name.upper(),
        architecture="test",
        compute_capability=90,
        sm_count=132,
        memory_bytes=141 * 10**9,
        memory_bytes_per_s=1e12,
        peak_flops={"bfloat16": 1e15},
        nvlink_links=links,
        nvlink_bytes_per_s=link_gigabytes * 1e9,
        nvlink_nccl_bytes_per_s=20e9,
        c2c_bytes_per_s=c2c,
        pcie_bytes_per_s=pcie_gigabytes * 1e9,
    )


H200 = kind("h200-sxm", 18, 25.0)


A6000 = kind("rtx-a6000", 4, 14.062, 31.5)


V100 = kind("v100-sxm2", 6, 25.0, 15.75)


class Shelf:
    """A catalogue of three models."""

    def gpu_kind(self, name):
        for one in (H200, A6000, V100):
            if one.name == name:
                return one
        raise BadCluster(f"unknown GPU {name!r}", remedy="use one of: h200-sxm")

    def match_driver_name(self, text):
        return {"NVIDIA H200": H200, "NVIDIA RTX A6000": A6000, "Tesla V100-SXM2-32GB": V100}.get(text)


def probe(*contents, gpu=None):
    return probe_text([(f"text {at}", content) for at, content in enumerate(contents)], gpu=gpu, catalogue=Shelf())


def node(cluster):
    return cluster.groups[0].node


def links(cluster, wanted):
    return [link for link in node(cluster).links if link.kind is wanted]
