"""What CP-SAT decides inside a pipeline against brute force: every filling, every setting, the same closed form."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from planner.costs import cost_table
from planner.frameworks import SCHEDULES, framework_named
from planner.inner_solve import solve
from planner.stage_options import priced
from simulator.model import MixtureOfExperts
from simulator.plan import Plan
from simulator.plan_columns import plan_columns
from simulator.runtime_library import resolve
from simulator.screening import Screening
from simulator.stages import rank_of_stage
from simulator.workload import Workload
from tests.planner.conftest import TINY, make_cluster

ANY = framework_named("any")
RUNTIMES = [resolve({"name": name})[0] for name in ("pytorch", "megatron-lm")]


def compositions(total, parts):
    """Yield every way to write `total` as `parts` whole numbers of at least one."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def solved(screening, plan, recomputes, framework=ANY, **limits):
    """Return what the solver makes of one plan."""
    costs = priced(screening, [plan], plan_columns([plan]), recomputes)
    return solve(screening, framework, costs, [0], recomputes, **limits)


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


def brute_force(screening, plan, recomputes):
    """Return the least step over everything that the stages of `plan` could hold, infinite if nothing fits."""
    s = screening
    plans = list(fillings(plan, s.model.layers, recomputes))
    table = cost_table(s.model, s.cluster, s.workload, plans, s.runtime)
    return float(np.where(table.fits, table.step_s, np.inf).min())


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
    workload = Workload(seq_len=rng.choice([512, 2048]), global_batch_size=plan.dp_shard * 2 * pp * rng.choice([1, 3]))
    gib = rng.choice([2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 24.0, 80.0])
    cluster = make_cluster(2, 8, memory_gib=gib, nvlink=rng.random() < 0.7)
    return Screening(model=model, cluster=cluster, workload=workload, runtime=rng.choice(RUNTIMES)), plan


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_the_stages_found_are_the_best_there_are(block):
    """Two hundred pipelines of every schedule; where none fits, the solver says so; nothing is below the bound."""
    answered = 0
    for seed in range(block * 20, block * 20 + 20):
        screening, plan = draw(seed)
        recomputes = ("none", "full")
        least = brute_force(screening, plan, recomputes)
        found = solved(screening, plan, recomputes)

        assert found.step_s == pytest.approx(least, rel=1e-9), (seed, plan, found)
        assert found.bound_s <= least, (seed, plan, found)
        answered += np.isfinite(least)
    assert answered >= 8


def test_a_framework_that_cannot_tell_stages_apart_keeps_its_plan():
    screening, plan = draw(1)
    plain = replace(ANY, lists_layers=False, lists_recompute=False)

    assert solved(screening, plan, ("none", "full"), plain, cutoff_s=1.0).plan is None


def test_only_the_stages_that_need_it_recompute():
    """The first rank of 1F1B holds most micro batches: when memory binds, it alone recomputes."""
    model = replace(TINY, layers=8, hidden=2048, head_dim=256, ffn=8192, vocab=1000)
    plan = Plan(pp=4, schedule="1F1B")
    workload = Workload(seq_len=4096, global_batch_size=32)

    def words(gib):
        cluster = make_cluster(1, 4, memory_gib=gib)
        screening = Screening(model=model, cluster=cluster, workload=workload, runtime=RUNTIMES[0])
        found = solved(screening, plan, ("none", "full")).plan
        return () if found is None else found.recompute_per_stage or (found.recompute,) * 4

    mixed = next(w for gib in np.arange(4.0, 24.0, 0.25) if len(set(w := words(gib))) == 2)
    assert mixed == tuple(sorted(mixed))  # full before none
