"""Small questions, answered by the search and by costing every legal plan: the same optimum, a true bound.

Up to 16 GPUs; layers that do not divide into stages, memory that binds, one node or two, a switch, bridged pairs, or
nothing but PCIe; dense and MoE; every framework; one plan a grid or all of them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from planner.question.question import default_runtime, question_of
from planner.search.plan_space.branch_and_bound import BestFirst
from planner.search.plan_space.candidates import Bounds, enumerate_nodes
from planner.search.plan_space.screened import Screened
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.bounds.screening import Screening
from simulator.config.model import MixtureOfExperts
from simulator.config.workload import Workload
from simulator.legality.frameworks import FRAMEWORKS
from tests.planner.conftest import TINY, make_cluster
from tests.planner.every_plan import enumerate_candidates
from topology.catalog.cluster_file import load_cluster
from topology.codec import to_json

MOST_BOUNDED = 60  # plans of a question whose bounds are checked
# Draws of every framework, dense and MoE, one node and two, on a switch, pairs and PCIe, that have up to 400 plans.
FEW_PLANS = (4, 5, 15, 18, 24, 31, 38, 48)
NAMES = ("torchtitan", "megatron-lm", "any", "pytorch", "llm-foundry")


@cache
def bridged(gpus, folder):
    """Return a node whose GPUs are joined in pairs by NVLink bridges, and to the others by PCIe."""
    path = folder / f"pairs{gpus}.json"
    bridges = [[i, i + 1] for i in range(0, gpus - 1, 2)]
    path.write_text(to_json({"gpu": "a6000", "gpus_per_node": gpus, "interconnect": "pcie", "bridges": bridges}))
    return load_cluster(str(path))


def draw(seed, folder):
    rng = random.Random(seed)
    layers = rng.choice([3, 5, 6, 7, 10])
    moe = MixtureOfExperts(experts=rng.choice([4, 6]), experts_per_token=2, ffn=512, dense_layers=rng.randint(0, 1))
    model = replace(
        TINY,
        layers=layers,
        hidden=rng.choice([512, 1536, 4096]),
        heads=rng.choice([4, 6, 12]),
        kv_heads=2,
        head_dim=128,
        ffn=rng.choice([1536, 6144]),
        vocab=rng.choice([1000, 50257]),
        moe=moe if rng.random() < 0.25 else None,
    )
    gpus = rng.choice([1, 2, 3, 4, 6, 8, 12, 16])
    kind = rng.choice(["switch", "switch", "pcie", "pairs"])
    if kind == "pairs" and gpus <= 8:
        cluster = bridged(gpus, folder)
    elif gpus % 2 == 0 and rng.random() < 0.4:
        cluster = make_cluster(2, gpus // 2, nvlink=kind == "switch", network=rng.choice([5e9, 50e9]))
    else:
        cluster = make_cluster(1, gpus, nvlink=kind == "switch")
    gib = rng.choice([4, 6, 8, 16, 48])
    cluster = replace(cluster, gpu_kinds=tuple(replace(k, memory_bytes=gib << 30) for k in cluster.gpu_kinds))
    workload = Workload(seq_len=rng.choice([512, 1536, 4096]), global_batch_size=rng.choice([8, 12, 24]))
    framework = FRAMEWORKS[rng.choice(NAMES)]
    runtime = replace(default_runtime(framework), compile=rng.random() < 0.3)
    bounds = Bounds(max_micro_batch=rng.choice([2, 4]), min_tokens_per_context_rank=128, odd_virtual_stages=True)
    return model, cluster, workload, framework, runtime, gpus, bounds


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [FEW_PLANS, *(pytest.param(range(n, n + 10), marks=pytest.mark.nightly) for n in range(0, 60, 10))]
)
def test_the_search_finds_what_brute_force_finds(seeds, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    answered = 0
    for seed in seeds:
        model, cluster, workload, framework, runtime, gpus, bounds = draw(seed, folder)
        question = question_of(model, cluster, workload, framework=framework, runtime=runtime, gpus=gpus)
        everything = enumerate_candidates(question, bounds=bounds).plans()
        nodes = enumerate_nodes(question, bounds=bounds)
        assert len(everything) == nodes.leaf_counts.sum()
        if not everything:
            continue
        with np.errstate(invalid="ignore"):
            table = estimate_plans(
                Scenario(model=model, cluster=cluster, workload=workload, runtime=runtime), everything
            )
        step = np.where(table.fits & np.isfinite(table.step_s), table.step_s, np.inf)
        memory = np.where(np.isfinite(step), table.reserved_bytes, np.inf)
        screening = Screening(Scenario(model=model, cluster=cluster, workload=workload, runtime=runtime))
        for objective, values in (("time", step), ("memory", memory)):
            keep = 1 + seed % 3
            screened = Screened(screening, nodes, framework.recomputes)
            found = BestFirst(screening, screened, objective=objective, keep=keep, one_per_grid=seed % 2 == 0).run()
            if not np.isfinite(values).any():
                assert len(found) == 0
                continue
            mine = found.step_s if objective == "time" else found.reserved_bytes

            assert found.complete
            assert mine.min() == pytest.approx(values.min(), rel=1e-12), seed
            assert found.bound <= values.min() * (1 + 1e-12)
            if seed % 2:  # variants too: not only the first, but the next best as well
                listed = min(keep, int(np.isfinite(values).sum()))
                assert np.sort(mine)[:listed] == pytest.approx(np.sort(values)[:listed], rel=1e-12), seed
            answered += 1
    assert answered >= 10


@pytest.mark.parametrize(
    "seeds", [FEW_PLANS, pytest.param((29, 37, *range(100, 106)), marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_what_bounds_the_step_is_never_above_it(seeds, tmp_path):
    """Both bounds of the step, and memory where schedules are not counted."""
    for seed in seeds:
        model, cluster, workload, framework, runtime, gpus, bounds = draw(seed, tmp_path)
        found = enumerate_candidates(
            question_of(model, cluster, workload, framework=framework, runtime=runtime, gpus=gpus), bounds=bounds
        ).columns
        if not len(found):
            continue
        drawn = np.random.default_rng(seed).permutation(len(found))[:MOST_BOUNDED]
        found = found.take(np.sort(drawn))
        screening = Screening(Scenario(model=model, cluster=cluster, workload=workload, runtime=runtime))
        shared = screening.blocks(found, framework.recomputes)
        plans = screening.plans(found, shared, np.arange(len(found)))
        least = plans.allocated_and_reserved_bytes()

        for row in np.random.default_rng(seed).integers(len(found), size=3):  # the same alone as among others
            alone = screening.plans(found.take([row]), shared, np.array([row]))
            assert alone.step_s()[0] == pytest.approx(plans.step_s()[row], rel=1e-9)
            assert alone.at_least_by_schedule_s()[0] >= plans.at_least_by_schedule_s()[row] * (1 - 1e-12)
        assert (plans.at_least_s() <= plans.step_s() * (1 + 1e-12)).all()
        assert (plans.at_least_by_schedule_s() <= plans.step_s() * (1 + 1e-12)).all()
        lean = screening.plans(
            replace(found, recompute=np.full(len(found), "none")),
            shared.keeping_least(screening.operators.spec.recompute),
            np.arange(len(found)),
        )
        assert (lean.allocated_and_reserved_bytes() <= least * (1 + 1e-12)).all()
