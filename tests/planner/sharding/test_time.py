"""Cost is time: against trying everything, by axis and order of axes, with work, memory, and a limit of time."""

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.sharding.layouts.layout import Layout, local_shape, make_mesh, parse_placements
from planner.sharding.operators.backward import add_backward
from planner.sharding.operators.graph import GraphBuilder
from planner.sharding.operators.work import operator_work
from planner.sharding.plans.lowering import work_of
from planner.sharding.plans.plan import plan_sharding
from planner.sharding.problem.deadline import NO_DEADLINE, Deadline
from planner.sharding.problem.problem import Machine, MemoryLimit, ShardingProblem
from planner.sharding.problem.schedule import Schedule
from planner.sharding.solver.candidates import enumerate_candidates
from planner.sharding.solver.choose import choose
from planner.sharding.solver.equivalence import find_equivalent
from planner.sharding.solver.pricing import PICOSECONDS, TimePricing
from simulator.config.runtime import ELEMENT_BYTES
from tests.planner.sharding import cases, virtual_ranks
from tests.planner.sharding.random_graphs import graphs, placed
from topology.catalog.cluster_file import load_cluster
from topology.errors import Infeasible

T, H, F = 4096, 2048, 8192


@pytest.fixture(scope="module")
def nodes():
    """Two nodes of eight GPUs."""
    return Machine(load_cluster("dgx-h100", 16))


def tried(problem, pricing) -> float:
    """Least time of all options by all layouts of all tensors, every need of a tensor paid once."""
    graph = enumerate_candidates(problem, pricing)
    made = problem.graph.producers
    best = np.inf
    own = [
        [pricing.collectives(o.collectives)[0] + work for o, work in zip(found, works, strict=True)]
        for found, works in zip(
            graph.options,
            [
                pricing.operators(o, found, dict(problem.tensors))
                for o, found in zip(problem.operators, graph.options, strict=True)
            ],
            strict=True,
        )
    ]
    for picked in product(*(range(len(found)) for found in graph.options)):
        options = [found[n] for found, n in zip(graph.options, picked, strict=True)]
        total = sum(costs[n] for costs, n in zip(own, picked, strict=True))
        for name in problem.tensors:
            moves = graph.redistributor_for(name)
            start = options[made[name]].result if name in made else None
            needs = {at for option in options for n, at in option.operands if n == name}
            homes = [at for at in graph.layouts[name] if not (at.pending and name in problem.graph.outputs)]
            ways = []
            for at in homes:
                prices = [moves.cost(start, at)] if start is not None else []
                prices += [moves.cost(at, wanted) for wanted in needs]
                if all(price is not None for price in prices):
                    ways.append(sum(price[0] for price in prices))
            total += min(ways, default=np.inf)
        best = min(best, total)
    return best


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_no_other_choice_takes_less_time(data) -> None:
    ops = data.draw(
        st.sampled_from(
            [
                ["u = linear(x, w) :: t h+, f h+ -> t f", "y = gelu(u) :: t f -> t f"],
                ["u = linear(x, w) :: t h+, f h+ -> t f", "y = u + r :: t f, t f -> t f"],
                ["u = gelu(x) :: t h -> t h", "y = softmax(u, -1) :: t h -> t h"],
            ]
        )
    )
    token = st.sampled_from(["R", "S(0)", "S(1)", ""])
    text = " ".join(ops)
    inputs = {
        n: f"{dims}: {data.draw(token)}"
        for n, dims in {"x": "t h", "w": "f h", "r": "t f"}.items()
        if n in cases.names_in(text.split("::")[0].split("=")[1]) or f" {n} ::" in text
    }
    of = cases.case("drawn", {"i": 4}, ops, inputs, {"t": T, "h": H, "f": F}, policy="min_time")
    machine = Machine(load_cluster("h200x4"))
    problem = replace(cases.problem(of), machine=machine)
    pricing = TimePricing(machine, problem.mesh)

    choice, _ = choose(problem)

    assert choice.cost == pytest.approx(tried(problem, pricing), abs=50)
    assert choice.gap == pytest.approx(0, abs=1e-9)


def test_a_gather_over_nodes_and_in_them_takes_the_order_that_sends_least_over_the_network(nodes) -> None:
    mesh = make_mesh(["inside", "nodes"], [8, 2])
    layout = parse_placements(["S(0)", "S(0)"], (T, H), mesh, of="x")
    of = cases.case(
        "two",
        {"inside": 8, "nodes": 2},
        ["y = x.sort(0).values :: t h -> t h"],
        {"x": "t h: S(0) S(0)"},
        {"t": T, "h": H},
    )
    problem = replace(cases.problem(of), machine=nodes, pins={"y": Layout(((), ()))}, policy=None)
    pricing = TimePricing(nodes, problem.mesh)
    found = plan_sharding(problem)
    moves = enumerate_candidates(problem, pricing).redistributor_for("x")

    assert problem.input_layouts["x"] == layout
    seconds = sum(pricing.collectives([c])[0] for c in found.collectives)
    everything = [step for step in moves.steps(layout) if step.kind == "all_gather"]
    for step in everything:  # any first gather, and the best way on
        rest = moves.cost(step.after, Layout(((), ())))
        assert rest is not None
        assert seconds <= pricing.collectives(step.collectives)[0] + rest[0]
    assert len(everything) > 1


def mlp(layers=1, *, machine, memory=None, tokens=T, sizes=(2, 2)):
    builder = GraphBuilder()
    builder.add_input("x0", (tokens, H), axes=("t", "h"))
    for n in range(layers):
        builder.add_input(f"w{n}", (F, H), parameter=True)
        builder.add_input(f"v{n}", (H, F), parameter=True)
        builder.apply(f"y{n} = linear(gelu(linear(x{n}, w{n})), v{n})")
        builder.apply(f"x{n + 1} = x{n} + y{n}")
    graph = add_backward(builder.build(), {f"x{layers}": "dx"})
    mesh = make_mesh(["a", "b"][: len(sizes)], sizes)
    batch = parse_placements(["S(0)"] * len(sizes), (tokens, H), mesh, of="x0")
    return ShardingProblem(
        mesh=mesh,
        graph=graph,
        input_layouts={"x0": batch, "dx": batch},
        policy="min_time",
        machine=machine,
        memory=memory,
    )


def held(problem, plan) -> float:
    """Bytes of parameters with their state, and of what the backward pass reads of the forward pass."""
    graph, start = problem.graph, problem.graph.backward_start
    total = 0.0
    for name, layout in plan.choice.layouts.items():
        tensor = graph.tensors[name]
        own = prod(local_shape(tensor.shape, layout, problem.mesh)) * ELEMENT_BYTES[tensor.dtype]
        made = graph.producers.get(name)
        if name in graph.parameters:
            total += own + own / 2 * problem.memory.state_bytes_per_parameter
        elif (made is None or made < start) and any(number >= start for number, _ in graph.consumers.get(name, ())):
            total += own
    return total


def test_work_is_not_done_twice_where_sharding_it_is_cheaper() -> None:
    """Weights that nobody placed: counted in bytes they would be copied, and all ranks would compute everything."""
    problem = mlp(machine=Machine(load_cluster("h200x4")))
    plan = plan_sharding(problem)

    flops = [
        float(np.sum(work_of(o, option, problem).flops))
        for o, option in zip(problem.operators, plan.choice.options, strict=True)
    ]
    whole = 5 * 2 * T * H * F  # nobody asks for the gradient of the input
    assert sum(flops) * problem.mesh.ranks == pytest.approx(whole)


def test_less_memory_shards_parameters_and_costs_time() -> None:
    machine = Machine(load_cluster("h200x4"))
    roomy = mlp(machine=machine, memory=MemoryLimit(limit_bytes=1e12), tokens=1 << 18)
    free = plan_sharding(roomy)
    assert all(not free.choice.layouts[name].axes() for name in roomy.graph.parameters)
    problem = replace(roomy, memory=MemoryLimit(limit_bytes=held(roomy, free) - 3e8))
    plan = plan_sharding(problem)

    assert held(problem, plan) <= problem.memory.limit_bytes
    assert plan.choice.cost >= free.choice.cost
    for name in problem.graph.parameters:
        assert plan.choice.layouts[name] == plan.choice.layouts[problem.graph.gradients[name]]
    assert any(plan.choice.layouts[name].axes() for name in problem.graph.parameters)
    with pytest.raises(Infeasible, match="memory"):
        plan_sharding(replace(roomy, memory=MemoryLimit(limit_bytes=1e6)))


def test_layers_that_are_alike_are_placed_alike() -> None:
    machine = Machine(load_cluster("h200x4"))
    together = mlp(3, machine=machine)
    equivalence = find_equivalent(together.graph, together.input_layouts, fold=True)
    plan = plan_sharding(together)
    apart, _ = choose(replace(together, schedule={"x1": Schedule()}))

    assert equivalence.operators[:12] == (0, 1, 2, 3) * 3
    assert len(set(equivalence.operators)) < len(together.operators)
    assert {plan.choice.layouts[f"w{n}"] for n in range(3)} == {plan.choice.layouts["w0"]}
    assert apart.cost <= plan.choice.cost <= 1.05 * apart.cost
    assert plan.choice.gap == pytest.approx(0, abs=1e-6)


def test_what_is_found_in_little_time_is_an_answer_with_its_gap() -> None:
    problem = replace(mlp(2, machine=Machine(load_cluster("h200x4"))), deadline=Deadline.after(1e-3))
    choice, _ = choose(problem)
    best, _ = choose(replace(problem, deadline=NO_DEADLINE))

    assert 0 < choice.bound <= best.cost <= choice.cost
    assert choice.gap >= (choice.cost - best.cost) / choice.cost


@settings(max_examples=6, deadline=None)
@given(placed(graphs(backward=True)))
def test_an_answer_is_there_before_the_choices_are_listed(problem) -> None:
    """It computes the same numbers, costs no less than the best, and its bound is below that."""
    if len(problem.mesh.names) != 2:
        return
    problem = replace(
        problem, machine=Machine(load_cluster("dgx-h100", 8)), policy="min_time", deadline=Deadline.after(0.0)
    )
    first = virtual_ranks.run(problem, cases.values(problem)).choice
    best, _ = choose(replace(problem, deadline=NO_DEADLINE))

    assert first.bound <= best.cost
    assert best.bound <= first.cost


def test_groups_are_priced_where_they_lie(nodes) -> None:
    pricing = TimePricing(nodes, make_mesh(["nodes", "inside"], [2, 8]))

    assert pricing.group_shape(("inside",)).nodes == 1
    across = pricing.group_shape(("nodes",))
    assert (across.nodes, across.ranks_per_node, across.siblings) == (2, 1, 8)
    both = pricing.group_shape(("nodes", "inside"))
    assert (both.ranks, both.ranks_per_node, both.siblings) == (16, 8, 1)
    nbytes = np.array([1e8])
    assert pricing.times("all_gather", ("nodes",), nbytes)[0] > pricing.times("all_gather", ("inside",), nbytes)[0]
    assert pricing.times("all_gather", ("inside",), nbytes)[0] < PICOSECONDS


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_what_is_chosen_by_time_computes_the_same_numbers(data) -> None:
    problem = data.draw(placed(graphs(backward=True)))
    machine = Machine(load_cluster("dgx-h100", 8))
    memory = data.draw(st.sampled_from([None, MemoryLimit(limit_bytes=1e9)]))
    timed = replace(problem, machine=machine, policy="min_time", memory=memory)

    virtual_ranks.run(timed, cases.values(timed))


def test_work_of_convolutions_and_of_causal_attention() -> None:
    """2 x output places x output channels x window x input channels; a causal kernel leaves out keys after its
    queries.
    """
    builder = GraphBuilder({})
    builder.add_input("x", [4, 32, 16, 16], "bf16")
    builder.add_input("w", [64, 32, 3, 3], "bf16")
    for name in "qkv":
        builder.add_input(name, [2, 4, 128, 64], "bf16")
    builder.apply("y = conv2d(x, w, None, 1, 1)")
    builder.apply("a = attn(q, k, v)")
    builder.apply("c = attn(q, k, v, True)")
    graph = builder.build()
    conv, whole, causal = (
        operator_work(one, graph.tensors, {axis: np.array([float(n)]) for axis, n in one.sizes.items()})
        for one in graph.operators
    )

    assert conv.flops.item() == 2 * (4 * 16 * 16) * 64 * (3 * 3 * 32)
    assert whole.flops.item() == 4 * (2 * 4) * 128 * 128 * 64
    assert causal.flops.item() == 4 * (2 * 4) * (128 * 129 // 2) * 64
