"""nvFuser's notation for domains: splits of logical axes, given to devices, and how tensors in them move and are
computed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.sharding.layouts.layout import Layout, make_mesh, placements_of
from planner.sharding.layouts.loop_domain import LoopDomain, parse_schedule_of
from planner.sharding.problem.problem import parse_problem
from tests.examples import examples
from tests.planner.sharding.virtual_ranks import World, run

MESH = make_mesh(["DIDy", "DIDx"], [2, 4])


def schedule_of(layout, mesh):
    """Return the calls that make `layout`: the inverse of `parse_schedule_of`, without what is pending."""
    calls: list[str] = []
    position = 0
    for spec in layout.dims:
        for item in spec:
            calls.append(f"outer_split({position}, {item if isinstance(item, int) else mesh.size(item)})")
            if isinstance(item, str):
                calls.append(f"parallelize({position}, {item})")
            position += 1
        position += 1
    return "; ".join(calls)


@st.composite
def domains(draw, shape=(16, 24)):
    """Calls of the notation, with the loop domain that they are: by axis its logical dim, extent and device."""
    axes, calls = [(dim, size, "") for dim, size in enumerate(shape)], []
    for device in draw(st.lists(st.sampled_from(MESH.names), unique=True, max_size=2)):
        ranks = MESH.size(device)
        open_ = [n for n, (_, extent, on) in enumerate(axes) if not on and extent % ranks == 0]
        at = draw(st.sampled_from(open_))
        dim, extent, _ = axes[at]
        blocks = draw(st.sampled_from([n for n in range(1, extent // ranks + 1) if extent % (n * ranks) == 0]))
        if blocks > 1:  # devices inside blocks
            calls.append(
                draw(st.sampled_from([f"outer_split({at}, {blocks})", f"inner_split({at}, {extent // blocks})"]))
            )
            axes[at : at + 1] = [(dim, blocks, ""), (dim, extent // blocks, "")]
            at += 1
        calls += [f"outer_split({at}, {ranks})", f"parallelize({at}, {device})"]
        axes[at : at + 1] = [(dim, ranks, device), (dim, extent // blocks // ranks, "")]
    return "; ".join(calls), axes


def held(axes, dim, world, rank):
    """What a rank has of a dim, by the definition of a loop domain: the dim as an array over its loop axes."""
    own = [(extent, on) for of, extent, on in axes if of == dim]
    every = np.arange(math.prod(extent for extent, _ in own)).reshape([extent for extent, _ in own])
    return every[tuple(world.at(rank, on) if on else slice(None) for _, on in own)].ravel()


@given(domains())
def test_every_device_has_the_elements_of_its_loop_axes(drawn) -> None:
    calls, axes = drawn
    layout, world = parse_schedule_of(calls, (16, 24), MESH, of="w"), World(MESH)

    for rank in range(MESH.ranks):
        for dim, size in enumerate((16, 24)):
            assert world.indices(size, layout.dims[dim], rank).tolist() == held(axes, dim, world, rank).tolist()


@given(st.integers(1, 40), st.sampled_from(["outer_split(0, {n})", "inner_split(0, {width})"]))
def test_uneven_pieces_are_those_of_torch_chunk(size, split) -> None:
    """Pieces of ceil(size / n) elements until nothing is left, as torch.chunk has them; nvFuser masks what is
    beyond.
    """
    width = -(-size // 4)
    calls = split.format(n=4, width=width)
    if -(-size // width) != 4 and split.startswith("inner"):
        return  # pieces of so many elements are fewer than devices
    layout = parse_schedule_of(f"{calls}; parallelize(0, DIDx)", (size, 8), MESH, of="w")

    assert placements_of(layout, MESH) == ("R", "S(0)")
    for rank in range(MESH.ranks):
        own = range(size)[(rank % 4) * width :][:width]
        assert World(MESH).indices(size, layout.dims[0], rank).tolist() == list(own)


def case(ops, inputs, **more):
    mesh = {"names": list(MESH.names), "shape": list(MESH.shape)}
    return parse_problem({"id": "domains", "mesh": mesh, "ops": ops, "inputs": inputs, **more})


@examples(25)
@given(domains(), domains())
def test_a_tensor_moves_from_any_domain_to_any_other(here, there) -> None:
    target = placements_of(parse_schedule_of(there[0], (16, 24), MESH, of="y"), MESH)
    problem = case(["y = set(x)"], {"x": {"shape": [16, 24], "domain": here[0]}}, pins={"y": list(target)})

    run(problem, {"x": np.arange(16.0 * 24).reshape(16, 24)})


@examples(25)
@given(domains((8, 16)), domains((16, 24)), domains((24, 8)))
def test_products_of_any_domains_are_those_of_one_process(x, up, down) -> None:
    shapes = {"x": (8, 16), "up": (16, 24), "down": (24, 8)}
    drawn = zip(shapes.items(), (x, up, down), strict=True)
    inputs = {name: {"shape": list(shape), "domain": calls} for (name, shape), (calls, _) in drawn}
    rng = np.random.default_rng(0)

    run(case(["u = relu(x @ up)", "y = u @ down"], inputs), {name: rng.normal(size=n) for name, n in shapes.items()})


@pytest.mark.parametrize(
    "calls",
    [
        "inner_split(0, 4); parallelize(1, DIDx)",
        "split(0, 4); axis(1).parallelize(ParallelType.mesh_x)",
        "split(0, 4, inner_split=False); split(1, 4); merge(0); parallelize(1, mesh_x)",
    ],
)
def test_spellings_of_a_device_inside_a_split(calls) -> None:
    layout = parse_schedule_of(calls, (16, 8), MESH, of="w")

    assert layout.dims[0] == (4, "DIDx")
    assert placements_of(layout, MESH) == ("R", "SS(0,4)")


def test_a_split_that_devices_share_is_a_shard() -> None:
    layout = parse_schedule_of("outer_split(0, 4); parallelize(0, DIDx)", (16, 8), MESH, of="w")

    assert placements_of(layout, MESH) == ("R", "S(0)")


def test_devices_inside_blocks_are_strided_shards() -> None:
    fused = LoopDomain((16, 8), MESH).outer_split(0, 2).outer_split(1, 4).parallelize(1, "DIDx").layout()
    inner = LoopDomain((16, 8), MESH).inner_split(0, 4).parallelize(1, "DIDx").layout()

    assert placements_of(fused, MESH) == ("R", "SS(0,2)")
    assert inner.dims[0] == (4, "DIDx")


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ("outer_split(0, 3); outer_split(1, 2)", "part of an uneven split"),
        ("outer_split(0, 2); outer_split(1, 3)", "pieces of a part"),
        ("inner_split(0, 7)", "as torch.chunk has them"),
        ("outer_split(0, 5); merge(0)", "uneven"),
        ("outer_split(0, 2); parallelize(0, DIDx)", "given to the 4 devices"),
        ("outer_split(0, 4); parallelize(0, Stream)", "a stream"),
        ("outer_split(0, 4); parallelize(0, Vector)", "no axis of the mesh"),
        ("outer_split(0, 2); swizzle1d(0, DIDx); parallelize(0, Stream)", "do not go around the 4 devices"),
        ("outer_split(0, 4); swizzle1d(0, DIDx)", "on no stream"),
        ("outer_split(0, 2); parallelize(0, Stream); outer_split(1, 4); parallelize(1, DIDx)", "inside pieces"),
        ("outer_split(0, 4); parallelize(0, DIDx); outer_split(2, 4); parallelize(2, DIDx)", "two axes"),
        ("swizzle(0, 4)", "cannot read"),
        ("outer_split(0, 4, inner_split=True)", "says twice"),
        ("merge(0)", "of one dim each"),
        ("outer_split(0, 4); parallelize(0, DIDx); merge(0)", "on devices"),
        ("outer_split(7, 4)", "no 7"),
        ("outer_split(0, DIDx)", "cannot read"),
    ],
)
def test_what_is_no_placement_is_refused(calls, why) -> None:
    with pytest.raises(Exception, match=why):
        parse_schedule_of(calls, (16, 8), MESH, of="w")


SPECS = st.permutations(["DIDx", "DIDy", 2]).flatmap(
    lambda items: st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda cut: (tuple(items[: min(cut)]), tuple(items[min(cut) : max(cut)]))
    )
)


@given(SPECS)
def test_placements_go_out_as_they_came_in(specs) -> None:
    def trimmed(spec):
        while spec and isinstance(spec[-1], int):
            spec = spec[:-1]
        return spec

    layout = Layout(tuple(trimmed(spec) for spec in specs))
    assert parse_schedule_of(schedule_of(layout, MESH), (64, 64), MESH, of="w") == layout
