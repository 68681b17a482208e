"""The search: exhaustive, honest about what it left out, the same every time, and helpful when there is no answer."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from planner.explain.tables import search_line
from planner.question.case_runtime import resolve_runtime
from planner.question.prediction import Method, predict
from planner.question.question import question_of
from planner.search.finalists import TIE
from planner.search.infeasible import minimal_gpus
from planner.search.plan_space import judged
from planner.search.plan_space.branch_and_bound import BestFirst
from planner.search.plan_space.candidates import PIPELINE_FIELDS, Bounds, enumerate_nodes
from planner.search.plan_space.collected import ListedTies
from planner.search.plan_space.screened import Screened
from planner.search.search import SearchOptions, suggest
from planner.search.stages.assignment import NEAR_FIT
from planner.search.tie_groups import TIE_GROUP_MARGIN, one_of_tie_group, rank_rows
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import distinct
from simulator.config.estimate import Fit
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.fitting.calibration_fit import calibrated
from simulator.legality.frameworks import TORCHTITAN
from simulator.legality.rules import is_legal
from simulator.memory.plan_memory import Replays
from tests.planner.conftest import LLAMA8B, ROOT, make_cluster
from tests.planner.every_plan import enumerate_candidates, leanest_gap
from topology import codec
from topology.catalog.cluster_file import load_cluster
from topology.cluster import Link, LinkKind
from topology.errors import BadCluster, Infeasible, UserError
from topology.profile.profile import read_profile
from topology.rates.orders import irregular


@pytest.fixture
def workload():
    return WORKLOAD


WORKLOAD = Workload(seq_len=4096, global_batch_size=16)
RUNTIME = resolve_runtime({"name": "torchtitan"})[0]
# Half a node and a quarter of the layers: as many kinds of plans as there are of all, and a tenth of the number.
LIMITS = Bounds(max_micro_batch=2, max_virtual_stages=2)
QUESTION = question_of(
    replace(LLAMA8B, layers=8),
    make_cluster(1, 4, memory_gib=24),
    replace(WORKLOAD, global_batch_size=8),
    framework="torchtitan",
    runtime=RUNTIME,
)


class EveryPlan:
    """All legal plans of a question, judged by their replay where a test asks: `lowest(values)` yields rows that fit,
    lowest value first, with what is known of them. Rows that are not `wanted` when it comes to them are left out.
    """

    def __init__(self, question, plans):
        self.table, self.replays = question.estimate(plans), Replays(question)

    def lowest(self, values, *, sure=False, wanted=lambda _: True):
        for row in filter(wanted, np.argsort(values, kind="stable")):
            held = self.replays[self.table.plans[row]] if self.table.fits[row] and np.isfinite(values[row]) else None
            if held is not None and (held.surely_fits if sure else held.fits):
                yield int(row), float(self.table.step_s[row]) + held.full_s, held.reserved_bytes

    def least(self, objective, *, sure=False):
        """Return the least value of all plans that fit: no other one's bound lies below it."""
        by_time, best = objective == "time", np.inf
        values = self.table.step_s if by_time else self.table.reserved_bytes
        for row, step, reserved in self.lowest(values, sure=sure):
            if values[row] >= best:
                break
            best = min(best, step if by_time else reserved)
        return best


@pytest.fixture(scope="module")
def every_plan():
    """The estimates of all legal plans of QUESTION within LIMITS, made once."""
    return EveryPlan(QUESTION, enumerate_candidates(QUESTION, bounds=LIMITS).plans())


NARROW = replace(LIMITS, max_pp=1)
NO_PIPELINES = SearchOptions(bounds=NARROW)


@cache
def answer(*, pipelines=True, **options):
    """Return what the search answers to QUESTION, asked once for all tests."""
    bounds = LIMITS if pipelines else NARROW
    return suggest(QUESTION, SearchOptions(bounds=bounds, **{"simulate": False, **options}))


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_no_candidate_beats_the_first(every_plan, objective):
    """The best plan is the minimum over every candidate that surely fits, costed one by one; the bound is true and
    tight.

    By time the first is the simplest of those that tie with the best.
    """
    result = answer(objective=objective)
    table = every_plan.table
    best = every_plan.least(objective, sure=objective == "time")
    listed = [ranked.estimate for ranked in result.plans]
    values = [one.step_s.value if objective == "time" else one.memory.reserved_bytes for one in listed]

    assert best * (1 - 1e-12) <= min(values) <= best * (1 + (TIE_GROUP_MARGIN if objective == "time" else 1e-12))
    assert values[0] <= min(values) * (1 + (TIE if objective == "time" else 1e-12))
    assert result.search.bound_s <= best * (1 + 1e-12) if objective == "time" else best
    assert result.search.gap == 0
    assert result.search.status == "optimal within the model"
    assert result.search.legal == len(table.plans)
    assert result.search.fitting <= int(table.fits.sum())
    assert result.rejected["memory"] == len(table.plans) - result.search.fitting


def test_every_plan_listed_is_next_best(every_plan):
    """Not only the first: of tie_group, which split data parallelism differently, one stands for all that tie with
    it.
    """
    result = answer(objective="time")
    best = {}
    for row, step, _ in every_plan.lowest(every_plan.table.step_s, sure=True):
        group = tie_group(every_plan.table.plans[row])
        best[group] = min(best.get(group, np.inf), step)
        if len(best) > len(result.plans):
            break
    listed = {}
    for ranked in result.plans:
        listed[tie_group(ranked.plan)] = min(listed.get(tie_group(ranked.plan), np.inf), ranked.estimate.step_s.value)
        if ranked.plan.layers_per_stage:  # filled, which only goes beyond the list where that is quicker
            best[tie_group(ranked.plan)] = min(best.get(tie_group(ranked.plan), np.inf), ranked.estimate.step_s.value)

    # Where merging tie_group leaves fewer than were asked for, the list is filled with some of them.
    fastest = sorted(best, key=best.get)[: len(listed)]
    assert set(listed) == set(fastest)
    assert all(
        best[family] * (1 - 1e-12) <= step <= best[family] * (1 + TIE_GROUP_MARGIN) for family, step in listed.items()
    )


def tie_group(plan):
    return (plan.data_parallel, plan.cp, plan.tp, plan.pp, plan.ep)


def test_no_plan_past_the_step_of_the_last_tie_group_changes_the_list():
    """Whichever plans are known so far: those above the step that they give are not needed."""
    draw = np.random.default_rng(7)
    for _ in range(200):
        grids = [Plan(dp_replicate=1 << i, dp_shard=8 >> i, tp=tp) for i in range(4) for tp in (1, 2, 4)]
        steps = np.round(draw.choice([1.0, 1.1, 1.5], len(grids)) * draw.uniform(1.0, 1.12, len(grids)), 2)
        groups = np.array([int(np.log2(plan.tp)) for plan in grids])
        count = int(draw.integers(1, 6))
        known = np.where(draw.random(len(grids)) < 0.7, steps, np.inf)
        limit = ListedTies(count=count, tie=TIE, margin=TIE_GROUP_MARGIN).last_step(known, groups)

        every = sorted(zip(steps.tolist(), grids, strict=True), key=lambda pair: pair[0])
        needed = [(step, plan) for step, plan in every if step <= limit]
        assert one_of_tie_group(needed)[:count] == one_of_tie_group(every)[:count]


def test_the_pareto_set_is_that_of_all_plans(every_plan):
    """Fastest first, each leaner than the one before; nothing legal beats any of them in both."""
    result = answer(objective="pareto")
    table, costs, front = every_plan.table, [], []

    def may_be_leaner(row):
        """No plan is leaner than its bound, nor quicker than without retries."""
        least = (table.step_s[row], table.reserved_bytes[row])
        return not any(step <= least[0] and reserved <= least[1] for step, reserved in costs)

    for _, step, reserved in every_plan.lowest(table.step_s, wanted=may_be_leaner):
        costs.append((step, reserved))
    for step, reserved in sorted(costs):  # retries of the allocator make steps longer than they were ordered by
        if not front or reserved < front[-1][1]:
            front.append((step, reserved))
    listed = [(p.estimate.step_s.value, p.estimate.memory.reserved_bytes) for p in result.plans]

    assert np.array(listed) == pytest.approx(np.array(front), rel=1e-12)


@pytest.mark.parametrize("framework", ["torchtitan", "megatron-lm"])
def test_a_search_cut_short_says_how_far_it_may_be_off(llama8b, workload, framework, monkeypatch):
    """No time at all: still a plan that runs and fits, a true bound, and the gap between them, judged by one limit."""
    monkeypatch.setattr(judged, "GRACE_S", 100.0)
    question = question_of(llama8b, make_cluster(2, 4), workload, framework=framework)
    cut = suggest(question, SearchOptions(time_limit_s=0.0, simulate=False))
    whole = suggest(question, SearchOptions(top=1, simulate=False))
    best = whole.plans[0].estimate.step_s.value

    assert cut.search.bound_s <= best <= cut.plans[0].estimate.step_s.value
    assert cut.plans[0].estimate.step_s.value <= cut.search.bound_s * (1 + cut.search.gap) * (1 + 1e-12)
    assert cut.plans[0].estimate.memory.fits
    limits = {one.plans[0].estimate.memory.capacity_bytes for one in (cut, whole)}
    assert len(limits) == 1
    assert [", an estimate)" in search_line(one) for one in (cut, whole)] == [True, False]


def test_every_plan_listed_is_simulated_and_in_that_order():
    """First what surely fits; among equals in that, a plan of an earlier tie is never slower than one of a later."""
    result = answer(objective="time", simulate=True, top=3, pipelines=False)
    sure = [ranked.estimate.memory.fit is Fit.YES for ranked in result.plans]
    fastest = {ranked.tie: ranked.estimate.step_s.value for ranked in reversed(result.plans)}
    slowest = {ranked.tie: ranked.estimate.step_s.value for ranked in result.plans}

    assert {ranked.method for ranked in result.plans} == {Method.SIMULATION}
    assert result.search.simulated == len(result.plans)
    assert sure == sorted(sure, reverse=True)
    for ranked in result.plans:
        again = predict(QUESTION, ranked.plan).estimate
        assert again == ranked.estimate
        assert sum(again.breakdown_s.values()) == pytest.approx(again.step_s.value)
        assert sum(again.exposed_by_axis_s.values()) == pytest.approx(again.breakdown_s["exposed_communication"])
    if all(sure):
        assert all(slowest[tie] < fastest[tie + 1] for tie in slowest if tie + 1 in fastest)


def test_a_plan_that_may_not_fit_where_simulated_comes_after_those_that_do(monkeypatch):
    """The first is fastest in the simulation too, but its allocator holds more than there is."""
    from planner.search import finalists

    real, first = finalists.predict, answer(objective="time", simulate=True, top=3, pipelines=False).plans[0].plan

    def fragmented(question, plan, **options):
        found = real(question, plan, **options)
        held = 2.0 if plan == first else 0.5
        memory = replace(
            found.estimate.memory, reserved_bytes=held * found.estimate.memory.capacity_bytes, fits=held < 1
        )
        return replace(found, estimate=replace(found.estimate, memory=memory))

    monkeypatch.setattr(finalists, "predict", fragmented)
    result = suggest(QUESTION, NO_PIPELINES)
    (demoted,) = (ranked for ranked in result.plans if ranked.plan == first)

    assert demoted.rank == len(result.plans)
    assert "is not predicted to fit" in demoted.lost_because


def test_the_answer_is_ranked_feasible_and_explained():
    result = answer(objective="time")
    steps = [ranked.estimate.step_s.value for ranked in result.plans]
    grids = [(p.plan.dp_replicate, p.plan.dp_shard, p.plan.tp, p.plan.cp, p.plan.pp) for p in result.plans]

    assert all(step <= later * (1 + TIE) for step, later in pairwise(steps))
    assert [ranked.rank for ranked in result.plans] == [1, 2, 3, 4, 5]
    assert len(set(grids)) == 5
    assert all(ranked.estimate.memory.fits and is_legal(ranked.problems) for ranked in result.plans)
    assert result.plans[0].lost_because is None
    assert all(ranked.lost_because for ranked in result.plans[1:])


def test_variants_of_one_grid_are_listed_on_request():
    result = suggest(QUESTION, replace(NO_PIPELINES, top=6, all_variants=True, simulate=False))
    grids = {(p.plan.dp_replicate, p.plan.dp_shard, p.plan.tp, p.plan.cp, p.plan.pp) for p in result.plans}

    assert len(result.plans) == 6
    assert len(grids) < 6


def test_objectives_differ():
    fast, small = (answer(objective=objective).plans[0].estimate for objective in ("time", "memory"))

    assert small.memory.reserved_bytes < fast.memory.reserved_bytes
    assert small.step_s.value > fast.step_s.value
    with pytest.raises(UserError, match="objective"):
        suggest(QUESTION, SearchOptions(objective="beauty"))


def without_clock(result):
    return codec.to_json(replace(result, search=replace(result.search, seconds=0.0)))


SMALL = {"screened.NODES_AT_ONCE": 17, "screened.PLANS_AT_ONCE": 31, "branch_and_bound.FIRST_PLANS": 1}


@pytest.fixture(scope="module", params=["time", pytest.param("pareto", marks=pytest.mark.nightly)])
def listed(request):
    """Return how to search, and the answer with chunks as they are."""
    model = replace(LLAMA8B, layers=7, hidden=2048, heads=16, ffn=4096)
    question = question_of(model, make_cluster(1, 4, nvlink=False, memory_gib=24), WORKLOAD)
    options = SearchOptions(
        objective=request.param, simulate=False, bounds=Bounds(max_cp=1, max_tp=2, max_micro_batch=2)
    )
    return options, suggest(question, options)


@pytest.mark.parametrize("sizes", [SMALL, {"branch_and_bound.FIRST_PLANS": 10**6}], ids=["small", "large"])
def test_chunks_do_not_change_the_answer(listed, monkeypatch, sizes):
    """Byte for byte, account included; some of the plans listed have layers that were assigned to their stages."""
    options, whole = listed
    for name, size in sizes.items():
        monkeypatch.setattr(f"planner.search.plan_space.{name}", size)
    parts = suggest(whole.question, options)

    assert any(ranked.plan.layers_per_stage for ranked in whole.plans) == (options.objective == "time")
    assert without_clock(parts) == without_clock(whole)


def test_ties_go_to_the_simpler_plan():
    """With all costs equal, the first plan has no pipeline, context or tensor parallelism and micro batch 1."""
    found = enumerate_candidates(QUESTION, bounds=LIMITS)
    row = rank_rows(found.columns, np.ones(len(found)), top=1, all_variants=False)[0]
    plan = found.columns.plan(row)

    assert (plan.pp, plan.cp, plan.tp, plan.micro_batch_size) == (1, 1, 1, 1)


@pytest.mark.nightly  # the example of a model that is too large, and the offers of test_gpu_counts.py, are in the gate
def test_story_s18_an_infeasible_question_names_what_is_missing():
    """405B on 8 H100: state alone is 16 bytes a parameter over 8 GPUs; the message has GiB, factor and a way out."""
    model, workload = load_model("llama3-405b"), Workload(seq_len=8192, global_batch_size=64)
    with pytest.raises(Infeasible) as caught:
        suggest(question_of(model, make_cluster(1, 8), workload))
    text = str(caught.value)
    needs, has = (float(x) for x in re.search(r"([\d.]+) GiB of ([\d.]+)", caught.value.what).groups())
    missing, factor = re.search(r"([\d.]+) GiB missing, a factor of ([\d.]+)", text).groups()
    offered = int(re.search(r"--gpus (\d+)", text)[1])

    assert caught.value.exit_code == 3
    assert needs >= 16 * model.parameters / 8 / 2**30
    assert float(missing) == pytest.approx(needs - has, abs=1.5)
    assert float(factor) == pytest.approx(needs / has, rel=0.06)  # of figures in whole GiB
    # The offer holds, by one of the leaner plans; no number of nodes below it does.
    lean = Bounds(max_micro_batch=1, max_cp=1, max_virtual_stages=1, stated={"recompute": ("full",)})
    options = SearchOptions(top=1, simulate=False, reasons=False, bounds=lean)
    assert suggest(question_of(model, make_cluster(offered // 8, 8), workload), options).plans
    for fewer in range(1, offered // 8):
        assert (
            leanest_gap(
                question_of(
                    model, make_cluster(fewer, 8), workload, framework=TORCHTITAN, runtime=RUNTIME, gpus=fewer * 8
                )
            )
            > 0
        )


def test_a_shorter_sequence_is_offered_when_it_helps(llama8b):
    """One GPU too small for 32k tokens but not for fewer: the offered length fits, twice of it does not."""
    cluster = make_cluster(1, 8, memory_gib=20)
    workload = Workload(seq_len=131072, global_batch_size=8)
    with pytest.raises(Infeasible) as caught:
        suggest(question_of(llama8b, cluster, workload))
    length = int(re.search(r"--seq-len (\d+)", caught.value.remedy)[1])

    assert (
        leanest_gap(
            question_of(
                llama8b, cluster, replace(workload, seq_len=length), framework=TORCHTITAN, runtime=RUNTIME, gpus=8
            )
        )
        <= 0
    )
    assert (
        leanest_gap(
            question_of(
                llama8b, cluster, replace(workload, seq_len=2 * length), framework=TORCHTITAN, runtime=RUNTIME, gpus=8
            )
        )
        > 0
    )


def test_nothing_legal_names_the_rules(llama8b):
    with pytest.raises(Infeasible, match="no legal plan") as caught:
        suggest(
            question_of(replace(llama8b, layers=1), make_cluster(1, 7), Workload(seq_len=8191, global_batch_size=3))
        )

    assert "sequence" in caught.value.why
    assert caught.value.exit_code == 3


def test_stated_recomputation_that_no_degree_allows_is_refused_with_its_rule():
    stated = Bounds().fixing(tp=((2, 2),), dp_shard=((1, 1),), recompute=("selective-op",))
    with pytest.raises(Infeasible, match="no legal plan") as caught:
        suggest(
            question_of(load_model("qwen3-8b"), make_cluster(1, 2), Workload(seq_len=2048, global_batch_size=2)),
            SearchOptions(bounds=stated),
        )

    assert "aten._unsafe_view" in caught.value.why
    assert "--tp 1" in caught.value.remedy


def test_the_fewest_gpus_are_the_fewest(llama8b):
    """Every smaller part of the node misses memory; the answer fits."""
    workload = Workload(seq_len=8192, global_batch_size=64)
    cluster = make_cluster(1, 8)
    count, machine, bound = minimal_gpus(question_of(llama8b, cluster, workload, framework=TORCHTITAN, runtime=RUNTIME))

    assert machine.gpu_count == count
    assert leanest_gap(question_of(llama8b, machine, workload, framework=TORCHTITAN, runtime=RUNTIME, gpus=count)) <= 0
    for fewer in range(1, count):
        assert (
            leanest_gap(
                question_of(
                    llama8b, make_cluster(1, fewer), workload, framework=TORCHTITAN, runtime=RUNTIME, gpus=fewer
                )
            )
            > 0
        )
    assert f"fewer than {count} the sharded state alone does not fit" in bound


def test_irregular_nodes_are_those_whose_pairs_differ_without_a_switch(cluster):
    node = cluster.groups[0].node
    bridged = replace(
        node,
        links=(Link(a="gpu0", b="gpu1", kind=LinkKind.NVLINK, bytes_per_s=50e9),),
        pairs={"0-1": "NV4", "0-2": "SYS"},
    )

    assert not irregular(cluster)
    assert irregular(replace(cluster, groups=(replace(cluster.groups[0], node=bridged),)))


def test_a_gpu_nobody_knows_is_refused_not_guessed(llama8b, cluster, workload):
    """A captured topology that does not name its GPU has no rates: exit 2, with the way to name it."""
    unknown = replace(cluster, gpu_kinds=(replace(cluster.gpu_kinds[0], peak_flops={}, memory_bytes=0),))
    with pytest.raises(BadCluster, match="unknown model") as caught:
        suggest(question_of(llama8b, unknown, workload))

    assert "--gpu" in caught.value.remedy


def test_a_profile_changes_search_and_estimate_alike(llama8b):
    """On the machine it was taken on, the plan found with a profile has the step that costing every plan with it
    says.
    """
    cluster, workload = load_cluster("h200x4"), Workload(seq_len=4096, global_batch_size=16)
    profile = read_profile(ROOT / "examples" / "profiles" / "h200x4.json")
    layers = (one for one in profile.layers if one.runtime["name"] == "torchtitan" and not one.runtime["compile"])
    known = calibrated(replace(profile, layers=tuple(layers)[:8]), cluster)
    result = suggest(
        question_of(llama8b, cluster, workload, calibration=known), SearchOptions(simulate=False, top=1, bounds=NARROW)
    )
    found = enumerate_candidates(
        question_of(llama8b, cluster, workload, framework="torchtitan", runtime=RUNTIME), bounds=NARROW
    )
    table = estimate_plans(
        Scenario(model=llama8b, cluster=cluster, workload=workload, runtime=RUNTIME, calibration=known), found.plans()
    )

    # What surely fits comes first.
    best = EveryPlan(result.question, table.plans).least("time", sure=True)
    assert result.plans[0].estimate.step_s.value == pytest.approx(best, rel=1e-9)
    assert result.search.bound_s <= best * (1 + 1e-9)


def test_the_nearest_pipelines_are_the_nearest_of_all():
    """Bounds are close for so many pipelines only, of which none of the others is nearer."""
    question = replace(QUESTION, workload=replace(QUESTION.workload, global_batch_size=16))

    def nearest(count):
        nodes = enumerate_nodes(question, bounds=LIMITS)
        screened = Screened(Screening(question), nodes, question.framework.recomputes, nearly=NEAR_FIT)
        search = BestFirst(screened.screening, screened, keep=3, nearly=NEAR_FIT, nearest=count)
        near = search.with_near_pipelines(search.run())
        fields = (getattr(near.near_pipelines, name) for name in (*PIPELINE_FIELDS, "recompute"))
        which = distinct(*fields)[1]
        least = np.full(which.max() + 1, np.inf)
        np.minimum.at(least, which, near.near_bound_s)
        return np.sort(least), int(search.bounds.walked.sum())

    (few, walked), (every, all_walked) = nearest(4), nearest(None)

    assert len(every) > 4
    assert few[:4] == pytest.approx(every[:4], rel=1e-9)
    assert walked < all_walked
