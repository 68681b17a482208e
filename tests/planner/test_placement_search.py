"""The order of a node's GPUs as a choice of the search, against every order there is."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from planner.question.question import question_of
from planner.search.plan_space.candidates import Bounds
from planner.search.search import SearchOptions, suggest
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.workload import Workload
from tests.planner.conftest import TINY
from tests.planner.every_plan import enumerate_candidates
from tests.planner.test_inner_solve import bridged
from topology.catalog.clusters import cluster as catalogue
from topology.rates.node_rates import node_rates
from topology.rates.orders import groups_on, node_orders, order_of, placement_of_order, undominated_orders


@pytest.mark.parametrize("framework", [pytest.param("torchtitan", marks=pytest.mark.nightly), "megatron-lm", "any"])
def test_no_order_of_the_gpus_is_better_than_those_tried(framework):
    """Every legal plan under each of the 24 orders of four GPUs in two bridged pairs."""
    model = replace(TINY, layers=3, hidden=2048, head_dim=2048 // TINY.heads, ffn=6144, vocab=32000)
    machine, workload = bridged(4), Workload(seq_len=1024, global_batch_size=8)
    bounds = Bounds(max_micro_batch=1, min_tokens_per_context_rank=256, max_virtual_stages=1)
    answer = suggest(
        question_of(model, machine, workload, framework=framework),
        SearchOptions(bounds=bounds, simulate=False, top=1, all_variants=True),
    )
    found = enumerate_candidates(
        question_of(model, machine, workload, framework=framework, runtime=answer.question.runtime), bounds=bounds
    )
    bare = list(dict.fromkeys(replace(plan, placement=()) for plan in found.plans()))
    every = [replace(plan, placement=order) for plan in bare for order in itertools.permutations(range(4))]
    with np.errstate(invalid="ignore"):  # what cannot run here takes for ever, and for ever less for ever is no number
        table = estimate_plans(
            Scenario(model=model, cluster=machine, workload=workload, runtime=answer.question.runtime), every
        )
    least = table.step_s[table.fits & np.isfinite(table.step_s)].min()

    assert answer.search.bound_s <= least * (1 + 1e-12)
    assert answer.plans[0].estimate.step_s.value <= least * (1 + 1e-12)  # less where stages are filled better


def test_a_plan_is_ranked_by_what_it_costs_where_it_is_placed():
    """Bridges join 0-2 and 1-3: with ranks in order tensor parallelism would cross sockets, and be slower."""
    model, machine = load_model("llama3-8b"), bridged(4)
    workload = Workload(seq_len=8192, global_batch_size=8)
    answer = suggest(question_of(model, machine, workload), SearchOptions(simulate=False, top=5))
    best = min(answer.plans, key=lambda ranked: ranked.estimate.step_s.value)
    table = estimate_plans(
        Scenario(model=model, cluster=machine, workload=workload, runtime=answer.question.runtime),
        [replace(best.plan, placement=(0, 1, 2, 3)), best.plan],
    )
    pairs = {frozenset(best.plan.placement[i : i + 2]) for i in (0, 2)}

    assert best.plan.tp == 2
    assert pairs == {frozenset({0, 2}), frozenset({1, 3})}
    assert table.step_s[1] == pytest.approx(best.estimate.step_s.value - best.estimate.breakdown_s["allocator"])
    assert table.step_s[0] > table.step_s[1]


def test_the_order_tried_first_for_pairs_is_that_of_the_bridges_on_a_cube_mesh():
    """DGX-1: no order gives pairs of neighbours more than a double link, and the orders kept reach that."""
    machine = catalogue("dgx-1v")
    rates = node_rates(machine)
    pattern = (2, 1, False)
    orders = node_orders(machine, 8)
    kept = [orders[number] for number in undominated_orders(machine, 8, [pattern])]
    rng = random.Random(1)

    def slowest(order):
        return min(rates.pair_bytes_per_s(a, b) for a, b in groups_on(order, pattern, rates))

    best = max(slowest(tuple(rng.sample(range(8), 8))) for _ in range(3000))
    assert len(kept) == 1
    assert slowest(kept[0]) == best


def test_a_placement_and_its_order_say_the_same():
    order = (2, 0, 3, 1)

    assert placement_of_order(order, 8, 4) == (2, 0, 3, 1, 6, 4, 7, 5)
    assert order_of(placement_of_order(order, 8, 4), 4) == order
    assert order_of((0, 1, 2, 3, 5, 4, 6, 7), 4) == ()  # nodes that differ have no order in common


def test_uniform_nodes_have_no_orders():
    assert node_orders(catalogue("dgx-h100"), 8) == ()
