"""Reasons and flip points against costs whose crossing can be solved by hand."""

from __future__ import annotations

import pytest

from planner.search.flips import find_flips, lost_because, memory_flip
from planner.search.scaling import (
    network_bytes_per_s,
    nvlink_bytes_per_s,
    scale_memory,
    scale_network,
    scale_nvlink,
    with_gpus,
)
from simulator.config.estimate import Estimate, Interval, MemoryEstimate
from simulator.config.plan import Plan
from tests.planner.conftest import make_cluster
from topology.cluster import Source

BEST, OTHER = Plan(dp_shard=16), Plan(dp_shard=8, tp=2)


def estimate(breakdown, reserved=10.0 * 2**30):
    step = sum(breakdown.values())
    peak = Interval(value=reserved, low=reserved, high=reserved, source=Source.DATASHEET)
    return Estimate(
        step_s=Interval(value=step, low=step, high=step, source=Source.DATASHEET),
        tokens_per_s_per_gpu=1.0,
        mfu=0.1,
        tflops_per_gpu=1.0,
        peak_flops=1e15,
        memory=MemoryEstimate(
            peak_bytes=peak, reserved_bytes=reserved, by_category={}, worst_rank=0, capacity_bytes=80 * 2**30, fits=True
        ),
        breakdown_s=breakdown,
    )


def test_the_flip_is_where_the_two_costs_cross():
    """Best: 1 s + 10 GB over the network; other: 1.1 s + 2 GB. They cross at 8 GB / 0.1 s = 80 GB/s."""
    cluster = make_cluster(2, 8, network=100e9)

    def judge(asked):
        costs = {BEST: (1.0, 10e9), OTHER: (1.1, 2e9)}
        return [(costs[plan][0] + costs[plan][1] / network_bytes_per_s(changed), True) for changed, plan in asked]

    (flips,) = find_flips(cluster, BEST, [OTHER], judge)

    assert [flip.quantity for flip in flips] == ["network per GPU"]
    assert flips[0].at == pytest.approx(80e9, rel=2e-3)
    assert flips[0].now == 100e9
    assert flips[0].wins == "below"


def test_a_plan_can_win_above():
    """Other is better once NVLink exceeds 900 GB/s; on one node the network is not asked about."""
    cluster = make_cluster(1, 8)

    def judge(asked):
        return [(1.0 if plan == BEST else 0.5 + 450e9 / nvlink_bytes_per_s(changed), True) for changed, plan in asked]

    (flips,) = find_flips(cluster, BEST, [OTHER], judge)

    assert [(flip.quantity, flip.wins) for flip in flips] == [("NVLink per GPU", "above")]
    assert flips[0].at == pytest.approx(900e9, rel=2e-3)


def test_less_memory_lets_the_smaller_plan_win():
    """80 GiB GPUs, of which a rank can use all: the best needs 60, so below 60 only the 10 GiB plan is left."""
    cluster = make_cluster(1, 8)
    large, small = estimate({"compute": 1.0}, reserved=60 * 2.0**30), estimate({"compute": 2.0})

    (flip,) = memory_flip(cluster, large, small)

    assert flip.at == 60 * 2.0**30
    assert flip.wins == "below"
    assert memory_flip(cluster, small, large) == ()


def test_no_flip_within_a_factor_of_sixteen_is_no_flip():
    cluster = make_cluster(2, 8)

    def judge(asked):
        return [
            (1.0 if plan == BEST else 1.1 - 0.0001 * 50e9 / network_bytes_per_s(changed), True)
            for changed, plan in asked
        ]

    assert find_flips(cluster, BEST, [OTHER], judge) == [()]


def test_the_reason_lists_what_differs_and_adds_up():
    best = estimate({"compute": 10.0, "bubble": 0.0, "exposed_communication": 2.0})
    other = estimate({"compute": 10.0, "bubble": 1.3, "exposed_communication": 1.4})

    assert lost_because(best, other, objective="time") == (
        "+1.3 s bubble, -600 ms exposed communication; net +700 ms a step (+5.8%)"
    )
    assert "ties" in lost_because(best, best, objective="time")
    heavier = estimate({"compute": 1.0}, reserved=12.5 * 2**30)
    assert lost_because(best, heavier, objective="memory") == "needs +2.5 GiB"


def test_scaling_changes_one_thing_only():
    cluster = make_cluster(2, 8)
    faster, wider, larger = scale_network(cluster, 2.0), scale_nvlink(cluster, 2.0), scale_memory(cluster, 2.0)

    assert network_bytes_per_s(faster) == 2 * network_bytes_per_s(cluster)
    assert nvlink_bytes_per_s(faster) == nvlink_bytes_per_s(cluster)
    assert nvlink_bytes_per_s(wider) == 2 * nvlink_bytes_per_s(cluster)
    assert network_bytes_per_s(wider) == network_bytes_per_s(cluster)
    assert {link.bytes_per_s for link in wider.groups[0].node.links} == {900e9}
    assert larger.gpu_memory_bytes == 2 * cluster.gpu_memory_bytes
    assert scale_network(cluster, 1.0) == cluster == scale_memory(cluster, 1.0)


@pytest.mark.parametrize(("gpus", "nodes", "per_node"), [(4, 1, 4), (8, 1, 8), (32, 4, 8)])
def test_other_gpu_counts(gpus, nodes, per_node):
    changed = with_gpus(make_cluster(2, 8), gpus)

    assert (changed.gpu_count, changed.node_count, changed.gpus_per_node) == (gpus, nodes, per_node)
    vertices = {gpu.vertex for gpu in changed.groups[0].node.gpus} | {"nvswitch"}
    assert all({link.a, link.b} <= vertices for link in changed.groups[0].node.links)


def test_a_part_of_a_node_beside_whole_ones_is_refused():
    with pytest.raises(ValueError, match="no whole number"):
        with_gpus(make_cluster(2, 8), 12)
