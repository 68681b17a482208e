"""Shipped clusters and the clusters of cases."""

import pytest

from topology.catalog.clusters import catalog_names, cluster, cluster_from_case
from topology.catalog.gpus import gpu_kind, gpu_kinds, gpu_names
from topology.catalog.verify import verify_cluster
from topology.cluster import FabricKind, LinkKind, Severity
from topology.errors import BadCluster


@pytest.mark.parametrize("name", catalog_names())
def test_every_shipped_cluster_is_possible(name):
    assert verify_cluster(cluster(name)) == []


def test_promised_names_are_there():
    promised = {"dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "h200x4", "l40s-x8", "rtx4090-x8"}
    assert promised <= set(catalog_names())
    assert cluster("a100-40").slowest_kind.name == "a100-sxm-40gb"
    assert cluster("DGX-H100") == cluster("dgx-h100")


@pytest.mark.parametrize(
    ("name", "gpus", "nodes", "count"),
    [
        ("dgx-h100", None, 1, 8),
        ("dgx-h100", 8, 1, 8),
        ("dgx-h100", 9, 2, 16),
        ("dgx-h100", 16384, 2048, 16384),
        ("dgx-h100", 4, 1, 4),
        ("gb200-nvl72", 8, 1, 8),
        ("gb200-nvl72", 144, 2, 144),
        ("h200x4", 2, 1, 2),
    ],
)
def test_as_many_nodes_as_needed(name, gpus, nodes, count):
    got = cluster(name, gpus)
    assert (got.node_count, got.gpu_count) == (nodes, count)
    assert verify_cluster(got) == []


def test_part_of_a_node_is_marked_and_leaves_nothing_behind():
    part = cluster("dgx-h100", 3)
    assert any("3 of 8 GPUs" in finding.what and finding.severity is Severity.INFO for finding in part.findings)
    node = part.groups[0].node
    assert len(node.nics) == 3
    assert set(node.closest_nics) == {"0", "1", "2"}
    assert set(node.pairs) == {"0-1", "0-2", "1-2"}
    tray = cluster("gb200-nvl72", 4).groups[0].node
    assert len(tray.nics) == 4
    assert {vertex.id for vertex in tray.vertices} == {"cpu0", "cpu1", "nvswitch"}


@pytest.mark.parametrize("gpus", [0, -1, 5])
def test_impossible_gpu_counts(gpus):
    with pytest.raises(BadCluster):
        cluster("h200x4", gpus)


def test_unknown_cluster_offers_near_names():
    with pytest.raises(BadCluster, match="dgx-h100"):
        cluster("dgx-h10")


def test_platform_facts():
    h100 = cluster("dgx-h100", 16)
    node = h100.groups[0].node
    assert [nic.bytes_per_s for nic in node.nics] == [50e9] * 8
    assert h100.fabric.kind is FabricKind.RAIL_OPTIMISED
    assert {link.label for link in node.links if link.kind is LinkKind.NVSWITCH} == {"NV18"}
    assert node.pairs["0-7"] == "NV18"
    assert [nic.bytes_per_s for nic in cluster("dgx-a100").groups[0].node.nics] == [25e9] * 8
    rack = cluster("gb200-nvl72").groups[0].node
    assert len(rack.gpus) == 72
    assert {gpu.tray for gpu in rack.gpus} == set(range(18))
    assert len(rack.nics) == 72
    assert rack.closest_nics["71"] == ("mlx5_70", "mlx5_71")
    l40s = cluster("l40s-x8").groups[0].node
    assert (l40s.pairs["0-1"], l40s.pairs["3-4"]) == ("NODE", "SYS")
    probed = cluster("h200x4")
    assert probed.fabric is None
    assert not any(vertex.multicast for vertex in probed.groups[0].node.vertices)


def test_case_with_everything_stated():
    got, assumed = cluster_from_case(
        {"gpu": "a100-sxm-80gb", "gpus_per_node": 8, "nodes": 8, "interconnect": "nvswitch", "nic_gbit_per_gpu": 100}
    )
    assert (got.node_count, got.gpu_count) == (8, 64)
    assert [nic.bytes_per_s for nic in got.groups[0].node.nics] == [12.5e9] * 8
    assert not any("Gb/s" in line for line in assumed)
    assert verify_cluster(got) == []


@pytest.mark.parametrize(("gpu", "gbit"), [("a100-sxm-40gb", 200), ("h100-sxm", 400), ("b200-sxm", 400)])
@pytest.mark.parametrize("unstated", [None, "unknown", "absent"])
def test_case_without_network_gets_the_usual_one(gpu, gbit, unstated):
    spec = {"gpu": gpu, "gpus_per_node": 8, "nodes": 2, "interconnect": "nvswitch", "nic_gbit_per_gpu": unstated}
    if unstated == "absent":
        del spec["nic_gbit_per_gpu"]
    got, assumed = cluster_from_case(spec)
    assert sum(nic.bytes_per_s for nic in got.groups[0].node.nics) == 8 * gbit * 1e9 / 8
    assert any(f"{gbit} Gb/s" in line for line in assumed)


def test_case_with_almost_nothing_stated():
    got, assumed = cluster_from_case({"gpu": "h200-sxm"})
    assert got.gpu_count == 8
    assert len(assumed) >= 3


def test_case_interconnects():
    base = {"gpus_per_node": 4, "nodes": 1, "nic_gbit_per_gpu": 0}
    pcie, _ = cluster_from_case({**base, "gpu": "a100-sxm-80gb", "interconnect": "pcie"})
    assert not any(link.kind in {LinkKind.NVLINK, LinkKind.NVSWITCH} for link in pcie.groups[0].node.links)
    mesh, _ = cluster_from_case({**base, "gpu": "a100-sxm-80gb", "interconnect": "nvlink"})
    assert set(mesh.groups[0].node.pairs.values()) == {"NV4"}  # 12 links over 3 neighbours
    bridged, _ = cluster_from_case({**base, "gpu": "a100-pcie-80gb", "interconnect": "nvlink"})
    assert bridged.groups[0].node.pairs["0-1"] == "NV12"
    assert bridged.groups[0].node.pairs["1-2"] != "NV12"
    one, _ = cluster_from_case({**base, "gpu": "h200-sxm", "gpus_per_node": 1, "interconnect": "nvswitch"})
    assert one.gpu_count == 1
    for made in (pcie, mesh, bridged, one):
        assert verify_cluster(made) == []


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"gpu": "voodoo2"},
        {"gpu": 5},
        {"gpu": "h100-sxm", "gpus_per_node": 0},
        {"gpu": "h100-sxm", "gpus_per_node": 2.5},
        {"gpu": "h100-sxm", "gpus_per_node": True},
        {"gpu": "h100-sxm", "nodes": -1},
        {"gpu": "h100-sxm", "nodes": "8"},
        {"gpu": "h100-sxm", "interconnect": "string"},
        {"gpu": "l40s", "interconnect": "nvswitch"},
        {"gpu": "h100-sxm", "nic_gbit_per_gpu": -5},
        {"gpu": "h100-sxm", "gpus_per_node": 10**9},
    ],
)
def test_impossible_cases(spec):
    with pytest.raises(BadCluster):
        cluster_from_case(spec)


def test_unknown_case_keys_are_refused_by_name():
    with pytest.raises(BadCluster, match="'colour'"):
        cluster_from_case({"gpu": "h100-sxm", "colour": "green"})


def test_what_others_call_gpus_names_kinds_of_the_catalogue():
    names = gpu_names()
    known = {kind.name for kind in gpu_kinds()}

    assert set(names.skypilot) <= known
    assert {gpu_kind(name).name for _, name in names.words} <= known
