"""nvFuser's figures as programs, and its notation for domains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.sharding.frontends.did import LoopDomain, parse_schedule_of, schedule_of
from planner.sharding.layouts.layout import Layout, placements_of
from planner.sharding.layouts.mesh import make_mesh
from planner.sharding.plans.plan import plan_sharding
from planner.sharding.problem.problem import parse_problem
from tests.tools.sharding_figures import FOLDER, figures

CASES = {case["id"]: case for case in json.loads(Path(FOLDER, "figures.json").read_text())["cases"]}
# nvFuser's document, "Communication-computation decomposition" and the figures after it: what each `set` and `sum` becomes.
COMMUNICATION = {
    "tensor parallelism": ["all_reduce"],
    "sequence parallelism": ["all_gather", "reduce_scatter"],
    "distributed data parallelism": [],
    "data parallelism across nodes, tensor parallelism within": ["all_reduce"],
    "fully sharded data parallelism": ["all_gather", "all_gather"],
}
MESH = make_mesh(["DIDy", "DIDx"], [2, 4])


@pytest.mark.parametrize("name", COMMUNICATION)
def test_each_figure_communicates_as_its_document_says(name) -> None:
    plan = plan_sharding(parse_problem(CASES[name]))

    assert [one.kind for one in plan.collectives] == COMMUNICATION[name]


def test_the_printed_programs_are_those_of_the_compiler() -> None:
    assert (FOLDER / "figures.md").read_text() == figures()


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
        ("outer_split(0, 3)", "not split into"),
        ("outer_split(0, 2); parallelize(0, DIDx)", "given to the 4 devices"),
        ("outer_split(0, 4); parallelize(0, Stream)", "no axis of the mesh"),
        ("outer_split(0, 4); parallelize(0, DIDx); outer_split(2, 4); parallelize(2, DIDx)", "two axes"),
        ("split(0, 4)", "cannot read"),
        ("outer_split(7, 4)", "no 7"),
        ("outer_split(0, DIDx)", "no number"),
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
