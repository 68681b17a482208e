"""Placement against brute force on small irregular nodes."""

from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.catalog.cluster_file import parse_cluster
from topology.catalog.clusters import cluster
from topology.catalog.platform import CUBE_MESH
from topology.cluster import LinkKind, LinkState, NodeGroup
from topology.errors import BadPlan, Infeasible
from topology.rates.node_rates import node_rates
from topology.rates.placement import place

GB = 1e9


def splits(items, size):
    """Every way to cut `items` into groups of `size`."""
    if not items:
        yield ()
        return
    for others in combinations(items[1:], size - 1):
        group = (items[0], *others)
        for tail in splits([item for item in items if item not in group], size):
            yield (group, *tail)


def best_single_ring(group, rate):
    """The slowest hop of the best order, by trying all: what a ring is worth where wires are not shared out."""
    first, *rest = group
    return max(min(rate(a, b) for a, b in zip((first, *o), (*o, first), strict=True)) for o in permutations(rest))


def groups_of(order, size):
    return [tuple(sorted(order[i : i + size])) for i in range(0, len(order), size)]


def test_crossed_bridges():
    made = parse_cluster({"gpu": "a100-pcie-80gb", "gpus_per_node": 4, "bridges": [[0, 3], [1, 2]]}, where="test")
    order = place(made, {"tp": 2, "dp_shard": 2})
    assert {frozenset(group) for group in groups_of(order, 2)} == {frozenset({0, 3}), frozenset({1, 2})}


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(8)), st.integers(1, 4))
def test_pairs_on_randomly_bridged_cards(order, bridges):
    pairs = [sorted(order[i * 2 : i * 2 + 2]) for i in range(bridges)]
    made = parse_cluster({"gpu": "rtx-a6000", "gpus_per_node": 8, "bridges": pairs}, where="test")
    got = groups_of(place(made, {"tp": 2, "dp_shard": 4}), 2)
    assert sorted(gpu for group in got for gpu in group) == list(range(8))
    rates = node_rates(made)

    def quality(split):
        speeds = [4 * 14.062 * GB if list(group) in pairs else rates.ring(group).bytes_per_s for group in split]
        return min(speeds), sum(speeds)

    assert quality(got) == pytest.approx(max(quality(split) for split in splits(list(range(8)), 2)))


def test_cube_mesh_pairs_by_brute_force():
    links = {(a, b): count for a, b, count in CUBE_MESH}
    got = groups_of(place(cluster("dgx-1v"), {"tp": 2, "dp_shard": 4}), 2)

    def quality(split):
        counts = [links.get(group, 0) for group in split]
        return min(counts), sum(counts)

    assert quality(got) == max(quality(split) for split in splits(list(range(8)), 2)) == (2, 8)


@pytest.mark.parametrize("relabel", [(0, 1, 2, 3, 4, 5, 6, 7), (3, 0, 5, 1, 7, 2, 6, 4), (7, 6, 5, 4, 3, 2, 1, 0)])
def test_cube_mesh_quads_whatever_the_numbering(relabel):
    bridges = [[relabel[a], relabel[b], count] for a, b, count in CUBE_MESH]
    made = parse_cluster({"gpu": "v100-sxm-32gb", "gpus_per_node": 8, "bridges": bridges}, where="test")
    got = groups_of(place(made, {"tp": 4, "dp_shard": 2}), 4)
    rates = node_rates(made)
    assert [rates.ring(group).bytes_per_s for group in got] == pytest.approx([100 * GB, 100 * GB])
    every = [min(rates.ring(group).bytes_per_s for group in split) for split in splits(list(range(8)), 4)]
    assert max(every) == pytest.approx(100 * GB)
    width = {frozenset((relabel[a], relabel[b])): count for a, b, count in CUBE_MESH}
    single = [best_single_ring(group, lambda a, b: width.get(frozenset((a, b)), 0)) for group in got]
    assert min(single) >= 1  # no hop leaves NVLink


def test_neighbouring_groups_line_up():
    order = place(cluster("dgx-1v"), {"tp": 4, "dp_shard": 2})
    rates = node_rates(cluster("dgx-1v"))
    across = [rates.nvlink(order[i], order[i + 4])[0] for i in range(4)]
    assert sorted(across) == [25 * GB, 25 * GB, 50 * GB, 50 * GB]  # each GPU next to the one it has a wire to


def test_sockets_are_not_crossed():
    for tp in (2, 4):
        for group in groups_of(place(cluster("rtx4090-x8"), {"tp": tp, "dp_shard": 8 // tp}), tp):
            assert len({gpu // 4 for gpu in group}) == 1


def test_uniform_nodes_keep_their_order():
    assert place(cluster("dgx-h100", 32), {"tp": 4, "dp_shard": 4, "pp": 2}) == tuple(range(32))
    assert place(cluster("gb200-nvl72"), {"tp": 8, "dp_shard": 9}) == tuple(range(72))
    assert place(cluster("dgx-h100", 1024), {"tp": 8, "dp_shard": 64, "pp": 2, "ep": 8}) == tuple(range(1024))


def with_lost_gpu(made, index):
    node = made.groups[0].node
    links = tuple(
        replace(link, state=LinkState.ABSENT) if link.a == f"gpu{index}" and link.kind is LinkKind.NVSWITCH else link
        for link in node.links
    )
    return replace(made, groups=(NodeGroup(node=replace(node, links=links)),))


def test_bad_gpu_is_left_out_when_the_rest_suffice():
    made = with_lost_gpu(cluster("dgx-b200"), 2)
    assert 2 not in place(made, {"tp": 4})
    assert place(made, {"dp_shard": 7}) == (0, 1, 3, 4, 5, 6, 7)
    assert sorted(place(made, {"tp": 8})) == list(range(8))
    order = place(made, {"tp": 4, "dp_shard": 2})  # all eight are needed: the bad one spoils one group only
    assert sum(2 in group for group in groups_of(order, 4)) == 1


def test_bad_node_is_left_out_when_the_rest_suffice():
    bad, good = with_lost_gpu(cluster("dgx-b200"), 2), cluster("dgx-b200", 16)
    mixed = replace(good, groups=(*bad.groups, *good.groups))
    assert place(mixed, {"tp": 8}) == tuple(range(8, 16))
    # 16 of 24 GPUs in groups of four: the bad node gives four good ones.
    order = place(mixed, {"tp": 4, "dp_shard": 4})
    assert 2 not in order
    assert len(set(order)) == 16


def test_unhealthy_gpu():
    made = cluster("l40s-x8")
    node = made.groups[0].node
    gpus = tuple(replace(gpu, healthy=gpu.index != 1) for gpu in node.gpus)
    ill = replace(made, groups=(NodeGroup(node=replace(node, gpus=gpus)),))
    assert 1 not in place(ill, {"tp": 2, "dp_shard": 3})


def test_same_order_on_every_node_keeps_rails():
    made = cluster("dgx-1v", 32)
    order = place(made, {"tp": 2, "dp_shard": 16})
    assert [gpu % 8 for gpu in order[:8]] * 4 == [gpu % 8 for gpu in order]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_sixteen_irregular_gpus(size):
    pairs = [[i, 15 - i] for i in range(8)]
    made = parse_cluster({"gpu": "rtx-a6000", "gpus_per_node": 16, "bridges": pairs}, where="test")
    order = place(made, {"tp": size, "dp_shard": 16 // size})
    assert sorted(order) == list(range(16))
    if size == 2:
        assert {frozenset(group) for group in groups_of(order, 2)} == {frozenset(pair) for pair in pairs}
    assert place(made, {"tp": size, "dp_shard": 16 // size}) == order


def test_what_cannot_be_placed():
    with pytest.raises(Infeasible):
        place(cluster("dgx-h100"), {"tp": 16})
    with pytest.raises(BadPlan, match="tensor"):
        place(cluster("dgx-h100"), {"tensor": 2})
    with pytest.raises(BadPlan):
        place(cluster("dgx-h100"), {"tp": 0})
