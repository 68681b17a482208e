"""Programs with pipeline stages: the order of 1F1B, and cuts by time against all cuts."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.sharding.answer import answer_request
from planner.sharding.backends.pipeline_order import turns
from planner.sharding.backends.runnable import simulate_program
from planner.sharding.backends.works import Work
from planner.sharding.frontends.stages import cut_by_time, evenly, lean_cuts, neighbours
from planner.sharding.layouts.layout import make_mesh
from planner.sharding.operators.graph import GraphBuilder
from planner.sharding.operators.work import backward_s, operator_work
from planner.sharding.problem.problem import Machine
from planner.sharding.solver.pricing import TimePricing
from simulator.program.program import Recv, Send
from simulator.sharded.program import Exchange, Kernel
from tests.simulator.program_check import check_runnable
from topology.catalog.cluster_file import load_cluster

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "sharding" / "captured.json"


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


def layers(widths, tokens=8192, embed=2048):
    """A captured graph of layers with hidden widths of their own, as a request on stages that are not stated."""
    inputs = [{"name": "x", "shape": [tokens, embed], "dtype": "bf16", "kind": "input", "target": ""}]
    nodes, previous = [], "x"
    for n, width in enumerate(widths):
        for side, shape, op in (("u", [width, embed], "linear"), ("d", [embed, width], "linear")):
            weight = f"w{side}{n}"
            inputs.append({"name": weight, "shape": shape, "dtype": "bf16", "kind": "parameter", "target": weight})
            args = [{"tensor": previous}, {"tensor": weight}]
            previous = f"{side}_{n}"
            node = {"name": previous, "op": f"aten.{op}.default", "args": args, "shape": [tokens, shape[0]]}
            nodes.append({**node, "dtype": "bf16"})
    graph = {"inputs": inputs, "nodes": nodes, "outputs": [previous]}
    return {"graph": {**json.loads(EXAMPLE.read_text())["graph"], **graph}, "backward": True}


@settings(max_examples=3, deadline=None)
@given(st.lists(st.sampled_from([512, 2048, 8192, 16384]), min_size=3, max_size=4), st.sampled_from(["1f1b", "gpipe"]))
def test_stages_cut_by_time_are_never_slower_than_even_ones(widths, schedule) -> None:
    machine = load_cluster("h200x4")
    stages = {"axis": "pp", "micro_batches": 4, "schedule": schedule}
    asked = {**layers(widths), "mesh": {"names": ["pp"], "shape": [2]}}
    chosen = answer_request({**asked, "stages": stages}, where="by time", cluster=machine)
    graph = chosen.problem.graph
    cuts = lean_cuts(graph.operators, graph.tensors, graph.parameters)
    even = evenly(len(graph.operators), 2, cuts)
    of = {operator.result.name: stage for operator, stage in zip(graph.operators, even, strict=True)}
    stated = answer_request({**asked, "stages": {**stages, "of": of}}, where="evenly", cluster=machine)

    seconds = [simulate_program(one.written, one.problem, machine).step_s for one in (chosen, stated)]
    assert seconds[0] <= seconds[1]
    assert check_runnable(chosen.written.program) == []


@pytest.mark.parametrize(
    ("stages", "inside", "schedule"), [(2, 2, "1f1b"), (3, 1, "1f1b"), (4, 2, "1f1b"), (3, 2, "gpipe")]
)
def test_messages_need_no_tags_and_no_room(stages, inside, schedule) -> None:
    """NCCL matches messages of two ranks by their order, and a message has left when it is received.

    `check` carries programs out so: a stream's message is over when both ends have come to it, and the next one waits.
    """
    widths = [2048, 1024] * stages
    of = {f"u_{2 * n}": n for n in range(stages)}
    asked = layers(widths[: 2 * stages], tokens=512, embed=256)
    mesh = {"pp": stages, **({"tp": inside} if inside > 1 else {})}
    halves = {"wu*": ["R", "S(0)"], "wd*": ["R", "S(1)"]} if inside > 1 else {}
    asked |= {"mesh": {"names": list(mesh), "shape": list(mesh.values())}, "placements": halves}
    asked["stages"] = {"axis": "pp", "of": of, "micro_batches": 2 * stages, "schedule": schedule}
    program = answer_request(asked, where="a pipeline").written.program

    assert check_runnable(program) == []
    codes = [program.code(stage) for stage in range(stages)]
    for here, there in ((a, b) for a in range(stages) for b in range(stages) if a != b):
        sent = [(one.tag, one.nbytes) for one in codes[here] if isinstance(one, Send) and one.peer == there]
        received = [(one.tag, one.nbytes) for one in codes[there] if isinstance(one, Recv) and one.peer == here]
        assert sent == received
        assert bool(sent) == (abs(here - there) == 1)
