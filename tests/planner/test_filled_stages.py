"""Pipelines whose stages are filled: what fits only so is found, and more memory never makes the answer worse."""

from __future__ import annotations

import pytest

from planner.question.question import question_of
from planner.search.plan_space.candidates import Bounds
from planner.search.search import SearchOptions, suggest
from simulator.config.workload import Workload
from tests.planner.conftest import make_cluster
from topology.errors import Infeasible

WORKLOAD = Workload(seq_len=8192, global_batch_size=8)
ONLY_PIPELINES = Bounds(max_tp=1, max_cp=1, max_micro_batch=1)


def answer(model, gib):
    return suggest(
        question_of(model, make_cluster(1, 4, memory_gib=gib), WORKLOAD, framework="megatron-lm"),
        SearchOptions(simulate=False, bounds=ONLY_PIPELINES, top=1),
    )


def test_what_fits_only_with_uneven_layers_is_found(llama8b):
    """Llama-3 8B on four GPUs: as Megatron-LM splits it the leanest plan needs 46 GiB, with the ends relieved 41."""
    with pytest.raises(Infeasible):
        answer(llama8b, 38.0)
    tight = answer(llama8b, 43.0)
    best = tight.plans[0]

    assert len(set(best.plan.layers_per_stage)) > 1
    assert sum(best.plan.layers_per_stage) == llama8b.layers
    assert best.estimate.memory.fits
    assert not [problem for problem in best.problems if problem.grade == "illegal"]
    assert tight.search.status == "best of the pipelines tried"
    assert tight.search.bound_s <= best.estimate.step_s.value


def test_more_memory_never_makes_the_answer_worse(llama8b):
    """Of plans that surely fit, through the size at which the runtime's own split begins to, at 48 GiB."""
    found = [answer(llama8b, gib).plans[0].estimate for gib in (46.0, 48.0, 60.0)]
    steps = [one.step_s.value for one in found]

    assert {one.memory.fit for one in found} == {"yes"}
    assert steps == sorted(steps, reverse=True)
