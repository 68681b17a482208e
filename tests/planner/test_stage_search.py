"""Layers and recomputation by stage against brute force: every composition, every mode, the same closed form."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from planner.costs import cost_table
from planner.frameworks import framework_named
from planner.stage_search import LOOPED, best_stages
from simulator.model import MixtureOfExperts
from simulator.plan import Plan
from simulator.runtime_library import resolve
from simulator.screening import Screening
from simulator.workload import Workload
from tests.planner.conftest import TINY, make_cluster

ANY = framework_named("any")
RUNTIMES = [resolve({"name": name})[0] for name in ("pytorch", "megatron-lm")]


def compositions(total, parts):
    """Yield every way to write `total` as `parts` whole numbers of at least one."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def brute_force(screening, plan, recomputes):
    """Return the least step over everything that the stages of `plan` could hold, infinite if nothing fits."""
    if plan.schedule in LOOPED:
        splits = [()]
        ranks = plan.pp
    else:
        splits = list(compositions(screening.model.layers, plan.pp))
        ranks = plan.pp
    plans = [
        replace(plan, layers_per_stage=layers, recompute_per_stage=words * plan.virtual_stages)
        for layers in splits
        for words in itertools.product(recomputes, repeat=ranks)
    ]
    s = screening
    table = cost_table(s.model, s.cluster, s.workload, plans, s.runtime)
    return float(np.where(table.fits, table.step_s, np.inf).min())


def draw(seed):
    """Return a small pipeline: odd numbers of layers, heavy or light ends, memory that sometimes binds."""
    rng = random.Random(seed)
    schedule = rng.choice(["1F1B", "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"])
    looped = schedule in LOOPED
    pp, virtual = rng.choice([2, 3, 4]), 2 if looped else 1
    layers = rng.randint(pp * virtual, pp * virtual + 3)
    model = replace(
        TINY,
        layers=layers,
        hidden=rng.choice([512, 2048, 4096]),
        ffn=rng.choice([1536, 8192]),
        vocab=rng.choice([1000, 32000, 256000]),
        moe=MixtureOfExperts(experts=4, experts_per_token=2, ffn=512, dense_layers=rng.randint(0, 2))
        if rng.random() < 0.3
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
    cluster = make_cluster(rng.choice([1, 2]), 16, memory_gib=gib, nvlink=rng.random() < 0.7)
    return Screening(model=model, cluster=cluster, workload=workload, runtime=rng.choice(RUNTIMES)), plan


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_the_stages_found_are_the_best_there_are(block):
    """Two hundred pipelines; where none fits with the runtime's own split, what is found is compared all the same."""
    solved = 0
    for seed in range(block * 20, block * 20 + 20):
        screening, plan = draw(seed)
        recomputes = ("none", "full")
        least = brute_force(screening, plan, recomputes)
        found, step = best_stages(screening, ANY, plan, float("inf"), recomputes)

        assert step == pytest.approx(least, rel=1e-12), (seed, plan, found)
        solved += np.isfinite(least)
    assert solved >= 8


def test_a_framework_that_cannot_tell_stages_apart_keeps_its_plan():
    screening, plan = draw(1)
    plain = replace(ANY, lists_layers=False, lists_recompute=False)

    assert best_stages(screening, plain, plan, 1.0, ("none", "full")) == (plan, 1.0)


def test_only_the_stages_that_need_it_recompute():
    """The first rank of 1F1B holds most micro batches: when memory binds, it alone recomputes."""
    model = replace(TINY, layers=8, hidden=2048, head_dim=256, ffn=8192, vocab=1000)
    plan = Plan(pp=4, schedule="1F1B")
    workload = Workload(seq_len=4096, global_batch_size=32)

    def words(gib):
        cluster = make_cluster(1, 4, memory_gib=gib)
        screening = Screening(model=model, cluster=cluster, workload=workload, runtime=RUNTIMES[0])
        found, _ = best_stages(screening, ANY, plan, float("inf"), ("none", "full"))
        return found.recompute_per_stage or (found.recompute,) * 4

    mixed = next(w for gib in np.arange(4.0, 24.0, 0.25) if len(set(w := words(gib))) == 2)
    assert mixed == tuple(sorted(mixed))  # full before none
