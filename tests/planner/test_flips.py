"""Reasons and flip points against costs whose crossing can be solved by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from planner.question.prediction import predict
from planner.question.question import default_runtime, question_of
from planner.search.finalists import Finalist, in_order
from planner.search.flips import find_flips, memory_flip
from planner.search.reasons import lost_because, why_it_lost
from simulator.config.estimate import Estimate, Interval, MemoryEstimate
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.legality.frameworks import MEGATRON
from tests.planner.conftest import make_cluster
from topology.catalog.cluster_file import load_cluster
from topology.cluster import Cluster, Source
from topology.rates.scaling import (
    network_bytes_per_s,
    nvlink_bytes_per_s,
    scale_memory,
    scale_network,
    scale_nvlink,
    with_gpus,
)

BEST, OTHER = Plan(dp_shard=16), Plan(dp_shard=8, tp=2)


def estimate(breakdown, reserved=10.0 * 2**30):
    step, last = sum(breakdown.values()), 0.1
    peak = Interval(value=reserved, low=reserved, high=reserved, source=Source.DATASHEET)
    return Estimate(
        step_s=Interval(value=step, low=step - 3 * last, high=step + 3 * last, source=Source.DATASHEET),
        tokens_per_gpu=1.0,
        model_flops_per_gpu=1e12,
        peak_flops=1e15,
        memory=MemoryEstimate(
            peak_bytes=peak, reserved_bytes=reserved, by_category={}, worst_rank=0, capacity_bytes=80 * 2**30, fits=True
        ),
        breakdown_s=breakdown,
    )


@dataclass(frozen=True)
class Priced:
    """A question whose plans take what a formula of the link rates says."""

    cluster: Cluster
    step_s: Callable[[Cluster, Plan], float]

    def estimate(self, plans, *, each_on=()):
        on = each_on or [self.cluster] * len(plans)
        return Costs([self.step_s(cluster, plan) for cluster, plan in zip(on, plans, strict=True)])

    def flips(self, best=BEST, other=OTHER):
        costs = self.estimate([best, other])
        first, second = (Finalist(plan=plan, estimate=costs.estimate(i)) for i, plan in enumerate((best, other)))
        return find_flips(self, first, [second])[0].points


@dataclass(frozen=True)
class Costs:
    step_s: list[float]

    def estimate(self, row):
        return estimate({"compute": self.step_s[row]})


def test_the_flip_is_past_where_the_two_costs_cross():
    """Best: 1 s + 10 GB over the network; other: 1.1 s + 2 GB. They cross at 8 GB / 0.1 s = 80 GB/s."""
    costs = {BEST: (1.0, 10e9), OTHER: (1.1, 2e9)}
    question = Priced(
        make_cluster(2, 8, network=100e9),
        lambda machine, plan: costs[plan][0] + costs[plan][1] / network_bytes_per_s(machine),
    )
    (flip,) = question.flips()

    crossing = 80e9
    assert flip.quantity == "network per GPU"
    assert flip.at == pytest.approx(crossing, rel=0.02)
    assert flip.at < crossing
    assert flip.now == 100e9
    assert flip.wins == "below"


def test_a_plan_can_win_above():
    """Other is faster once NVLink exceeds a rate; on one node the network is not asked about."""
    question = Priced(
        make_cluster(1, 8), lambda machine, plan: 1.0 if plan == BEST else 0.5 + 450e9 / nvlink_bytes_per_s(machine)
    )
    (flip,) = question.flips()
    crossing = 900e9

    assert (flip.quantity, flip.wins) == ("NVLink per GPU", "above")
    assert flip.at == pytest.approx(crossing, rel=0.02)
    assert flip.at > crossing


def test_less_memory_lets_the_smaller_plan_win():
    """80 GiB GPUs, of which a rank can use all: the best needs 60, so below 60 only the 10 GiB plan is left."""
    cluster = make_cluster(1, 8)
    large = Finalist(plan=BEST, estimate=estimate({"compute": 1.0}, reserved=60 * 2.0**30))
    small = Finalist(plan=OTHER, estimate=estimate({"compute": 2.0}))

    (flip,) = memory_flip(cluster, large, small)

    assert flip.at == pytest.approx(60 * 2.0**30)
    assert flip.wins == "below"
    assert memory_flip(cluster, small, large) == ()


def test_no_flip_within_a_factor_of_four_is_no_flip():
    question = Priced(
        make_cluster(2, 8),
        lambda machine, plan: 1.0 if plan == BEST else 1.1 - 0.0001 * 50e9 / network_bytes_per_s(machine),
    )

    assert question.flips() == ()


def test_flips_of_simulated_plans_hold_when_both_are_simulated_there(llama8b):
    """Two nodes: whatever the analytical model says of a rate, the simulation says it too, or nothing is said."""
    question = question_of(llama8b, make_cluster(2, 8), Workload(seq_len=2048, global_batch_size=64))
    plans = [
        Plan(dp_shard=16, micro_batch_size=1, recompute="full"),
        Plan(dp_shard=4, tp=4, sequence_parallel=True, micro_batch_size=4, recompute="full"),
        Plan(dp_shard=8, pp=2, micro_batch_size=1, recompute="full"),
    ]
    found = [predict(question, plan) for plan in plans]
    finalists = in_order(
        [Finalist(plan=p, estimate=one.estimate, method=one.method) for p, one in zip(plans, found, strict=True)],
        "time",
    )
    best, *others = finalists
    flips = find_flips(question, best, others)
    scale = {"network per GPU": scale_network, "NVLink per GPU": scale_nvlink}
    asked = [(other, flip) for other, own in zip(others, flips, strict=True) for flip in own.points]

    assert asked
    for other, flip in asked:
        there = replace(question, cluster=scale[flip.quantity](question.cluster, flip.at / flip.now))
        first, second = (predict(there, plan).estimate.step_s.value for plan in (best.plan, other.plan))
        assert second < first, flip


def test_the_reason_lists_what_differs_and_adds_up():
    best = estimate({"compute": 10.0, "bubble": 0.0, "exposed_communication": 2.0})
    other = estimate({"compute": 10.0, "bubble": 1.3, "exposed_communication": 1.4})

    assert lost_because(best, other) == "+6% time: +1.3 s bubble, -0.6 s communication"
    assert lost_because(best, best) == "0% time"
    heavier = estimate({"compute": 1.0}, reserved=12.5 * 2**30)
    assert lost_because(best, heavier, objective="memory") == "needs +2.5 GiB"


def test_of_a_tie_the_reason_is_what_a_person_would_choose_by():
    simple = Finalist(plan=BEST, estimate=estimate({"compute": 10.0}))
    intricate = Finalist(plan=OTHER, estimate=estimate({"compute": 9.9}, reserved=14 * 2.0**30))
    slower = Finalist(plan=replace(OTHER, dp_shard=4, cp=2), estimate=estimate({"compute": 10.6}))
    first, second, third = in_order([slower, intricate, simple], "time")

    assert [one.plan for one in (first, second, third)] == [BEST, OTHER, slower.plan]
    assert [one.tie for one in (first, second, third)] == [1, 1, 2]
    assert why_it_lost(first, second, "time") == "a tie (-1% time); needs tensor parallelism; leaves 4.0 GiB less free"


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


def test_overlapped_plans_have_a_step_where_a_link_becomes_slower_than_pcie():
    """Pairs of a DGX-1V share one NVLink, which at a quarter of its rate is slower than PCIe: copies go there."""
    machine, workload = load_cluster("8xV100"), Workload(seq_len=2048, global_batch_size=64)
    runtime = replace(default_runtime(MEGATRON), param_dtype="float16", compute_dtype="float16")
    question = question_of(load_model("llama2-7b"), machine, workload, framework=MEGATRON, runtime=runtime)
    plan = Plan(dp_replicate=2, tp=4, micro_batch_size=4, sequence_parallel=True, tp_overlap="userbuffers")
    steps_s = question.estimate([plan] * 3, each_on=[scale_nvlink(machine, by) for by in (1.0, 0.5, 0.25)]).step_s

    assert steps_s[0] < steps_s[1] < steps_s[2] < np.inf
