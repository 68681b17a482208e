"""Programs with pipeline stages: the order of 1F1B, and cuts by time against all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.sharding.backends.pipeline_order import turns
from planner.sharding.backends.works import Work
from planner.sharding.frontends.stage_cuts import cut_by_time, evenly, lean_cuts, neighbours
from planner.sharding.layouts.mesh import make_mesh
from planner.sharding.operators.graph import GraphBuilder
from planner.sharding.operators.work import backward_s, operator_work
from planner.sharding.problem.problem import Machine
from planner.sharding.solver.pricing import TimePricing
from simulator.sharded.program import Exchange, Kernel
from topology.catalog.cluster_file import load_cluster


def pipeline(stages, batches):
    """Forward and backward works of every micro batch on every stage, with messages between."""
    works = []
    for batch in range(batches):
        for stage in range(stages):
            name = f"{stage}[{batch}]"
            works.append(Work(do=Kernel(op="f"), reads=(), writes=(name,), stage=stage, micro_batch=batch))
            if stage + 1 < stages:
                do = Exchange(kind="send_recv", axes=("pp",), stages=(stage, stage + 1))
                works.append(Work(do=do, reads=(name,), writes=(f"{name}@",), stage=stage, micro_batch=batch))
    forward = len(works)
    for batch in range(batches):
        works += [
            Work(do=Kernel(op="b"), reads=(), writes=(f"{stage}[{batch}].g",), stage=stage, micro_batch=batch)
            for stage in reversed(range(stages))
        ]
    return works, forward


@given(st.integers(1, 5), st.integers(1, 7))
def test_a_stage_holds_no_more_micro_batches_than_stages_follow_it_and_one(stages, batches) -> None:
    works, forward = pipeline(stages, batches)
    order = turns(works, forward, stages, batches)

    for stage in range(stages):
        mine = [t.work for t in order if t.stage == stage and isinstance(t.work.do, Kernel)]
        held, most = 0, 0
        for work in mine:
            held += 1 if work.do.op == "f" else -1
            most = max(most, held)
        assert most == min(batches, stages - stage)
        for op in "fb":
            assert [w.micro_batch for w in mine if w.do.op == op] == list(range(batches))
    both_ends = [t for t in order if isinstance(t.work.do, Exchange)]
    assert len(both_ends) == 2 * batches * (stages - 1)  # each is sent, and received


def test_the_second_of_three_stages_goes_backward_after_two_forward() -> None:
    works, forward = pipeline(3, 4)
    order = [t.work for t in turns(works, forward, 3, 4) if t.stage == 1 and isinstance(t.work.do, Kernel)]

    assert [f"{w.do.op}{w.micro_batch}" for w in order] == ["f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3"]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([64, 512, 2048, 8192]), min_size=3, max_size=6), st.integers(2, 3))
def test_the_slowest_stage_is_as_fast_as_in_the_best_of_all_cuts(widths, count) -> None:
    builder = GraphBuilder({})
    builder.add_input("x", [4096, 1024], "bf16")
    previous = "x"
    for n, width in enumerate(widths):
        builder.add_input(f"u{n}", [1024, width], "bf16", parameter=True)
        builder.add_input(f"d{n}", [width, 1024], "bf16", parameter=True)
        builder.apply(f"h{n} = relu({previous} @ u{n})")
        builder.apply(f"y{n} = h{n} @ d{n}")
        previous = f"y{n}"
    graph = builder.build()
    mesh, machine = make_mesh(["pp"], [count]), Machine(load_cluster("h200x4"))
    pricing = TimePricing(machine, mesh)

    def seconds(operator):
        work = operator_work(operator, graph.tensors, {a: np.array([float(n)]) for a, n in operator.sizes.items()})
        roofline = pricing.roofline("bf16")
        return 0.0 if operator.is_view else float((roofline.seconds(work) + backward_s(work, 2, roofline)).item())

    cuts = lean_cuts(graph.operators, graph.tensors, graph.parameters)

    def message(at):
        return 2 * float(pricing.seconds("send_recv", ("pp",), np.array([cuts[at]]))[0]) if at in cuts else 0.0

    def slowest(places):
        ends = pairwise([0, *places, len(graph.operators)])
        return max(sum(map(seconds, graph.operators[a:b])) + message(b) for a, b in ends)

    found = cut_by_time(graph.operators, graph.tensors, graph.parameters, count, "pp", mesh, machine)
    best = min(slowest(places) for places in combinations(sorted(cuts), count - 1))
    own = [at for at in range(1, len(found)) if found[at] != found[at - 1]]

    assert set(own) <= set(cuts)
    assert len(own) == count - 1
    assert slowest(own) == pytest.approx(best)
    assert max(evenly(len(graph.operators), count, cuts)) == count - 1
    assert all(sorted(set(one)) == list(range(count)) for one in neighbours(found, cuts))
