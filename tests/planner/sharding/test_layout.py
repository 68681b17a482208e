"""Placements and layouts say the same, and cut as torch.chunk does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.sharding.layouts.layout import (
    Layout,
    local_shape,
    make_mesh,
    normalize_spec,
    parse_placements,
    placements_of,
)
from tests.planner.sharding.virtual_ranks import World
from topology.errors import BadInput

MESH = make_mesh(["dp", "tp"], [2, 4])


@pytest.mark.parametrize(
    ("tokens", "dims"),
    [
        (["S(0)", "R"], (("dp",), ())),
        (["S(0)", "S(0)"], (("dp", "tp"), ())),
        (["SS(0,4)", "S(0)"], (("tp", "dp"), ())),  # FSDP of a tensor-parallel weight
        (["R", "SS(0,2)"], ((2, "tp"), ())),  # inside each half of a fused gate|up weight
        (["S(0)", "SS(0,2)"], (("dp", 2, "tp"), ())),
        (["SS(1, 3)", "S(0)"], (("tp",), (3, "dp"))),
    ],
)
def test_tokens_and_items_say_the_same(tokens, dims) -> None:
    layout = parse_placements(tokens, (48, 48), MESH, of="x")

    assert layout == Layout(dims)
    assert list(placements_of(layout, MESH)) == [token.replace(" ", "") for token in tokens]


def test_a_strided_shard_is_the_middle_index_of_its_view() -> None:
    """The definition of SS(k, f): view dim k as [f, n, rest] and take index r of n."""
    world, layout = World(MESH), parse_placements(["R", "SS(0,2)"], (24,), MESH, of="x")

    for rank in range(8):
        tp = rank % 4
        assert list(world.indices(24, layout.dims[0], rank)) == list(np.arange(24).reshape(2, 4, 3)[:, tp].ravel())


def test_pieces_of_a_dim_that_does_not_divide_are_chunks() -> None:
    """10 rows on 4 ranks are 3, 3, 3, 1, and the buffer is padded to 3."""
    mesh = make_mesh(["x"], [4])
    layout = parse_placements(["S(0)"], (10, 2), mesh, of="x")
    world = World(mesh)

    assert [len(world.indices(10, layout.dims[0], rank)) for rank in range(4)] == [3, 3, 3, 1]
    assert local_shape((10, 2), layout, mesh) == (3, 2)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        (["S(2)", "R"], "2 dims"),
        (["R"], "2 axes"),
        (["X", "R"], "no placement"),
        (["P(xor)", "R"], "unknown reduction"),
        (["SS(0,5)", "R"], "not possible"),
        (["R", "SS(0,0)"], "positive"),
        (["S(-1)", "R"], "no placement"),
        (["S(99999999999)", "R"], "no placement"),
    ],
)
def test_what_is_no_placement_is_refused_with_a_reason(tokens, why) -> None:
    with pytest.raises(BadInput, match=why):
        parse_placements(tokens, (48, 48), MESH, of="x")


@given(st.data())
def test_any_layout_survives_being_written_as_tokens(data) -> None:
    """Every way to cut dims by distinct mesh axes, with blocks left whole in between, has placements that say it."""
    mesh = make_mesh(["a", "b", "c"], [2, 3, 2])
    axes = data.draw(st.permutations(mesh.names))
    dims: list[list[str | int]] = [[], []]
    for axis in axes[: data.draw(st.integers(0, 3))]:
        dim = data.draw(st.sampled_from(dims))
        block = data.draw(st.sampled_from([1, 2, 5]))
        dim += [block, axis]
    layout = Layout(tuple(normalize_spec(items) for items in dims))
    shape = (2**3 * 3**1 * 5**3 * 8, 2**3 * 3 * 5**3 * 8)

    tokens = placements_of(layout, mesh)
    again = parse_placements(tokens, shape, mesh, of="x")

    world = World(mesh)
    for rank in range(mesh.ranks):
        for size, one, other in zip(shape, layout.dims, again.dims, strict=True):
            assert np.array_equal(world.indices(size, one, rank), world.indices(size, other, rank))
    held = [len(world.indices(size, items, 0)) for size, items in zip(shape, layout.dims, strict=True)]
    assert local_shape(shape, layout, mesh) == tuple(held)
