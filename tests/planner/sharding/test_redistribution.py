"""Redistributions: bytes by formula, the cheapest of all sequences, and the right numbers on every rank."""

from fractions import Fraction
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.sharding.layouts.collectives import add_costs, cost_of
from planner.sharding.layouts.layout import Layout, divides_evenly, make_mesh, parse_placements, placements_of
from planner.sharding.layouts.redistribution import Redistributor, tie_of
from tests.examples import examples
from tests.planner.sharding.virtual_ranks import World


def planned(tokens, wanted, shape, mesh, dtype="bf16"):
    layouts = [parse_placements(t, shape, mesh, of="x") for t in (tokens, wanted)]
    moves = Redistributor(shape, dtype, mesh)
    moves.allow_irregular_specs(layouts)
    return [one for step in moves.path(*layouts) for one in step.collectives], moves, layouts


def every_layout(shape, mesh, reducers=("sum",)):
    """All layouts of a tensor on a mesh with even cuts: each mesh axis cuts a dim (in any order), pends or holds
    copies.
    """
    found = []
    for choice in product(["R", *reducers, *range(len(shape))], repeat=len(mesh.names)):
        pending = tuple((n, c) for n, c in zip(mesh.names, choice, strict=True) if c in reducers)
        cuts = [[n for n, c in zip(mesh.names, choice, strict=True) if c == dim] for dim in range(len(shape))]
        orders = [[tuple(names), tuple(reversed(names))] if len(names) == 2 else [tuple(names)] for names in cuts]
        found += [Layout(dims, pending) for dims in product(*orders)]
    return [at for at in found if all(divides_evenly(size, i, mesh) for size, i in zip(shape, at.dims, strict=True))]


ONE = make_mesh(["x"], [4])
TWO = make_mesh(["dp", "tp"], [2, 2])


@pytest.mark.parametrize(
    ("tokens", "wanted", "kinds", "sent"),
    [
        (["S(0)"], ["R"], ["all_gather"], 3 * 8 * 6 * 2),
        (["R"], ["S(1)"], [], 0),
        (["P(sum)"], ["R"], ["all_reduce"], Fraction(2 * 3, 4) * 32 * 6 * 2),
        (["P(max)"], ["S(0)"], ["reduce_scatter"], 3 * 8 * 6 * 2),
        (["S(0)"], ["SS(0,2)"], ["all_gather"], 3 * 8 * 6 * 2),
    ],
)
def test_one_axis(tokens, wanted, kinds, sent) -> None:
    found, _, _ = planned(tokens, wanted, (32, 6 if "S(1)" not in wanted else 8), ONE)

    assert [one.kind for one in found] == kinds
    assert sum(one.ring_send_bytes for one in found) == sent


@pytest.mark.parametrize(
    ("tokens", "wanted", "kinds", "dims"),
    [
        (["P(sum)", "P(sum)"], ["R", "R"], ["all_reduce"], ["dp+tp"]),  # flattened: 3/2 of the buffer, not 2
        (["S(0)", "S(1)"], ["S(1)", "S(0)"], ["collective_permute"], ["world"]),
        (["S(0)", "S(0)"], ["R", "S(0)"], ["collective_permute", "all_gather"], ["world", "dp"]),
        (["S(0)", "S(0)"], ["S(0)", "R"], ["all_gather"], ["tp"]),
        (["S(0)", "R"], ["S(1)", "R"], ["all_to_all"], ["dp"]),
        (["P(sum)", "S(0)"], ["R", "S(0)"], ["all_reduce"], ["dp"]),
        (["S(0)", "S(0)"], ["R", "R"], ["all_gather"], ["dp+tp"]),
    ],
)
def test_two_axes(tokens, wanted, kinds, dims) -> None:
    found, _, _ = planned(tokens, wanted, (8, 8), TWO)

    assert [one.kind for one in found] == kinds
    assert [one.mesh_dim for one in found] == dims


def test_a_gradient_shard_of_replicas_is_scattered_before_it_is_reduced_across_them() -> None:
    """HSDP: the other order moves the whole gradient between replicas."""
    mesh = make_mesh(["rep", "shard"], [2, 4])
    found, _, _ = planned(["P(sum)", "P(sum)"], ["R", "S(0)"], (32, 8), mesh)

    assert [(one.kind, one.mesh_dim) for one in found] == [("reduce_scatter", "shard"), ("all_reduce", "rep")]
    assert sum(one.ring_send_bytes for one in found) == 3 * 8 * 8 * 2 + 8 * 8 * 2


def test_uneven_pieces_travel_padded() -> None:
    """10 rows on 4 ranks: pieces of 3 rows, 12 arrive."""
    (one,), _, _ = planned(["S(0)"], ["R"], (10, 2), ONE)

    assert (one.local_in, one.local_out) == ((3, 2), (12, 2))
    assert one.ring_send_bytes == 3 * 12


def test_nothing_makes_a_finished_sum_pending_again() -> None:
    _, moves, _ = planned(["R"], ["R"], (8, 8), ONE)

    assert moves.cost(Layout(((), ())), Layout(((), ()), (("x", "sum"),))) is None


@pytest.mark.parametrize("mesh", [TWO, make_mesh(["a", "b"], [2, 4])], ids=["2x2", "2x4"])
def test_the_path_is_the_cheapest_of_all_short_sequences(mesh) -> None:
    """Brute force: every sequence of up to three primitives between every two layouts."""
    shape = (16, 8)
    moves = Redistributor(shape, "f32", mesh)
    layouts = every_layout(shape, mesh)
    for source in layouts:
        best = {source: (0, 0, 0, 0, 0)}
        reached = dict(best)
        for _ in range(3):
            following = {}
            for here, cost in reached.items():
                for step in moves.steps(here):
                    total = add_costs(cost, cost_of(step.collectives, mesh.ranks, slices=int(step.kind == "slice")))
                    if step.after not in following or total < following[step.after]:
                        following[step.after] = total
            reached = following
            for layout, cost in reached.items():
                best[layout] = min(best.get(layout, cost), cost)
        for target, cost in best.items():
            found = moves.cost(source, target)
            assert found is not None
            assert found <= cost
            path = moves.path(source, target)
            if len(path) <= 3:
                assert found == cost


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_detour_is_cheaper(data) -> None:
    """The triangle inequality, which DTensor's prices break (pytorch issue 169439)."""
    mesh = make_mesh(["a", "b"], data.draw(st.sampled_from([[2, 2], [2, 3], [4, 2]])))
    moves = Redistributor((24, 48), "bf16", mesh)
    one, two, three = (data.draw(st.sampled_from(every_layout((24, 48), mesh))) for _ in range(3))
    direct, first, second = moves.cost(one, three), moves.cost(one, two), moves.cost(two, three)

    if first is not None and second is not None:
        assert direct is not None
        assert direct <= add_costs(first, second)


@examples(120)
@given(st.data())
def test_every_rank_ends_with_its_part(data) -> None:
    """Each primitive is carried out on arrays of virtual ranks, with what their own groups hold and nothing else."""
    names, sizes = data.draw(
        st.sampled_from([("x", [4]), ("xy", [2, 2]), ("xy", [2, 3]), ("xy", [4, 2]), ("xyz", [2, 2, 2])])
    )
    mesh, shape = make_mesh(list(names), sizes), (24, 48)
    reducer = data.draw(st.sampled_from(["sum", "max"])) if len(sizes) == 1 else "sum"
    layouts = every_layout(shape, mesh, (reducer,))
    source, target = data.draw(st.sampled_from(layouts)), data.draw(st.sampled_from(layouts))
    moves, world = Redistributor(shape, "bf16", mesh), World(mesh)
    if moves.cost(source, target) is None:
        assert target.pending  # only a finished sum cannot be made pending
        return
    rng = np.random.default_rng(0)
    whole = rng.normal(size=shape)
    pieces, here = world.scattered(whole, source, rng), source
    for step in moves.path(source, target):
        sizes_before = {piece.shape for piece in pieces}
        pieces = world.moved(step, here, pieces, shape)
        here = step.after
        world.check(pieces, here, whole, f"{placements_of(source, mesh)} -> {placements_of(here, mesh)} by {step.kind}")
        for one in step.collectives:
            assert {one.local_in} == sizes_before
            assert {one.local_out} == {piece.shape for piece in pieces}
    assert here == target


@pytest.mark.parametrize(
    ("tokens", "wanted", "shape"),
    [
        (["S(0)"], ["R"], (10, 2)),
        (["S(0)"], ["S(1)"], (10, 6)),
        (["P(sum)"], ["S(0)"], (10, 2)),
        (["SS(0,2)"], ["R"], (24, 2)),
        (["P(sum)"], ["SS(0,2)"], (24, 2)),
        (["SS(0,3)"], ["S(1)"], (24, 8)),
    ],
)
def test_uneven_and_strided_pieces_end_where_they_belong(tokens, wanted, shape) -> None:
    _, moves, (source, target) = planned(tokens, wanted, shape, ONE)
    world, rng = World(ONE), np.random.default_rng(0)
    whole = rng.normal(size=shape)
    pieces, here = world.scattered(whole, source, rng), source
    for step in moves.path(source, target):
        pieces, here = world.moved(step, here, pieces, shape), step.after
        world.check(pieces, here, whole, step.kind)
    assert here == target


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_rank_ends_with_its_part_where_no_mesh_axis_divides(data) -> None:
    """Of an uneven dim no two ranks may have the same number of elements, or some none; permutes must not confuse
    them.
    """
    mesh = make_mesh(["a", "b"], data.draw(st.sampled_from([[2, 3], [3, 2], [2, 2], [3, 3]])))
    shape = data.draw(st.tuples(st.integers(3, 13), st.integers(3, 13)))
    token = st.sampled_from(["R", "S(0)", "S(1)", "P(sum)"])
    source, target = (parse_placements(data.draw(st.tuples(token, token)), shape, mesh, of="x") for _ in range(2))
    moves, world = Redistributor(shape, "f32", mesh), World(mesh)
    moves.allow_irregular_specs([source, target])
    if moves.cost(source, target) is None:
        assert target.pending
        return
    rng = np.random.default_rng(0)
    whole = rng.normal(size=shape)
    pieces, here = world.scattered(whole, source, rng), source
    for step in moves.path(source, target):
        pieces, here = world.moved(step, here, pieces, shape), step.after
        world.check(pieces, here, whole, f"{placements_of(source, mesh)} -> {placements_of(here, mesh)} by {step.kind}")
    assert here == target


@pytest.mark.parametrize("mesh", [TWO, make_mesh(["a", "b"], [2, 4])], ids=["2x2", "2x4"])
def test_a_table_of_costs_has_those_of_every_pair(mesh) -> None:
    forward, back = Redistributor((16, 8), "f32", mesh), Redistributor((16, 8), "f32", mesh)
    layouts = every_layout((16, 8), mesh)

    for target in layouts:
        costs, ties = back.costs_between(layouts, [target])
        every = [forward.cost(at, target) for at in layouts]
        assert costs[:, 0].tolist() == [inf if one is None else one[0] for one in every]
        assert ties[:, 0].tolist() == [0 if one is None else tie_of(one) for one in every]
