"""How many plans are costed at once is no part of the question: small random ones have one answer, pipelines filled."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import event, given, settings

from planner.question.question import question_of
from planner.search.plan_space import branch_and_bound, screened
from planner.search.plan_space.candidates import Bounds
from planner.search.search import SearchOptions, suggest
from simulator.config.workload import Workload
from simulator.legality.frameworks import FRAMEWORKS
from tests.planner.conftest import TINY, make_cluster
from topology import codec
from topology.errors import Infeasible

EVERYTHING = 10**6
CHUNKS = st.fixed_dictionaries({name: st.sampled_from((1, 7, 64, EVERYTHING)) for name in ("FIRST_PLANS",)})
WIDEST = st.sampled_from((64, 512, EVERYTHING))  # of which later rounds cost an eighth at once


@st.composite
def questions(draw):
    """Draw a question whose answer often has pipelines with stages of their own: slow links, few layers, a wide
    head.
    """
    model = replace(
        TINY,
        layers=draw(st.integers(5, 8)),
        hidden=draw(st.sampled_from((1024, 2048))),
        heads=16,
        ffn=4096,
        vocab=draw(st.sampled_from((32_000, 128_256))),
    )
    cluster = make_cluster(1, 4, nvlink=False, memory_gib=draw(st.sampled_from((6, 8, 12, 24, 80))))
    workload = Workload(seq_len=draw(st.sampled_from((1024, 4096))), global_batch_size=draw(st.sampled_from((8, 16))))
    framework = FRAMEWORKS[draw(st.sampled_from(("torchtitan", "pytorch", "megatron-lm", "any")))]
    bounds = Bounds(max_tp=draw(st.sampled_from((1, 2))), max_cp=1, max_micro_batch=2, odd_virtual_stages=True)
    return model, cluster, workload, framework, bounds


def answer(question, **options):
    """Return the answer as text, without how long it took: plans, their order and values, and the account."""
    model, cluster, workload, framework, bounds = question
    try:
        result = suggest(
            question_of(model, cluster, workload, framework=framework),
            SearchOptions(bounds=bounds, simulate=False, **options),
        )
    except Infeasible as error:
        return str(error), False
    filled = any(ranked.plan.layers_per_stage or ranked.plan.recompute_per_stage for ranked in result.plans)
    return codec.to_json(replace(result, search=replace(result.search, seconds=0.0))), filled


@pytest.mark.nightly  # one question is in test_search.py
@settings(max_examples=40, deadline=None)
@given(
    question=questions(),
    objective=st.sampled_from(("time", "time", "time", "memory", "pareto")),
    top=st.integers(1, 6),
    all_variants=st.booleans(),
    chunks=CHUNKS,
    nodes=st.sampled_from((1, 7, 64, EVERYTHING)),
    widest=WIDEST,
)
def test_no_chunk_changes_any_answer(question, objective, top, all_variants, chunks, nodes, widest):
    options = {"objective": objective, "top": top, "all_variants": all_variants}
    whole, filled = answer(question, **options)
    with (
        patch.multiple(screened, PLANS_AT_ONCE=widest, NODES_AT_ONCE=nodes),
        patch.multiple(branch_and_bound, PLANS_AT_ONCE=widest, **chunks),
    ):
        parts, _ = answer(question, **options)
    event("with stages filled" if filled else "as the runtime splits them")

    assert parts == whole
