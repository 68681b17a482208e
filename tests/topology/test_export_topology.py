"""Exports: parsed back, compared with known files of the tools."""

from dataclasses import replace

import pytest
import yaml

from topology.catalog.clusters import cluster
from topology.cluster import LinkKind, NodeGroup
from topology.errors import BadCluster, Infeasible
from topology.export.simulators import to_astra_sim, to_simai


def test_astra_sim_h100_matches_the_validated_file():
    """astra-sim @518bd513 inputs/network/hgx_h100_8gpu.yml and hgx_h100_32gpu.yml: 400 GB/s is what was measured."""
    made = cluster("dgx-h100", 32)
    node = made.groups[0].node
    links = tuple(replace(link, bytes_per_s=400e9) if link.kind is LinkKind.NVSWITCH else link for link in node.links)
    measured = replace(
        made, groups=(NodeGroup(node=replace(node, links=links), count=4),), fabric=replace(made.fabric, latency_s=1e-6)
    )
    assert yaml.safe_load(to_astra_sim(measured, between_nodes="Ring")) == {
        "topology": ["Switch", "Ring"],
        "npus_count": [8, 4],
        "bandwidth": [400, 50],
        "latency": [936.25, 1000],
    }
    one = replace(measured, groups=(NodeGroup(node=measured.groups[0].node),))
    assert yaml.safe_load(to_astra_sim(one)) == {
        "topology": ["Switch"],
        "npus_count": [8],
        "bandwidth": [400],
        "latency": [936.25],
    }


def test_astra_sim_of_other_regular_machines():
    mesh = yaml.safe_load(to_astra_sim(cluster("mi300x-x8")))
    assert (mesh["topology"], mesh["npus_count"], mesh["bandwidth"]) == (["FullyConnected"], [8], [64])
    single = yaml.safe_load(to_astra_sim(cluster("gh200", 4)))
    assert (single["topology"], single["npus_count"], single["bandwidth"]) == (["Switch"], [4], [50])


@pytest.mark.parametrize("name", ["dgx-1v", "a100-pcie-x4", "l40s-x8"])
def test_astra_sim_refuses_what_it_cannot_say(name):
    with pytest.raises(Infeasible):
        to_astra_sim(cluster(name))


def test_astra_sim_refuses_unlike_nodes_and_missing_networks():
    a, b = cluster("dgx-h100"), cluster("dgx-h200")
    with pytest.raises(Infeasible):
        to_astra_sim(replace(a, gpu_kinds=a.gpu_kinds + b.gpu_kinds, groups=a.groups + b.groups))
    with pytest.raises(Infeasible):
        to_astra_sim(replace(cluster("dgx-h100", 16), fabric=None))
    with pytest.raises(BadCluster):
        to_astra_sim(a, between_nodes="Torus")


def test_simai_header_counts_what_follows():
    text = to_simai(cluster("dgx-h100", 64 * 8))
    header, ids, *lines = text.splitlines()
    vertices, per_node, nvswitches, switches, links, kind = header.split()
    assert (int(per_node), int(nvswitches), kind) == (8, 64, "H100")
    assert int(switches) == 2 * 8 + 1  # two pods of eight rails, and the spine
    assert int(vertices) == 512 + 64 + 17
    assert [int(i) for i in ids.split()] == list(range(512, int(vertices)))
    assert int(links) == len(lines) == 512 + 512 + 16
    for line in lines:
        a, b, rate, latency, error = line.split()
        assert 0 <= int(a) < int(vertices)
        assert 512 <= int(b) < int(vertices)
        assert rate.endswith("Gbps")
        assert latency.endswith("ms")
        assert error == "0"
    assert lines[0].split()[2] == "3600Gbps"  # SimAI's own figure for the NVLinks of an H100
    assert "0 576 400Gbps 0.0025ms 0" in lines
    assert lines[-1].split()[2] == f"{32 * 400}Gbps"


@pytest.mark.parametrize("name", ["dgx-1v", "l40s-x8", "a100-pcie-x4"])
def test_simai_refuses_nodes_without_a_switch(name):
    with pytest.raises(Infeasible):
        to_simai(cluster(name))
