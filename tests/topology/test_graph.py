"""Flows and cuts against hand arithmetic: links times rate, counted on paper."""

from dataclasses import replace
from itertools import combinations

import pytest

from tests.topology.paths import bottleneck_path, pair_bytes_per_s
from topology.catalog.clusters import cluster
from topology.catalog.platform import CUBE_MESH
from topology.cluster import Cluster, LinkKind, LinkState, NodeGroup
from topology.rates.graph import (
    bisection_bytes_per_s,
    gpus_of,
    graph,
    islands,
    max_flow_bytes_per_s,
)
from topology.rates.node_rates import HOST_KINDS, NVLINK_KINDS, node_rates

GB = 1e9


def without_nvlink(target: Cluster, index: int) -> Cluster:
    node = target.groups[0].node
    links = tuple(
        replace(link, state=LinkState.ABSENT)
        if f"gpu{index}" in {link.a, link.b} and link.kind in NVLINK_KINDS
        else link
        for link in node.links
    )
    return replace(target, groups=(NodeGroup(node=replace(node, links=links), count=target.groups[0].count),))


def test_hub_has_ports_not_pairs():
    g = graph(cluster("dgx-h100"))
    assert g.out_degree("n0.nvswitch") == 8
    assert max_flow_bytes_per_s(g, ["n0.gpu0"], ["n0.gpu1"], NVLINK_KINDS) == 450 * GB
    assert max_flow_bytes_per_s(g, ["n0.gpu0"], gpus_of(g)[1:], NVLINK_KINDS) == 450 * GB
    assert max_flow_bytes_per_s(g, gpus_of(g)[:4], gpus_of(g)[4:], NVLINK_KINDS) == 1800 * GB
    assert bisection_bytes_per_s(g) == 4 * 450 * GB


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("gb200-nvl72", 36 * 900), ("dgx-2", 8 * 150), ("mi300x-x8", 16 * 64), ("dgx-a100", 4 * 300)],
)
def test_bisections(name, gigabytes):
    assert bisection_bytes_per_s(graph(cluster(name))) == pytest.approx(gigabytes * GB)


def test_cube_mesh_bisection_is_the_smallest_cut_by_counting_links():
    crossing = [
        sum(links for a, b, links in CUBE_MESH if (a in half) != (b in half)) for half in combinations(range(8), 4)
    ]
    g = graph(cluster("dgx-1v"))
    assert min(crossing) == 6  # two pairs of two links and two of one, between the quads
    assert bisection_bytes_per_s(g) == min(crossing) * 25 * GB
    assert all(sum(links for a, b, links in CUBE_MESH if gpu in {a, b}) == 6 for gpu in range(8))


def test_bisection_between_nodes_is_the_network():
    assert bisection_bytes_per_s(graph(cluster("dgx-h100", 32))) == 2 * 8 * 50 * GB
    blocked = cluster("dgx-h100", 64 * 8)
    blocked = replace(blocked, fabric=replace(blocked.fabric, oversubscription=4.0))
    assert bisection_bytes_per_s(graph(blocked)) == pytest.approx(32 * 8 * 50 * GB / 4)


def test_pcie_box():
    g = graph(cluster("l40s-x8"))
    assert islands(g) == ()
    # Halves that share sockets unevenly cross the socket link only; the worst is one socket against the other.
    assert bisection_bytes_per_s(g) == pytest.approx(62.4 * GB)
    rate, path = bottleneck_path(g, "n0.gpu0", "n0.gpu7", HOST_KINDS)
    assert (rate, path) == (31.5 * GB, ("n0.gpu0", "n0.cpu0", "n0.cpu1", "n0.gpu7"))


def test_islands_leave_out_the_lost_gpu():
    lost = graph(without_nvlink(cluster("dgx-b200"), 2))
    assert islands(lost) == (tuple(f"n0.gpu{i}" for i in (0, 1, 3, 4, 5, 6, 7)),)
    ill = cluster("dgx-b200")
    node = ill.groups[0].node
    gpus = tuple(replace(gpu, healthy=gpu.index != 5) for gpu in node.gpus)
    ill = replace(ill, groups=(NodeGroup(node=replace(node, gpus=gpus)),))
    assert "n0.gpu5" not in islands(graph(ill))[0]
    assert islands(graph(cluster("a100-pcie-x4"))) == (("n0.gpu0", "n0.gpu1"), ("n0.gpu2", "n0.gpu3"))


def test_rails_and_spine():
    g = graph(cluster("dgx-h100", 64 * 8))
    leaves = [vertex for vertex, facts in g.nodes(data=True) if facts["kind"] == "leaf"]
    on_rail = {leaf: [v for v in g.predecessors(leaf) if g.nodes[v]["kind"] == "nic"] for leaf in leaves}
    assert len(on_rail) == 16  # two pods of 32 nodes, eight rails each
    assert all(len(ports) == 32 for ports in on_rail.values())
    assert set(on_rail["leaf1.3"]) == {f"n{node}.mlx5_3" for node in range(32, 64)}
    _, inside = bottleneck_path(g, "n0.gpu0", "n5.gpu0")
    assert "spine" not in inside
    rate, across = bottleneck_path(g, "n0.gpu0", "n40.gpu0")
    assert (rate, "spine" in across) == (50 * GB, True)


def test_nodes_argument_limits_the_graph():
    big = cluster("dgx-h100", 16384)
    assert len(gpus_of(graph(big, 2))) == 16
    assert graph(big, 1).number_of_nodes() == graph(cluster("dgx-h100"), 1).number_of_nodes()


def test_gpus_do_not_forward():
    g = graph(cluster("dgx-1v"))
    assert bottleneck_path(g, "n0.gpu0", "n0.gpu5", NVLINK_KINDS) == (0.0, ())


def test_measured_rate_wins_and_edges_say_where_they_are_from():
    base = cluster("dgx-h100")
    node = base.groups[0].node
    links = tuple(
        replace(link, measured_bytes_per_s=198 * GB) if link.kind is LinkKind.NVSWITCH else link for link in node.links
    )
    g = graph(replace(base, groups=(NodeGroup(node=replace(node, links=links)),)))
    assert bisection_bytes_per_s(g) == pytest.approx(4 * 198 * GB / 0.88)
    facts = g["n0.gpu0"]["n0.nvswitch"][0]
    assert facts["nominal_bytes_per_s"] == 450 * GB
    assert facts["nccl_bytes_per_s"] == pytest.approx(370.8 * GB)
    assert (facts["count"], facts["state"], facts["source"]) == (18, "up", "datasheet")


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-1v", "a100-pcie-x4", "l40s-x8", "dgx-a100", "mi300x-x8", "h200x4"])
def test_pair_table_agrees_with_the_fast_path(name):
    made = cluster(name)
    table = pair_bytes_per_s(graph(made))
    rates = node_rates(made)
    assert table == pytest.approx(rates.pairs())
    for (a, b), rate in table.items():
        assert rate == table[b, a]
        if rates.nvlink(a, b)[0] > 0:
            assert rate == rates.nvlink(a, b)[0]
        else:  # both directions of a pair cross different edges, so a pair alone gets the whole path
            assert rate == rates.pair_bytes_per_s(a, b)
