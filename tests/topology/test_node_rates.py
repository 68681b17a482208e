"""Rings: closed forms, bounds from graph theory, and the wiring of real machines."""

import math

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.catalog.cluster_file import parse_cluster
from topology.catalog.clusters import cluster
from topology.rates.node_rates import node_rates, ring_packing

GB = 1e9


def test_ring_packing_of_known_graphs():
    def full(n, rate=1.0):
        return {(a, b): rate for a in range(n) for b in range(a + 1, n)}

    assert ring_packing({(0, 1): 3.0}, [0, 1]) == 3
    assert ring_packing(full(3), [0, 1, 2]) == pytest.approx(2)
    assert ring_packing(full(8), range(8)) == pytest.approx(7)
    assert ring_packing({(0, 1): 5.0, (1, 2): 5.0, (2, 3): 5.0, (0, 3): 5.0}, range(4)) == pytest.approx(10)
    assert ring_packing({(0, 1): 1.0, (1, 2): 1.0}, range(3)) == 0  # a line has no ring
    # Two triangles sharing a vertex: connected, but no cycle through all.
    assert ring_packing({(0, 1): 1.0, (1, 2): 1.0, (0, 2): 1.0, (2, 3): 1.0, (3, 4): 1.0, (2, 4): 1.0}, range(5)) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(3, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 3), min_size=15, max_size=15)))
)
def test_ring_packing_is_within_cuts_and_above_any_single_ring(case):
    n, links = case
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    capacity = {pair: float(count) for pair, count in zip(pairs, links, strict=False) if count}
    got = ring_packing(capacity, range(n)) if capacity else 0.0
    g = nx.Graph()
    g.add_nodes_from(range(n))
    g.add_weighted_edges_from((a, b, rate) for (a, b), rate in capacity.items())
    cut = nx.stoer_wagner(g)[0] if nx.is_connected(g) else 0.0
    assert got <= cut + 1e-6  # every ring crosses every cut, once in each direction
    around = [capacity.get((min(i, (i + 1) % n), max(i, (i + 1) % n)), 0.0) for i in range(n)]
    assert got >= 2 * min(around) - 1e-6


@pytest.mark.parametrize(
    ("name", "gpus", "gigabytes", "nccl", "layer"),
    [
        ("dgx-h100", range(8), 450, 370.8, "nvswitch"),
        ("dgx-h100", (1, 6), 450, 370.8, "nvswitch"),
        ("gb200-nvl72", range(72), 900, 721.8, "nvswitch"),
        ("dgx-1v", range(8), 150, 120, "nvlink"),  # six links of 25 GB/s, all used; NCCL's 6 x 20
        ("dgx-1v", range(4), 100, 80, "nvlink"),  # four of a GPU's links stay in its quad
        ("dgx-1v", (0, 3), 50, 40, "nvlink"),
        ("dgx-1v", (0, 1), 25, 20, "nvlink"),
        ("mi300x-x8", range(8), 448, 448, "nvlink"),
        ("mi300x-x8", (0, 1), 64, 64, "nvlink"),
        ("a100-pcie-x4", (0, 1), 300, 240, "nvlink"),
        ("a100-pcie-x4", range(4), 31.5, 16, "host"),  # two of four hops leave the bridges
        ("l40s-x8", (0, 1), 31.5, 24, "host"),
        ("l40s-x8", range(8), 31.5, 22, "host"),
    ],
)
def test_rings_of_real_machines(name, gpus, gigabytes, nccl, layer):
    ring = node_rates(cluster(name)).ring(gpus)
    assert ring.bytes_per_s == pytest.approx(gigabytes * GB)
    assert ring.nccl_bytes_per_s == pytest.approx(nccl * GB)
    assert ring.layer == layer


def test_a_ring_of_one_needs_nothing():
    assert node_rates(cluster("dgx-h100")).ring([3]).bytes_per_s == math.inf


def test_rings_at_the_same_time_share_the_socket_link():
    rates = node_rates(cluster("rtx4090-x8"))
    alone = rates.ring((0, 4))
    together = rates.concurrent_rings([(0, 4), (1, 5), (2, 6), (3, 7)])
    assert alone.bytes_per_s == 31.5 * GB
    assert [ring.bytes_per_s for ring in together] == [16 * GB] * 4  # 64 GB/s of socket link over four
    inside = rates.concurrent_rings([(0, 1), (2, 3), (4, 5), (6, 7)])
    assert [ring.bytes_per_s for ring in inside] == [31.5 * GB] * 4


def test_pcie_switches_share_their_uplink():
    switched = parse_cluster({"gpu": "a100-sxm-80gb", "interconnect": "pcie"}, where="test")
    rates = node_rates(switched)  # four switches with two GPUs each, one x16 uplink per switch
    assert [r.bytes_per_s for r in rates.concurrent_rings([(0, 1), (2, 3)])] == [31.5 * GB] * 2
    assert [r.bytes_per_s for r in rates.concurrent_rings([(0, 2), (1, 3)])] == [31.5 / 2 * GB] * 2
    assert rates.ring(range(8)).bytes_per_s == 31.5 * GB
