"""Machines of several kinds on one fabric: which GPUs a step goes by, what that costs, and the parts by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.question.flags import Flags
from planner.search.answer import answer
from planner.search.mixed import parts_of
from planner.search.search import SearchOptions
from simulator.analytical.estimates import estimate_plans
from simulator.config.plan import Plan
from tests.simulator.test_savers import asked
from topology.catalog.cluster_file import load_cluster
from topology.cluster import LinkState
from topology.errors import BadCluster
from topology.rates.reach import cluster_caveats, reach

BOTH = "8xH100+8xA100-80GB"


def test_joined_machines_reach_each_other_and_go_by_the_slowest():
    cluster = load_cluster(BOTH)

    assert (cluster.gpu_count, cluster.slowest_kind.name) == (16, "a100-sxm-80gb")
    assert reach(cluster).gpus == 16
    assert [part.gpu_count for part in parts_of(cluster)] == [8, 8]
    assert [part.slowest_kind.name for part in parts_of(cluster)] == ["h100-sxm", "a100-sxm-80gb"]
    assert load_cluster('[{"gpu": "h100"}, {"gpu": "a100-80gb"}]').gpu_count == 16


def test_a_part_without_a_network_is_refused_by_name():
    with pytest.raises(BadCluster, match="without a network"):
        load_cluster('[{"gpu": "h100"}, {"gpu": "rtx4090", "nic_gbit_per_gpu": 0}]')


def test_the_answer_uses_the_fast_part_where_it_is_faster_and_gives_the_price_of_all():
    flags = Flags(model="llama3.2-1b", cluster="1xH100+1xA100-80GB", seq_len=2048, global_batch=16)

    found = answer(flags, "torchtitan", SearchOptions(top=1, reasons=False))

    assert found.plans[0].plan.gpus == 1
    assert found.question.cluster.slowest_kind.name == "h100-sxm"
    said = " ".join(found.assumed)
    for words in ("the step goes by the slowest GPUs", "1 of 2 GPUs are used", "work in proportion to speed"):
        assert words in said


@pytest.mark.parametrize("command", ["suggest", "estimate"])
def test_a_plan_that_a_person_wants_on_all_of_them_has_its_price_and_the_way_around(planner, command):
    flags = ("--cluster", "1xH100+1xA100-80GB", "--gpus", "2", "--seq-len", "2048", "--global-batch", "8")
    said = " ".join(planner(command, "--model", "llama3.2-1b", *flags, "--micro-batch", "1").stdout.split())

    for words in ("the step goes by the slowest GPUs: the plan on all 2", "with --cluster (1 x h100-sxm, 1 x a100"):
        assert words in said


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_one_slow_gpu_is_as_all_of_them_being_slow(share):
    """A synchronous step goes by its slowest rank."""
    slow = load_cluster(f'{{"gpu": "h100", "slow_gpus": [[3, {share}]]}}')
    question = asked("pytorch", gpus=8, batch=16)
    plan = Plan(dp_shard=8, micro_batch_size=2, recompute="full")

    one, whole = (
        float(estimate_plans(replace(question, cluster=cluster, calibration=None), [plan]).step_s[0])
        for cluster in (slow, load_cluster("8xH100"))
    )

    # Products take 1 / share as long unless power had kept their clocks below that anyway.
    assert whole <= one * 1.0001 <= whole / share * 1.0002
    assert share > 0.3 or one > 2 * whole


def test_weak_links_and_ports_slow_the_groups_they_are_in():
    link = load_cluster('{"gpu": "h100", "slow_links": [[3, 0.5]]}')
    port = load_cluster('{"gpu": "h100", "nodes": 2, "slow_ports": [[3, 0.5]]}')

    assert any(one.state is LinkState.DEGRADED for one in link.groups[0].node.links)
    assert any("links of gpu3" in line for line in cluster_caveats(link))
    assert [group.count for group in port.groups] == [1, 1]
    for weak, whole, gpus in ((link, "8xH100", 8), (port, "2x8xH100", 16)):
        question = asked("pytorch", gpus=gpus, batch=2 * gpus)
        plan = Plan(dp_shard=gpus, micro_batch_size=2, recompute="full")
        slow, fast = (
            float(estimate_plans(replace(question, cluster=one, calibration=None), [plan]).step_s[0])
            for one in (weak, load_cluster(whole))
        )
        assert slow > fast


@pytest.mark.parametrize("pairs", ["[[8, 0.5]]", "[[0, 0.0]]", "[[0, 1.5]]", "[[0]]", '{"3": 0.8}'])
def test_impossible_shares_are_refused(pairs):
    with pytest.raises(BadCluster, match="slow_gpus"):
        load_cluster(f'{{"gpu": "h100", "slow_gpus": {pairs}}}')
