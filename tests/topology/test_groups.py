"""Group rates against hand arithmetic on the links of the node."""

import math
from dataclasses import replace

import pytest

from topology.catalog.clusters import cluster, cluster_from_case
from topology.catalog.verify import verify_cluster
from topology.cluster import GpuKind, LinkKind, LinkState, NodeGroup, VertexKind
from topology.rates.graph import graph, islands
from topology.rates.groups import GroupShape, group_rates, group_shape

GB = 1e9


def rates_of(made, size, stride=1, **kwargs):
    shape = group_shape(size=size, stride=stride, gpus_per_node=made.gpus_per_node, world=made.gpu_count)
    return group_rates(made, shape, **kwargs)


def lose_port(made, index):
    node = made.groups[0].node
    links = tuple(
        replace(link, state=LinkState.ABSENT) if link.a == f"gpu{index}" and link.kind is LinkKind.NVSWITCH else link
        for link in node.links
    )
    return replace(made, groups=(NodeGroup(node=replace(node, links=links), count=made.node_count),))


def test_shapes():
    shape = group_shape(size=16, stride=8, gpus_per_node=8, world=128)
    assert (shape.ranks_per_node, shape.siblings, shape.nodes, shape.span_nodes) == (1, 8, 16, 0)
    shape = group_shape(size=2, stride=64, gpus_per_node=8, world=128)
    assert (shape.nodes, shape.span_nodes) == (2, 9)
    shape = group_shape(size=4, stride=2, gpus_per_node=8, world=8)
    assert (shape.ranks_per_node, shape.siblings, shape.stride, shape.nodes) == (4, 2, 2, 1)


@pytest.mark.parametrize(("stride", "inter"), [(1, 400), (2, 200), (4, 100), (8, 50)])
def test_siblings_share_the_ports(stride, inter):
    made = cluster("dgx-h100", 256)
    rates = rates_of(made, 256 // stride, stride)
    assert rates.inter_bytes_per_s == inter * GB
    assert rates.intra_bytes_per_s == (math.inf if stride == 8 else 450 * GB)
    assert rates.layer == ("self" if stride == 8 else "nvswitch")
    assert rates.nvls is (stride != 8)
    assert rates.compute_capability == 90


def test_a_lone_rank_is_limited_by_its_slot():
    made = cluster("dgx-a100", 16)  # two 25 GB/s ports near each GPU, behind one gen4 slot
    alone = group_rates(made, GroupShape(ranks=2, ranks_per_node=1))
    assert alone.inter_bytes_per_s == pytest.approx(31.5 * GB)
    assert rates_of(made, 2, 8).inter_bytes_per_s == pytest.approx(25 * GB)


def test_ports_of_unlike_machines():
    assert rates_of(cluster("aws-p4d", 16), 2, 8).inter_bytes_per_s == pytest.approx(100 / 8 / 2 * GB)
    assert rates_of(cluster("aws-p5", 16), 2, 8).inter_bytes_per_s == pytest.approx(4 * 12.5 * GB)
    made, _ = cluster_from_case(
        {"gpu": "a100-sxm-80gb", "gpus_per_node": 8, "nodes": 8, "interconnect": "nvswitch", "nic_gbit_per_gpu": 100}
    )
    assert rates_of(made, 8, 8).inter_bytes_per_s == pytest.approx(12.5 * GB)


def test_no_network_no_rate():
    for made in (cluster("h200x4"), replace(cluster("dgx-h100", 16), fabric=None)):
        rates = group_rates(made, GroupShape(ranks=16, ranks_per_node=4))
        assert rates.inter_bytes_per_s == 0
        assert rates.intra_bytes_per_s == 450 * GB
    assert group_rates(cluster("h200x4"), GroupShape(ranks=8, ranks_per_node=8)).intra_bytes_per_s == 0


def test_rack_is_one_domain():
    made = cluster("gb200-nvl72")
    rates = rates_of(made, 72)
    assert (rates.intra_bytes_per_s, rates.nvls) == (900 * GB, True)
    assert rates.intra_nccl_bytes_per_s == pytest.approx(721.8 * GB)
    assert rates_of(made, 8, 9).intra_bytes_per_s == 900 * GB  # members on eight different trays
    assert rates_of(cluster("gb200-nvl72", 144), 2, 72).inter_bytes_per_s == pytest.approx(50 * GB)


def test_multicast_is_needed_for_nvls():
    made = cluster("dgx-h100")
    node = made.groups[0].node
    plain = tuple(replace(v, multicast=False) if v.kind is VertexKind.NVSWITCH else v for v in node.vertices)
    without = replace(made, groups=(NodeGroup(node=replace(node, vertices=plain)),))
    assert rates_of(made, 8).nvls
    assert not rates_of(without, 8).nvls
    assert not rates_of(cluster("dgx-a100"), 8).nvls


def test_lost_gpu_poisons_its_group_and_is_avoided_where_it_can_be():
    made = lose_port(cluster("dgx-b200"), 2)
    whole = rates_of(made, 8)
    assert whole.layer == "host"
    assert whole.intra_bytes_per_s <= 63 * GB  # one PCIe slot; 900 when healthy
    four = group_rates(made, GroupShape(ranks=4, ranks_per_node=4))
    assert four.intra_bytes_per_s == 900 * GB
    assert 2 not in four.gpus
    seven = group_rates(made, GroupShape(ranks=7, ranks_per_node=7))
    assert seven.gpus == (0, 1, 3, 4, 5, 6, 7)
    assert seven.intra_bytes_per_s == 900 * GB


def test_degraded_port_bounds_the_ring():
    made = cluster("dgx-h100")
    node = made.groups[0].node
    links = tuple(
        replace(link, count=12, bytes_per_s=300 * GB, state=LinkState.DEGRADED)
        if link.a == "gpu5" and link.kind is LinkKind.NVSWITCH
        else link
        for link in node.links
    )
    slow = replace(made, groups=(NodeGroup(node=replace(node, links=links)),))
    assert rates_of(slow, 8).intra_bytes_per_s == 300 * GB
    assert group_rates(slow, GroupShape(ranks=4, ranks_per_node=4)).intra_bytes_per_s == 450 * GB


def test_cube_mesh_picks_its_double_links():
    made = cluster("dgx-1v")
    assert rates_of(made, 2).intra_bytes_per_s == 50 * GB
    assert rates_of(made, 4).intra_bytes_per_s == 100 * GB
    assert rates_of(made, 8).intra_bytes_per_s == 150 * GB
    shape = GroupShape(ranks=2, ranks_per_node=2)
    assert group_rates(made, shape, (0, 1)).intra_bytes_per_s == 25 * GB
    assert group_rates(made, shape, (0, 5)).layer == "host"


def test_bridged_pairs():
    made = cluster("a100-pcie-x4")
    assert rates_of(made, 2).intra_bytes_per_s == 300 * GB
    assert rates_of(made, 4).layer == "host"
    assert rates_of(made, 2, 2).intra_bytes_per_s <= 31.5 * GB


def test_oversubscription_bites_where_many_rings_leave_the_leaf():
    made = cluster("dgx-h100", 128 * 8)  # four pods of 32 nodes
    made = replace(made, fabric=replace(made.fabric, oversubscription=7.0))
    data = rates_of(made, 128, 8)  # neighbours on neighbouring nodes: one crossing per pod and rail
    assert data.inter_bytes_per_s == 50 * GB
    assert data.inter_all_to_all_bytes_per_s == pytest.approx(50 * GB / (7 * 96 / 127))
    stages = rates_of(made, 2, 512)  # every node of a pod talks to another pod
    assert stages.inter_bytes_per_s == pytest.approx(50 * GB / 7)
    inside = rates_of(made, 32, 8)
    assert inside.inter_bytes_per_s == inside.inter_all_to_all_bytes_per_s == 50 * GB


def test_unlike_nodes_count_as_the_worst():
    fast, slow = cluster("dgx-h100", 16), cluster("dgx-a100", 8)
    mixed = replace(fast, gpu_kinds=fast.gpu_kinds + slow.gpu_kinds, groups=fast.groups + slow.groups)
    rates = rates_of(mixed, 24)
    assert rates.intra_bytes_per_s == 300 * GB
    assert rates.inter_bytes_per_s == 200 * GB
    assert rates.compute_capability == 80
    assert not rates.nvls


def test_large_clusters_cost_the_same(monkeypatch):
    made = cluster("dgx-h100", 16384)
    assert rates_of(made, 2048, 8) == replace(rates_of(cluster("dgx-h100", 16), 2, 8))
    monkeypatch.setattr("topology.rates.groups._group_rates", None)  # the second question is answered from memory
    assert rates_of(made, 2048, 8).inter_bytes_per_s == 50 * GB


def test_topology_text_without_a_gpu_model_keeps_its_shape():
    """What `nvidia-smi topo -m` alone gives: counts of links, no model, no rates, ports named by their legend."""
    made = cluster("dgx-1v", 16)
    node = made.groups[0].node
    unknown = GpuKind(
        name="unknown",
        title="",
        architecture="",
        compute_capability=0,
        sm_count=0,
        memory_bytes=0,
        memory_bytes_per_s=0.0,
        peak_flops={},
    )
    node = replace(
        node,
        gpus=tuple(replace(gpu, kind="unknown") for gpu in node.gpus),
        links=tuple(replace(link, bytes_per_s=None, nccl_bytes_per_s=None) for link in node.links),
        nics=tuple(replace(nic, name=f"ib{i}", bytes_per_s=None) for i, nic in enumerate(node.nics)),
        closest_nics={str(i): (f"ib{i // 2}",) for i in range(8)},
    )
    bare = replace(made, gpu_kinds=(unknown,), groups=(NodeGroup(node=node, count=2),))
    assert verify_cluster(bare) == []
    assert islands(graph(bare, 1)) == (tuple(f"n0.gpu{i}" for i in range(8)),)
    two, eight = rates_of(bare, 2), rates_of(bare, 8)
    assert two.intra_bytes_per_s == 2 * 25 * GB
    assert eight.intra_bytes_per_s == 6 * 25 * GB
    assert rates_of(bare, 2, 8).inter_bytes_per_s == pytest.approx(10e9 / 8 / 2)  # NCCL's 10 Gb/s, two GPUs a port
