"""Programs, files, pictures and explanations written of captured graphs, without torch."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from math import prod
from pathlib import Path

import defusedxml.ElementTree as ET  # noqa: N817
import msgspec
import numpy as np
import pytest

from planner.cli import main
from planner.sharding.answer import answer_request
from planner.sharding.backends.runnable import buffer_limit, kernel_seconds, simulate_program
from planner.sharding.layouts.layout import local_shape
from planner.sharding.plans.explanation import explain_plan
from planner.sharding.plans.report import Limits
from planner.sharding.problem.problem import Machine, MemoryLimit
from planner.sharding.solver.pricing import PICOSECONDS, TimePricing
from simulator.config.runtime import ELEMENT_BYTES
from simulator.sharded.program import Exchange, read_program
from tests.simulator.program_check import check_runnable
from topology.catalog.clusters import cluster
from topology.errors import BadInput, Infeasible

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "sharding" / "captured.json"


@pytest.fixture(scope="module")
def answer():
    return answer_request(json.loads(EXAMPLE.read_text()), where="the example")


def test_a_program_has_no_fault_and_comes_to_an_end(answer) -> None:
    program = answer.written.program

    assert check_runnable(program) == []
    run = simulate_program(answer.written, answer.problem, cluster("dgx-h100"))
    assert run.step_s > 0
    text = msgspec.json.encode(program)
    assert msgspec.json.encode(read_program(json.loads(text), where="itself")) == text


def test_gradients_of_fully_sharded_parameters_are_scattered_where_they_were_gathered(answer) -> None:
    kinds = [work.kind for work in answer.written.program.work.values() if isinstance(work, Exchange)]

    # forward gathers two weights and a bias over data, and sums over model; backward is the dual of each, and sums the
    # gradient of the bias that every rank of data has
    assert kinds[:4] == ["all_gather", "all_gather", "all_reduce", "all_gather"]
    assert kinds.count("reduce_scatter") == 3
    assert set(kinds[4:]) == {"all_reduce", "reduce_scatter"}


def test_gradients_that_all_ranks_are_given_are_not_exchanged(answer) -> None:
    """As in Megatron-LM's row-parallel product: a sum forward, nothing backward (arXiv 1909.08053, section 3)."""
    program = answer.written.program
    exchanges = [(n, one) for n, one in program.work.items() if isinstance(one, Exchange) and "model" in one.axes]

    assert [(name, one.kind) for name, one in exchanges if ".grad" not in name] == [
        ("linear_1_product.1", "all_reduce")
    ]
    assert not [name for name, _ in exchanges if ".grad" in name]
    assert program.buffers["linear_1.grad"].pending == {}
    assert program.buffers["up_weight_used.1.grad"].pending == {"data": "sum"}


def test_every_collective_says_why_it_is_there_and_what_is_next_best(answer) -> None:
    explained = explain_plan(answer.problem, answer.plan, cluster("dgx-h100"))

    assert len(explained) == len(answer.plan.collectives)
    for one in explained:
        assert one.why
        assert one.instead
        assert one.seconds > 0
    total = next(one for one in explained if one.kind == "all_reduce")
    assert "partial sum on the ranks of model" in total.why


def test_the_picture_shows_all_operators_and_collectives(answer, tmp_path, capsys) -> None:
    at = tmp_path / "plan.svg"
    assert main(["shard", str(EXAMPLE), "--picture", str(at), "--explain"]) == 0

    words = [element.text or "" for element in ET.fromstring(at.read_text()).iter() if element.tag.endswith("text")]
    for operator in answer.problem.operators:
        assert any(operator.result.name in word for word in words)
    assert sum("all_gather over data" in word for word in words) == 3
    assert "why" in capsys.readouterr().out


def test_the_python_file_is_python_and_names_no_module_of_a_config(tmp_path) -> None:
    at = tmp_path / "placed.py"
    case = json.loads(EXAMPLE.read_text())
    case["id"] = 'a"""\nimport os\nos.abort()\n"""'
    (tmp_path / "case.json").write_text(json.dumps(case))
    assert main(["shard", str(tmp_path / "case.json"), "--python", str(at)]) == 0

    tree = ast.parse(at.read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert all(name.startswith("torch") for name in imported)
    assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"axes": {"nobody": "a"}}, "names no input"),
        ({"axes": {"x": "batch"}}, "2 dims"),
        ({"parameters": {"width": "model"}}, "no input has an axis"),
        ({"parameters": {"mlp": "pp"}}, "no axis 'pp'"),
        ({"parameters": {"mlp": "model", "embed": "model"}}, "shards one dim"),
        ({"placements": {"nothing": ["R", "R"]}}, "no tensor of the graph"),
        ({"policy": "guess"}, "unknown policy"),
        ({"depth": 3}, "unknown field"),
    ],
)
def test_what_does_not_fit_the_graph_is_refused(change, what) -> None:
    with pytest.raises(BadInput) as refused:
        answer_request({**json.loads(EXAMPLE.read_text()), **change}, where="the example")
    assert what in str(refused.value)


@pytest.mark.parametrize("policy", ["none", "min_time"])
def test_on_a_machine_what_the_solver_counts_is_what_the_program_does(policy) -> None:
    """The sum over the written program, forward and backward, of what each instruction takes by itself."""
    machine = cluster("dgx-h100")
    asked = {**json.loads(EXAMPLE.read_text()), "policy": policy}
    answer = answer_request(asked, where="the example", cluster=machine)
    problem, program = answer.problem, answer.written.program
    pricing = TimePricing(Machine(machine), problem.mesh)
    seconds = 0.0
    for work in answer.written.works:
        if isinstance(work.do, Exchange):
            buffer = program.buffers[work.writes[0] if work.do.kind == "all_gather" else work.reads[0]]
            nbytes = prod(buffer.local) * ELEMENT_BYTES[buffer.dtype]
            seconds += float(pricing.times(work.do.kind, work.do.axes, np.array([float(nbytes)]))[0]) / PICOSECONDS
        else:
            seconds += kernel_seconds(work, program, problem, Machine(machine))

    # The solver counts sums of gradients that all ranks are given as well: of the last product, and of its bias.
    given = np.array([prod(program.buffers["linear_1.grad"].local), prod(program.buffers["down_bias"].local)]) * 2.0
    seconds += float(pricing.times("all_reduce", ("model",), given).sum()) / PICOSECONDS

    assert "down_bias.gradient0" not in program.work
    assert answer.plan.choice.cost / PICOSECONDS == pytest.approx(seconds, rel=0.1)
    assert answer.plan.choice.gap == 0


def test_captured_weights_that_nobody_placed_fit_the_memory_and_cost_time_for_it() -> None:
    machine = cluster("dgx-h100")
    asked = json.loads(EXAMPLE.read_text())
    asked |= {"parameters": {}, "compute": {"batch": ["data", "model"]}, "choose": ["*.weight"], "policy": "min_time"}

    def held(answer):
        """Bytes of parameters in float32, each with 14 more of gradient and optimizer state."""
        both = (
            (answer.problem.tensors[n].shape, answer.plan.choice.layouts[n]) for n in answer.problem.graph.parameters
        )
        return sum(prod(local_shape(shape, at, answer.problem.mesh)) * (4 + 14) for shape, at in both)

    roomy = answer_request(asked, where="the example", cluster=machine)
    limit = 300_000
    little = answer_request(asked, where="the example", cluster=machine, limits=Limits(memory_bytes=limit))

    assert held(little) <= limit
    assert little.plan.choice.cost >= roomy.plan.choice.bound
    with pytest.raises(Infeasible, match="memory"):
        answer_request(asked, where="the example", cluster=machine, limits=Limits(memory_bytes=10_000))


def large(mesh, placements, **more):
    """The example's feed-forward in bfloat16 on 32,768 tokens, 4,096 wide."""
    asked = json.loads(EXAMPLE.read_text())
    tokens = next(one["shape"][0] for one in asked["graph"]["inputs"] if one["name"] == "x")
    for one in (*asked["graph"]["inputs"], *asked["graph"]["nodes"]):
        one["shape"] = [{tokens: 32768, 256: 16384, 64: 4096}[size] for size in one["shape"]]
        one["dtype"] = "bf16"
    maps = {"axes": {}, "parameters": {}, "compute": {}, "placements": placements}
    return {**asked, **maps, "mesh": {"names": list(mesh), "shape": list(mesh.values())}, **more}


TENSOR_PARALLEL = {"up.weight": ["S(0)"], "up.bias": ["S(0)"], "down.weight": ["S(1)"]}


@pytest.mark.parametrize("backward", [False, True])
def test_products_run_in_chunks_where_the_program_is_shorter_for_it(backward) -> None:
    """A sum over ranks that nothing hides is sent by parts alongside the product: never slower than the whole, with its
    bytes.
    """
    machine = cluster("h200x4")
    asked = large({"d": 4}, TENSOR_PARALLEL, backward=backward)
    whole = answer_request({**asked, "chunks": {}}, where="whole", cluster=machine)
    chosen = answer_request(asked, where="chosen", cluster=machine)
    cut = answer_request({**asked, "chunks": {"linear_1": 4}}, where="cut", cluster=machine)

    seconds = [simulate_program(one.written, one.problem, machine).step_s for one in (whole, cut, chosen)]
    assert chosen.written.chunks
    assert check_runnable(chosen.written.program) == []
    assert seconds[2] < seconds[0]
    assert seconds[2] <= seconds[1]

    def reduced(one):
        works = (w for w in one.written.works if isinstance(w.do, Exchange))
        return sum(prod(one.written.program.buffers[w.reads[0]].local) for w in works if w.do.kind == "all_reduce")

    if not backward:
        assert reduced(cut) == reduced(whole) == 32768 * 4096


def test_with_little_memory_weights_are_gathered_again_and_intermediates_computed_again() -> None:
    machine = cluster("dgx-h100")
    asked = {**json.loads(EXAMPLE.read_text()), "policy": "min_time"}
    roomy = answer_request(asked, where="roomy", cluster=machine, limits=Limits(memory_bytes=1e12))
    state = 1e12 - buffer_limit(roomy.problem, roomy.plan)
    assert not roomy.written.again
    limits = [state + share * roomy.written.peak_bytes for share in (0.97, 0.9)]
    little = [
        answer_request(asked, where="little", cluster=machine, limits=Limits(memory_bytes=limit)) for limit in limits
    ]

    for answer, limit in zip(little, limits, strict=True):
        written = answer.written
        assert state + written.peak_bytes <= limit
        assert written.again
        assert check_runnable(written.program) == []
        again = {name for name in written.program.buffers if name.endswith(".again")}
        assert {f"{name}.again" for name in written.again} <= again
    seconds = [simulate_program(one.written, one.problem, machine).step_s for one in (roomy, *little)]
    assert seconds == sorted(seconds)
    with pytest.raises(Infeasible, match="memory"):
        answer_request(asked, where="none", cluster=machine, limits=Limits(memory_bytes=state + 1000))


def held_at_the_peak(answer) -> float:
    return (
        1e15
        - buffer_limit(replace(answer.problem, memory=MemoryLimit(limit_bytes=1e15)), answer.plan)
        + (answer.written.peak_bytes)
    )


@pytest.mark.parametrize(
    ("mesh", "weights"),
    [
        ({"d": 4}, TENSOR_PARALLEL),
        ({"d": 2, "m": 2}, {"up.weight": ["S(1)", "S(0)"], "up.bias": ["R", "S(0)"], "down.weight": ["S(0)", "S(1)"]}),
    ],
)
def test_the_memory_of_a_hand_plan_admits_that_plan_and_one_where_nothing_is_said(mesh, weights) -> None:
    machine = cluster("h200x4")
    boundary = {name: ["R"] * len(mesh) for name in ("x", "output0")}
    asked = {"policy": "min_time", "backward": True}
    hand = large(mesh, {**boundary, **weights}, **asked)
    free = answer_request(hand, where="hand", cluster=machine)
    limit = held_at_the_peak(free)

    both = [hand, large(mesh, boundary, choose=["*"], **asked)]
    found = [answer_request(one, where="found", cluster=machine, limits=Limits(memory_bytes=limit)) for one in both]

    assert all(held_at_the_peak(one) <= limit for one in found)
    seconds = [simulate_program(one.written, one.problem, machine).step_s for one in (free, *found)]
    assert seconds[1] <= seconds[0] * (1 + 1e-9)
    assert seconds[2] <= seconds[0] * (1 + 1e-9 if len(mesh) == 1 else 1.02)  # by hand over one axis is tried besides


def test_the_result_of_an_operator_that_no_rule_knows_is_made_whole() -> None:
    asked = {**json.loads(EXAMPLE.read_text()), "policy": "min_time", "backward": False}
    (node,) = (one for one in asked["graph"]["nodes"] if one["op"].startswith("aten.gelu"))
    node["op"] = "aten.unheard_of.default"
    answer = answer_request(asked, where="opaque", cluster=cluster("dgx-h100"))

    assert answer.captured.opaque == (node["name"],)
    (option,) = (
        option
        for operator, option in zip(answer.problem.operators, answer.plan.choice.options, strict=True)
        if operator.result.name == node["name"]
    )
    assert not option.result.axes()


def test_a_product_around_a_ring_passes_pieces_on_instead_of_gathering_them() -> None:
    machine = cluster("h200x4")
    rows = {**TENSOR_PARALLEL, "x": ["S(0)"], "output0": ["S(0)"]}
    ring, chosen = (
        answer_request(large({"d": 4}, rows, backward=False, **more), where="rows", cluster=machine)
        for more in ({"chunks": {"linear_0": "ring"}}, {})
    )

    buffers = ring.written.program.buffers
    exchanged = [(w.do.kind, buffers[w.reads[0]].tensor) for w in ring.written.works if isinstance(w.do, Exchange)]
    (passed,) = {tensor for kind, tensor in exchanged if kind == "collective_permute"}
    assert exchanged.count(("collective_permute", passed)) == 3
    assert ("all_gather", passed) not in exchanged
    assert check_runnable(ring.written.program) == []
    sent = simulate_program(ring.written, ring.problem, machine).step_s
    assert simulate_program(chosen.written, chosen.problem, machine).step_s <= sent


SEQUENCE_PARALLEL = {**TENSOR_PARALLEL, "x": ["S(0)"], "output0": ["S(0)"]}


def test_how_pieces_move_beside_a_product_is_chosen_by_time_and_told_with_the_next_best(tmp_path, capsys) -> None:
    """Every way is simulated where it can run; the one that is chosen is the shortest of them."""
    machine, asked = cluster("h200x4"), large({"d": 4}, SEQUENCE_PARALLEL, backward=False, policy="follow_weights")
    chosen = answer_request(asked, where="rows", cluster=machine)

    ways = {"ring", "broadcast", "copy_engine", "fused"}
    assert set(chosen.written.tried) == {"linear_0_product", "linear_1_product"}
    for name, seconds in chosen.written.tried.items():
        assert set(seconds) == {1, 2, 4, 8} | ways  # the second one's sum is scattered as the result is needed
        assert seconds[chosen.written.chunks.get(name, 1)] == pytest.approx(min(seconds.values()), rel=0.002)
    stated = {way: answer_request({**asked, "chunks": {"linear_0": way}}, where=way, cluster=machine) for way in ways}
    first = chosen.written.tried["linear_0_product"]
    for way, one in stated.items():
        assert simulate_program(one.written, one.problem, machine).step_s == first[way]
        assert check_runnable(one.written.program) == []
    at = tmp_path / "case.json"
    at.write_text(json.dumps(asked))
    assert main(["shard", str(at), "--cluster", "h200x4", "--explain"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "linear_0_product alongside its exchange:" in text
    assert "next best" in text


def test_a_stream_of_a_loop_domain_is_a_product_in_chunks_or_around_a_ring() -> None:
    asked = large({"d": 4}, SEQUENCE_PARALLEL, backward=False, policy="follow_weights")
    split = "outer_split(0, 4); {}parallelize(0, Stream)"
    for swizzled, way in (("", 4), ("swizzle1d(0, d); ", "ring")):
        stated = answer_request({**asked, "domains": {"linear_0": split.format(swizzled)}}, where="stream")
        assert (
            stated.written.program
            == answer_request({**asked, "chunks": {"linear_0": way}}, where="way").written.program
        )
    with pytest.raises(BadInput, match="a stream along dim 1"):
        answer_request({**asked, "domains": {"linear_0": "outer_split(1, 4); parallelize(1, Stream)"}}, where="wide")


@pytest.mark.parametrize(("way", "kinds"), [("broadcast", {"broadcast", "reduce"}), ("ring", {"collective_permute"})])
def test_gathers_and_scatters_send_the_same_bytes_whichever_way_they_go(way, kinds) -> None:
    """A product gathers over four ranks, and backward the gradient of what it gathered is scattered the same way."""
    asked = large({"d": 4}, SEQUENCE_PARALLEL, backward=True, gradients=["x"], policy="follow_weights")
    asked["chunks"] = {"linear_0": way}
    answer = answer_request(asked, where=way)
    program = answer.written.program

    assert check_runnable(program) == []
    sent = [w for w in answer.written.works if isinstance(w.do, Exchange) and w.do.kind in kinds]
    assert {w.do.kind for w in sent} == kinds
    pieces = 4 if way == "broadcast" else 3
    assert len(sent) == 2 * pieces
    for work in sent:
        assert prod(program.buffers[work.reads[0]].local) == 32768 // 4 * 4096


def test_the_program_of_a_pipeline_is_simulated_as_it_is_run() -> None:
    """Each of two stages takes every micro batch in turn, forward and backward; with more of them the stages
    overlap.
    """
    maps = {"axes": {}, "parameters": {}, "compute": {}, "placements": {}}
    asked = {**large({"pp": 2, "d": 2}, {}), **maps, "backward": True}
    asked["placements"] = {name: ["R", *tokens] for name, tokens in TENSOR_PARALLEL.items()}
    seconds = []
    for number in (1, 4):
        stages = {"axis": "pp", "of": {"down": 1}, "micro_batches": number}
        answer = answer_request({**asked, "stages": stages}, where="pipeline", cluster=cluster("h200x4"))
        program = answer.written.program
        assert check_runnable(program) == []
        assert [code.ranks for code in program.program().codes] == [(0, 1), (2, 3)]
        sent = [one for one in program.instructions if one["do"] == "send"]
        assert [one["stage"] for one in sent] == [0] * number + [1] * number
        assert {one["nbytes"] for one in sent} == {32768 * 16384 // 2 * 2}
        text = msgspec.json.encode(program)
        assert msgspec.json.encode(read_program(json.loads(text), where="itself")) == text
        seconds.append(simulate_program(answer.written, answer.problem, cluster("h200x4")).step_s)
    # one passes both stages, forward and backward, alone; of four, three more pass the slower stage
    assert 2 * seconds[0] < seconds[1] < 4 * seconds[0]


@pytest.mark.parametrize(
    ("stages", "what"),
    [
        ({"axis": "pp", "of": {"nobody": 1}}, "nobody"),
        ({"axis": "pp", "of": {"down": 2}}, "stage 2"),
        ({"axis": "cp", "of": {"down": 1}}, "no axis"),
        ({"axis": "pp", "of": {"up": 1, "down": 0}}, "later stages"),
        ({"axis": "pp", "of": {"down": 1}, "micro_batches": 0}, "micro batches"),
    ],
)
def test_stages_that_cannot_be_are_refused(stages, what) -> None:
    asked = {**large({"pp": 2, "d": 2}, {}), "stages": stages}
    with pytest.raises(BadInput, match=what):
        answer_request(asked, where="stages")


def test_copy_engines_do_not_reach_other_nodes() -> None:
    asked = large({"d": 16}, SEQUENCE_PARALLEL, backward=False, policy="follow_weights")
    far = cluster("dgx-h100", 16)
    stated = answer_request({**asked, "chunks": {"linear_0": "copy_engine"}}, where="far", cluster=far)
    with pytest.raises(Infeasible, match="copy_engine"):
        simulate_program(stated.written, stated.problem, far)
    chosen = answer_request(asked, where="far", cluster=far)
    assert not {"copy_engine", "fused"} & set(chosen.written.chunks.values())


def test_chunks_that_cannot_be_are_refused() -> None:
    asked = large({"d": 4}, TENSOR_PARALLEL)
    refused = ({"gelu_0": 2}, "does not run"), ({"linear_1": 3}, "rows"), ({"linear_1": "broadcast"}, "broadcast")
    for chunks, why in refused:
        with pytest.raises(BadInput, match=why):
            answer_request({**asked, "chunks": chunks}, where="refused")
