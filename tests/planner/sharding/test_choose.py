"""The choice is the best there is: against trying everything, on small random graphs."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.sharding.layouts.collectives import cost_of
from planner.sharding.plans.plan import plan_sharding
from planner.sharding.solver.choose import choose, enumerate_candidates
from tests.examples import examples
from tests.planner.sharding import cases, virtual_ranks
from topology.errors import Infeasible

SIZES = {"t": 8, "h": 4, "f": 12, "g": 4}
GRAPHS = [
    ["u = linear(x, w) :: t h+, f h+ -> t f", "y = gelu(u) :: t f -> t f"],
    ["u = linear(x, w) :: t h+, f h+ -> t f", "y = u + r :: t f, t f -> t f"],
    ["u = linear(x, w) :: t h+, f h+ -> t f", "v = u * 2.0 :: t f -> t f", "y = v.T :: t f -> f t"],
    ["u = gelu(x) :: t h -> t h", "d = linear(u, w) :: t h+, f h+ -> t f", "y = d.sum(0) :: t+ f -> f"],
]
INPUTS = {"x": "t h", "w": "f h", "r": "t f"}


def tried(problem) -> int | None:
    """Least ring bytes of all options by all layouts, every need of a tensor paid once; None if nothing works."""
    graph = enumerate_candidates(problem)
    made = [o.result.name for o in problem.operators]
    best = None
    for picked in product(*graph.options):
        inside = sum(cost_of(o.collectives, problem.mesh.ranks)[0] for o in picked)
        needs = {name: {} for name in problem.tensors}
        for option in picked:
            for name, layout in option.operands:
                needs[name][layout] = None
        total = inside
        for name in problem.tensors:
            start = picked[made.index(name)].result if name in made else None
            ways = []
            for at in graph.layouts[name]:
                prices = [graph.redistributor_for(name).cost(start, at)] if start is not None else []
                prices += [graph.redistributor_for(name).cost(at, wanted) for wanted in needs[name]]
                if all(price is not None for price in prices):
                    ways.append(sum(price[0] for price in prices))
            if not ways:
                break
            total += min(ways)
        else:
            best = total if best is None else min(best, total)
    return best


@st.composite
def stated(draw):
    ops = draw(st.sampled_from(GRAPHS))
    mesh = draw(st.sampled_from([{"x": 4}, {"x": 2}, {"a": 2, "b": 2}]))
    text = " ".join(ops)
    token = st.sampled_from(["R", "S(0)", "S(1)"])
    inputs = {
        name: f"{dims}: {' '.join(draw(token) for _ in mesh)}"
        for name, dims in INPUTS.items()
        if f"{name}," in text or f"{name})" in text or f" {name} " in text
    }
    last = "S(0)" if text.endswith("-> f") else draw(token)
    pins = {"y": " ".join([last, *["R"] * (len(mesh) - 1)])} if draw(st.booleans()) else {}
    policy = draw(st.sampled_from(["min_ring_bytes", None]))
    return cases.case("drawn", mesh, ops, inputs, SIZES, pins, policy=policy)


@examples(40)
@given(stated())
def test_no_other_choice_sends_less(of) -> None:
    problem = cases.problem(of)
    graph = enumerate_candidates(problem)
    combinations = 1
    for found in graph.options:
        combinations *= len(found)
    if combinations > 4000:
        return

    choice, _ = choose(problem)

    assert choice.cost == tried(problem)


@examples(60)
@given(stated())
def test_what_is_chosen_computes_the_same_numbers(of) -> None:
    problem = cases.problem(of)

    virtual_ranks.run(problem, cases.values(problem))


def test_a_sum_that_nothing_leaves_pending_cannot_be_pinned() -> None:
    of = cases.case("no", {"x": 4}, ["y = gelu(x) :: t h -> t h"], {"x": "t h: R"}, SIZES, {"y": "P(sum)"})

    with pytest.raises(Infeasible, match="pinned"):
        choose(cases.problem(of))


def test_a_gathered_tensor_is_gathered_once_for_all_who_need_it() -> None:
    """X is needed whole by three products: one all-gather, as long as all three want the same."""
    ops = [f"{y} = linear(x, {w}) :: t h+, f h+ -> t f" for y, w in zip("pqr", "abc", strict=True)]
    of = cases.case("once", {"x": 4}, ops, {"x": "t h: S(0)", **dict.fromkeys("abc", "f h: S(0)")}, SIZES)

    found = plan_sharding(cases.problem(of))

    assert [(c.kind, c.tensor) for c in found.collectives] == [("all_gather", "x")]


def test_an_input_without_placements_is_placed() -> None:
    """The weight of a column-parallel layer, when only its result is stated."""
    of = cases.case(
        "free", {"x": 4}, ["u = linear(x, w) :: t h+, f h+ -> t f"], {"x": "t h: R", "w": "f h"}, SIZES, {"u": "S(1)"}
    )

    found = plan_sharding(cases.problem(of))

    assert found.collectives == ()
    assert found.choice.layouts["w"].dims == (("x",), ())


def test_a_graph_of_many_layers_is_solved_exactly() -> None:
    """A transformer's feed-forward half, eight times over on a 2-D mesh: two collectives a layer, as one layer
    alone.
    """
    ops, inputs = [], {"x0": "t h: S(0) S(0)"}
    for layer in range(8):
        ops += [
            f"u{layer} = linear(x{layer}, w{layer}) :: t h+, f h+ -> t f",
            f"a{layer} = gelu(u{layer}) :: t f -> t f",
            f"y{layer} = linear(a{layer}, v{layer}) :: t f+, h f+ -> t h",
            f"x{layer + 1} = x{layer} + y{layer} :: t h, t h -> t h",
        ]
        inputs |= {f"w{layer}": "f h: R S(0)", f"v{layer}": "h f: R S(1)"}
    pins = {f"x{layer + 1}": "S(0) S(0)" for layer in range(8)}
    sizes = {"t": 64, "h": 64, "f": 256}
    of = cases.case("deep", {"dp": 2, "tp": 2}, ops, inputs, sizes, pins)

    found = plan_sharding(cases.problem(of))

    assert [c.kind for c in found.collectives] == ["all_gather", "reduce_scatter"] * 8
    assert {c.mesh_dim for c in found.collectives} == {"tp"}
