"""The one rule: whatever it allows computes the right thing, and what it refuses would not."""

import re
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.sharding.layouts.layout import Layout, make_mesh, parse_placements
from planner.sharding.operators.graph import GraphBuilder
from planner.sharding.operators.operator import Tensor, parse_operators
from planner.sharding.operators.options import combine_axis_specs, split_dim_spec
from planner.sharding.problem.problem import ShardingProblem
from planner.sharding.solver.choose import enumerate_candidates
from tests.planner.sharding import cases, virtual_ranks
from tests.planner.sharding.known import KNOWN

EVERY = [stated for stated, _, _ in KNOWN if "schedule" not in stated]


@pytest.mark.parametrize("stated", EVERY, ids=lambda stated: stated["id"])
def test_every_option_of_every_operator_computes_its_part(stated) -> None:
    """Not the chosen way only: each way to shard each operator, on pieces (and terms of pending sums) of its own."""
    problem = cases.problem({**stated, "policy": "min_ring_bytes"})
    world, rng = virtual_ranks.World(problem.mesh), np.random.default_rng(0)
    whole = {name: virtual_ranks.array(value) for name, value in cases.values(problem).items()}
    for operator, options in zip(problem.operators, enumerate_candidates(problem).options, strict=True):
        whole[operator.result.name] = virtual_ranks._computed(operator, whole)
        for option in options:
            pieces = {(n, at): world.scattered(whole[n], at, rng) for n, at in option.operands}
            local = virtual_ranks.ran(operator, option, pieces, world, whole)
            what = f"{operator.text} with {dict(option.axis_specs)}"
            world.check(local, option.result, whole[operator.result.name], what)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), st.data())
def test_every_way_to_shard_a_view_computes_its_part(before, data) -> None:
    """Dims that share boundaries of elements keep their axes, others are needed whole: (4, 6) as (6, 4)."""
    left, after = prod(before), []
    while left > 1:
        after.append(data.draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0])))
        left //= after[-1]
    sizes = {f"a{n}": size for n, size in enumerate(before)}
    stated = cases.case(
        "view",
        {"x": 2, "y": 2},
        [f"y = reshape(x, {after or [1]})"],
        {"x": " ".join(sizes)},
        sizes,
        policy="min_ring_bytes",
    )

    test_every_option_of_every_operator_computes_its_part(stated)


@pytest.mark.parametrize("formula", ["amax(x, 1)", "softmax(x, 1)", "x.sum(1)"])
def test_no_rank_takes_the_largest_of_nothing(formula) -> None:
    """Of four columns on eight ranks, four have none: they may add up to zero, and have no maximum."""
    rows = {"x": {"shape": [8, 4], "dtype": "f64", "placements": ["S(1)", "S(1)"]}}
    stated = {"id": "few", "mesh": {"names": ["a", "b"], "shape": [4, 2]}, "inputs": rows, "ops": [f"y = {formula}"]}

    test_every_option_of_every_operator_computes_its_part(stated)


def placed_of(text, tensors, sizes, mesh=None):
    """All (axes that are cut) of an operator on a mesh of one axis."""
    problem = cases.problem(cases.case("one", mesh or {"x": 2}, [text], tensors, sizes, policy="min_ring_bytes"))
    return {tuple(axis for axis, _ in option.axis_specs) for option in enumerate_candidates(problem).options[-1]}


S = {"t": 4, "h": 4, "f": 4}


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("y = linear(x, w) :: t h+, f h+ -> t f", {"t", "h", "f"}),
        ("y = gelu(x) :: t h -> t h", {"t", "h"}),
        ("y = gelu(x.sum(0)) :: t+ h -> h", {"h"}),  # the sum is inside
        ("y = x.sum(0) + r :: t+ h, h -> h", {"h"}),  # r would be added on every rank
        ("y = x.sort(-1).values :: t h^ -> t h", {"t"}),
        ("y = softmax(x, -1) :: t h* -> t h", {"t", "h"}),
        ("y = strange(x) :: t h* -> t h", set()),  # nobody knows what it does
        ("y = (silu(x) * x).sum(0) :: t+ h -> h", {"t", "h"}),  # sums of pieces add up, whatever is summed
        ("y = (x + r).sum(0) :: t+ h, h -> h", {"t", "h"}),
        ("y = gelu(x).mean(0) :: t+ h -> h", {"t", "h"}),
        ("y = gelu(x).amax(0) :: t+ h -> h", {"t", "h"}),
        ("y = (x @ w.T).amax(0) :: t+ h+, f h+ -> f", {"t", "f"}),  # pieces over h are no maxima
        ("y = (x @ w.T).mean(0) :: t+ h+, f h+ -> f", {"h", "f"}),  # means of sums over h
        ("y = (silu(x) * z).sum(0) :: t+ h, t+ h -> h", {"t", "h"}),
    ],
)
def test_which_axes_may_be_cut(text, cut) -> None:
    tensors = {"x": "t h: R", "w": "f h: R", "r": "h: R", "z": "t h: R"}
    formula = re.sub(r"[a-z_]{2,}", " ", text.split("::")[0])  # without the names of functions
    used = {name: dims for name, dims in tensors.items() if name in formula}

    assert placed_of(text, used, S) == {(), *((axis,) for axis in cut)}


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        ("y = u * 2.0 :: t f -> t f", True),
        ("y = u.T :: t f -> f t", True),
        ("y = u / n :: t f, t f -> t f", True),
        ("y = u * n :: t f, t f -> t f", True),
        ("y = u + n :: t f, t f -> t f", False),
        ("y = u * u :: t f, t f -> t f", False),
        ("y = gelu(u) :: t f -> t f", False),
        ("y = n / u :: t f, t f -> t f", False),
        ("y = gelu_bwd(u, n) :: t f, t f -> t f", True),
        ("y = gelu_bwd(n, u) :: t f, t f -> t f", False),
    ],
)
def test_a_sum_stays_pending_through_what_is_linear_in_it(text, stays) -> None:
    tensors = {"u": "t f: P(sum)", "n": "t f: R"}
    used = {
        name: dims for name, dims in tensors.items() if f"{name} " in text or f"{name}," in text or f"{name})" in text
    }
    problem = cases.problem(cases.case("one", {"x": 2}, [text], {"u": tensors["u"], **used}, S))

    assert any(option.result.pending for option in enumerate_candidates(problem).options[0]) == stays


def test_a_dim_made_of_two_axes_is_cut_along_them() -> None:
    mesh = make_mesh(["a", "b"], [2, 4])
    sizes = {"w": 2, "f": 32}

    assert combine_axis_specs(("w", "f"), sizes, {"f": ("b",)}, mesh) == (2, "b")
    assert combine_axis_specs(("w", "f"), sizes, {"w": ("a",), "f": ("b",)}, mesh) == ("a", "b")
    assert combine_axis_specs(("f", "w"), sizes, {"w": ("a",)}, mesh) == (32, "a")
    assert split_dim_spec((2, "b"), ("w", "f"), sizes, mesh) == {"w": (), "f": ("b",)}
    assert split_dim_spec(("b",), ("w", "f"), sizes, mesh) is None  # half a cut in each of them
    assert split_dim_spec((4, "b"), ("w", "f"), sizes, mesh) == {"w": (), "f": (2, "b")}


def test_operands_are_bound_by_what_fits() -> None:
    """A nested formula names its tensors in another order than the annotation."""
    tensors = {n: Tensor(name=n, shape=s, dtype="bf16") for n, s in {"p": (6, 8), "x": (6, 4), "w": (8, 4)}.items()}
    (found,) = parse_operators("y = einsum('te,te->t', p, x @ w.T) :: t h+, t E+, E+ h+ -> t", tensors, {})

    assert [name for name, _ in found.operands] == ["x", "p", "w"]
    assert found.result.shape == (6,)


@pytest.mark.parametrize(
    "formula", ["x @ x.transpose(1, 2)", "einsum('bse,bte->bst', x, x)", "x.unsqueeze(1) * x.unsqueeze(2)"]
)
def test_a_product_of_a_tensor_with_itself_is_whole_along_what_is_in_the_result_twice(formula) -> None:
    """A rank with rows 0 and 1 cannot make what rows 0 have with rows 2 of another rank."""
    builder = GraphBuilder()
    builder.add_input("x", (4, 4, 8), "f64")
    builder.apply(f"y = {formula}")
    mesh = make_mesh(["a"], [2])
    layout = parse_placements(["S(1)"], (4, 4, 8), mesh, of="x")
    graph = builder.build()
    whole = {"y": Layout(((),) * len(graph.tensors["y"].shape))}
    problem = ShardingProblem(mesh=mesh, graph=graph, input_layouts={"x": layout}, pins=whole, policy="min_ring_bytes")

    virtual_ranks.run(problem, cases.values(problem))
