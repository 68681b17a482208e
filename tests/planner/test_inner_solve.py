"""What the search for stages finds against brute force: every filling, every setting, accounted for one by one."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from planner.search.plan_space.candidates import plan_of
from planner.search.stages.options import build_pipeline, cost_blocks, stage_freedom
from planner.search.stages.solver import AssignmentBounds, least_room, solve_stages
from simulator.analytical.account import account_assignments, at_clocks
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import plan_columns
from simulator.config.model import MixtureOfExperts
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.legality.frameworks import framework_named
from simulator.pipeline.schedules.registry import SCHEDULES
from simulator.pipeline.stages import rank_of_stage
from simulator.runtimes.stated import resolve
from tests.planner.conftest import TINY, make_cluster
from topology.catalog.cluster_file import parse_cluster
from topology.rates.orders import node_orders

ANY = framework_named("any")
RUNTIMES = [resolve({"name": name})[0] for name in ("pytorch", "megatron-lm")]


def compositions(total, parts):
    """Yield every way to write `total` as `parts` whole numbers of at least one."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def bridged(gpus):
    """Return a node of `gpus` GPUs in pairs on NVLink bridges, listed so that ranks in order miss them."""
    far = gpus // 2
    bridges = [[i, i + far] for i in range(far)]
    return parse_cluster(
        {"gpu": "a6000", "gpus_per_node": gpus, "interconnect": "pcie", "bridges": bridges}, where="bridged"
    )


def settings_of(screening, plan):
    """Return columns of what all stages share: overlap modes, and orders of the GPUs where the node is irregular."""
    overlaps = ("none", "attention_in=chunked,attention_out=none,mlp_in=fused,mlp_out=none", "fused")
    orders = range(len(node_orders(screening.scenario.cluster, plan.gpus))) or (-1,)
    overlaps = overlaps[: 1 if plan.tp == 1 else 2 if len(orders) > 1 else 3]
    several = [(replace(plan, tp_overlap=overlap), order) for overlap in overlaps for order in orders]
    placing = np.array([order for _, order in several])
    return replace(plan_columns([plan for plan, _ in several]), placing=placing)


def solved(screening, columns, recomputes, framework=ANY, **limits):
    """Return what the solver makes of one pipeline in the settings of `columns`."""
    plans = [plan_of(columns, row, screening.scenario.cluster) for row in range(len(columns))]
    costs = cost_blocks(screening, plans, columns, recomputes)
    return solve_stages(screening, framework, costs, range(len(plans)), recomputes, **limits)


def room(screening, columns, recomputes, limit_bytes):
    """Return whether any assignment may fit into `limit_bytes`, asked by itself and as part of the solution."""
    plans = [plan_of(columns, row, screening.scenario.cluster) for row in range(len(columns))]
    costs = cost_blocks(screening, plans, columns, recomputes)
    asked = screening, ANY, costs, range(len(plans)), recomputes
    least = least_room(*asked, cutoff_s=float("inf"))
    for needs in costs.needs.values():  # what overlaps nothing, the first, needs least: its blocks alone show who fits
        assert (costs.needs[0, float("inf")].least_room <= needs.least_room).all()
    return least <= min(limit_bytes, screening.limit_bytes), solve_stages(*asked, limit_bytes=limit_bytes).has_room


def spread(total, stages):
    """Return `total` layers on the stages of one rank, as even as whole layers go."""
    return tuple(total // stages + (number < total % stages) for number in range(stages))


def fillings(plan, layers, recomputes):
    """Yield every way to fill the stages: layers of each rank, and modes of its stages in order."""
    ranks, stages = plan.pp, plan.virtual_stages
    mixes = list(itertools.combinations_with_replacement(recomputes, stages))
    for totals in compositions(layers - ranks * (stages - 1), ranks):
        for words in itertools.product(mixes, repeat=ranks):
            by_stage = {}
            for rank in range(ranks):
                mine = [s for s in range(ranks * stages) if rank_of_stage(s, ranks, plan.schedule) == rank]
                for stage, count, word in zip(
                    mine, spread(totals[rank] + stages - 1, stages), words[rank], strict=True
                ):
                    by_stage[stage] = count, word
            order = [by_stage[stage] for stage in range(ranks * stages)]
            yield replace(
                plan, layers_per_stage=tuple(c for c, _ in order), recompute_per_stage=tuple(w for _, w in order)
            )


def brute_force(screening, columns, recomputes):
    """Return the least step over everything that stages could hold in every setting, infinite if nothing fits."""
    s = screening
    settings = [plan_of(columns, row, s.scenario.cluster) for row in range(len(columns))]
    plans = [
        replace(filled, tp_overlap=given.tp_overlap, placement=given.placement)
        for filled in fillings(settings[0], s.scenario.model.layers, recomputes)
        for given in settings
    ]
    with np.errstate(invalid="ignore"):  # what cannot run here takes for ever, and for ever less for ever is no number
        table = estimate_plans(s.scenario, plans)
    step_s = table.step_s - table.breakdown_s["allocator"]  # which stages are not chosen by
    return float(np.where(table.fits & np.isfinite(step_s), step_s, np.inf).min())


def draw(seed):
    """Return a small pipeline: odd numbers of layers, heavy or light ends, memory that sometimes binds."""
    rng = random.Random(seed)
    schedule = rng.choice(["1F1B", "GPipe", *SCHEDULES])
    virtual = 2 if SCHEDULES[schedule].least_stages > 1 else 1
    pp = rng.choice([2, 3, 3, 4] if virtual == 1 else [2, 2, 2, 3])
    layers = pp * virtual + rng.randint(0, 1 if pp * virtual > 4 else 2)
    model = replace(
        TINY,
        layers=layers,
        hidden=rng.choice([512, 2048, 4096]),
        ffn=rng.choice([1536, 8192]),
        vocab=rng.choice([1000, 32000, 256000]),
        moe=MixtureOfExperts(experts=4, experts_per_token=2, ffn=512, dense_layers=rng.randint(0, min(pp, 3)))
        if rng.random() < 0.4
        else None,
    )
    model = replace(model, head_dim=model.hidden // model.heads)
    tp = rng.choice([1, 2])
    plan = Plan(
        dp_shard=rng.choice([1, 2]),
        tp=tp,
        sequence_parallel=tp > 1,
        pp=pp,
        virtual_stages=virtual,
        schedule=schedule,
        micro_batch_size=rng.choice([1, 2]),
    )
    batch = plan.dp_shard * 2 * pp * virtual * rng.choice([1, 3])
    workload = Workload(seq_len=rng.choice([512, 2048]), global_batch_size=batch)
    gib = rng.choice([2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 24.0, 80.0])
    if plan.gpus in {4, 8} and rng.random() < 0.7:
        cluster = bridged(plan.gpus)
        cluster = replace(
            cluster, gpu_kinds=tuple(replace(kind, memory_bytes=int(gib * 2**30)) for kind in cluster.gpu_kinds)
        )
    else:
        cluster = make_cluster(2, 8, memory_gib=gib, nvlink=rng.random() < 0.7)
    return Screening(Scenario(model=model, cluster=cluster, workload=workload, runtime=rng.choice(RUNTIMES))), plan


# A pipeline of every schedule, dense and MoE, on bridged pairs, switches and PCIe, with up to 54 fillings.
FEW_FILLINGS = (1, 3, 6, 7, 9, 15, 18, 22, 24, 35, 52, 71, 77, 93)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [FEW_FILLINGS, *(pytest.param(range(n, n + 6), marks=pytest.mark.nightly) for n in (0, 6))]
)
def test_the_stages_found_are_the_best_there_are(seeds):
    """Pipelines of several schedules, up to 16 GPUs, some of them on bridged pairs.

    Layers, recomputation, overlap modes and the order of the GPUs together. Where nothing fits, the solver says so;
    nothing is below the bound.
    """
    answered, rooms = 0, set()
    for seed in seeds:
        screening, plan = draw(seed)
        recomputes = ("none", "full")
        columns = settings_of(screening, plan)
        least = brute_force(screening, columns, recomputes)
        found = solved(screening, columns, recomputes)

        assert found.step_s == pytest.approx(least, rel=1e-9), (seed, plan, found)
        assert found.bound_s <= least * (1 + 1e-12), (seed, plan, found)
        answered += np.isfinite(least)
        for gib in (0.5, 2.0, 4.0, np.inf):
            alone, solution = room(screening, columns, recomputes, gib * 2**30)
            assert alone == solution, (seed, plan, gib)
            rooms.add(alone)
        assert alone or not np.isfinite(least)  # what brute force fits has room
    assert answered >= 2
    assert rooms == {False, True}


def test_no_step_is_shorter_than_a_rank_is_busy() -> None:
    """Quicker kernels, some of them run again: hosts hold up the rounds that are walked more than the others."""
    screening, plan = draw(48)
    roomy = replace(screening.scenario.cluster.gpu_kinds[0], memory_bytes=1 << 40)
    cluster = replace(screening.scenario.cluster, gpu_kinds=(roomy,))
    screening = Screening(replace(screening.scenario, cluster=cluster))
    costs = cost_blocks(screening, [plan], plan_columns([plan]), ("none", "full"))
    freedom = stage_freedom(ANY, plan, screening.scenario.model, ("none", "full"))
    pipeline = build_pipeline(screening, costs, 0, freedom, float("inf"))
    every, _ = AssignmentBounds(pipeline).below(float("inf"), 48)
    plans = [pipeline.accounted(pipeline.plan_with(pipeline.options.take(rows))) for rows in every]
    parts = account_assignments(at_clocks(replace(pipeline.inputs, at=np.array([0.87]))), plans).parts_s

    assert {stages for one in plans for stages in one.recompute_per_stage} == {"none", "full"}
    assert (parts["host"] >= 0.0).all()
    assert (parts["bubble"] >= -1e-12).all()


@pytest.mark.parametrize("seed", range(40, 56))
def test_no_assignment_is_quicker_than_its_bound_and_many_are_accounted_for_as_one_is(seed):
    """Up to 48 assignments of each pipeline, whether they fit or not."""
    screening, plan = draw(seed)
    roomy = replace(screening.scenario.cluster.gpu_kinds[0], memory_bytes=1 << 40)
    cluster = replace(screening.scenario.cluster, gpu_kinds=(roomy,))
    screening = Screening(replace(screening.scenario, cluster=cluster))
    columns = plan_columns([plan])
    costs = cost_blocks(screening, [plan], columns, ("none", "full"))
    freedom = stage_freedom(ANY, plan, screening.scenario.model, ("none", "full"))
    pipeline = build_pipeline(screening, costs, 0, freedom, float("inf"))
    bounds = AssignmentBounds(pipeline)
    every, _ = bounds.below(float("inf"), 48)
    plans = [pipeline.plan_with(pipeline.options.take(rows)) for rows in every]
    accounted, known = [pipeline.accounted(one) for one in plans], {}
    inputs = at_clocks(pipeline.inputs)
    step_s = account_assignments(inputs, accounted).total_s
    in_turn = [account_assignments(inputs, accounted[start::2], known).total_s for start in (0, 1)]
    bound_s = np.array([bounds.bound_s(rows) for rows in every])
    alone = estimate_plans(screening.scenario, plans[-2:])
    least = bounds.least(float("inf"))

    assert (bound_s <= step_s * (1 + 1e-12)).all()
    assert [each.tolist() for each in in_turn] == [step_s[start::2].tolist() for start in (0, 1)]
    assert least is None or least[0] <= bound_s.min() * (1 + 1e-12)
    np.testing.assert_allclose(step_s[-2:], alone.step_s - alone.breakdown_s["allocator"], rtol=1e-12)


def test_a_framework_that_cannot_tell_stages_apart_keeps_its_plan():
    screening, plan = draw(1)
    plain = replace(ANY, lists_layers=False, lists_recompute=False)

    assert solved(screening, plan_columns([plan]), ("none", "full"), plain, cutoff_s=1.0).plan is None


def test_only_the_stages_that_need_it_recompute():
    """The first rank of 1F1B holds most micro batches: when memory binds, it alone recomputes."""
    model = replace(TINY, layers=8, hidden=2048, head_dim=256, ffn=8192, vocab=1000)
    plan = Plan(pp=4, schedule="1F1B")
    workload = Workload(seq_len=4096, global_batch_size=32)

    def words(gib):
        cluster = make_cluster(1, 4, memory_gib=gib)
        screening = Screening(Scenario(model=model, cluster=cluster, workload=workload, runtime=RUNTIMES[0]))
        found = solved(screening, plan_columns([plan]), ("none", "full")).plan
        return () if found is None else found.recompute_per_stage or (found.recompute,) * 4

    mixed = next(w for gib in np.arange(4.0, 24.0, 0.25) if len(set(w := words(gib))) == 2)
    assert mixed == tuple(sorted(mixed))  # full before none


def test_the_same_pipeline_has_the_same_filling_every_time():
    """Ties between equal ranks included."""
    model = replace(TINY, layers=22, hidden=2048, head_dim=256, ffn=8192, vocab=128000)
    screening = Screening(
        Scenario(
            model=model,
            cluster=make_cluster(1, 8),
            workload=Workload(seq_len=2048, global_batch_size=64),
            runtime=RUNTIMES[0],
        )
    )
    columns = plan_columns([Plan(pp=8, schedule="1F1B")])
    first, second = (solved(screening, columns, ("none", "full")) for _ in range(2))

    assert first.plan is not None
    assert first == second
    assert first.bound_s <= first.step_s <= 1.02 * first.bound_s


def test_layers_stay_where_the_runtime_puts_them_when_dense_ones_lie_between_sparse_ones() -> None:
    """What a stage costs then depends on which layers it holds: a solver that counts them would cost another
    network.
    """
    moe = MixtureOfExperts(experts=4, experts_per_token=2, ffn=512, dense_layers=2, dense_layer_ids=(0, 2))
    mixed = replace(TINY, moe=moe)
    leading = replace(TINY, moe=replace(moe, dense_layer_ids=(0, 1)))
    framework = framework_named("meshwright")

    assert not stage_freedom(framework, Plan(pp=2), mixed, ("none", "full")).layers
    assert stage_freedom(framework, Plan(pp=2), leading, ("none", "full")).layers


def test_stages_of_a_schedule_that_splits_the_backward_pass_recompute_nothing_in_torch():
    plan = Plan(pp=2, virtual_stages=2, schedule="ZBVZeroBubble")
    whole = plan.with_(schedule="Interleaved1F1B")
    modes = [stage_freedom(framework_named("pytorch"), one, TINY, ("none", "full")).modes for one in (plan, whole)]

    assert modes == [("none",), ("none", "full")]
