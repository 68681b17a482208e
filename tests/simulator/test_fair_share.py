"""Max-min fairness against its definition, solved by linear programs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp

from simulator.engine.contention import Flow, max_min_speeds, water_fill


def _largest(flows, capacity, floors, goal):
    """Return the largest rate flow `goal` (None: the smallest of the unfixed) can have with everybody above a floor."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    rates = [solver.NumVar(0, flow.rate * flow.cap, f"r{i}") for i, flow in enumerate(flows)]
    for resource, limit in capacity.items():
        used = [
            rates[i] * (amount / flow.rate) for i, flow in enumerate(flows) for r, amount in flow.uses if r == resource
        ]
        if used:
            solver.Add(sum(used) <= limit)
    level = solver.NumVar(0, solver.infinity(), "level")
    for i, floor in enumerate(floors):
        solver.Add(rates[i] >= (level if floor is None else floor))
    solver.Maximize(level if goal is None else rates[goal])
    for i, floor in enumerate(floors):
        if goal is not None and floor is None and i != goal:
            solver.Add(rates[i] >= 0)
    assert solver.Solve() == pywraplp.Solver.OPTIMAL
    return solver.Objective().Value()


def _by_definition(flows, capacity):
    """Raise the smallest rate as far as it goes, fix those that cannot go further, repeat."""
    fixed = [None] * len(flows)
    while None in fixed:
        level = _largest(flows, capacity, fixed, None)
        floors = [level if value is None else value for value in fixed]
        for i, value in enumerate(list(fixed)):
            slack = [f - 1e-9 * (1 + f) for f in floors]
            if value is None and _largest(flows, capacity, slack, i) <= level * (1 + 1e-6) + 1e-6:
                fixed[i] = level
    return [rate / flow.rate for rate, flow in zip(fixed, flows, strict=True)]


_flow = st.builds(
    lambda rate, links, cap: Flow(
        float(rate), tuple((link, float(rate * share)) for link, share in links.items()), cap
    ),
    st.integers(1, 20),
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=3),
    st.sampled_from([1.0, 0.5, 0.25]),
)


@settings(max_examples=80, deadline=None)
@given(flows=st.lists(_flow, min_size=1, max_size=6), limits=st.lists(st.integers(1, 40), min_size=4, max_size=4))
def test_equals_the_definition(flows, limits):
    capacity = dict(zip("abcd", map(float, limits), strict=True))

    assert max_min_speeds(flows, capacity) == pytest.approx(_by_definition(flows, capacity), rel=1e-4, abs=1e-4)


def test_equal_flows_share_a_link_equally():
    flows = [Flow(100.0, (("link", 100.0),))] * 4

    assert max_min_speeds(flows, {"link": 100.0}) == pytest.approx([0.25] * 4)


def test_a_small_flow_keeps_its_rate_and_the_others_share_the_rest():
    flows = [Flow(10.0, (("link", 10.0),)), Flow(100.0, (("link", 100.0),)), Flow(100.0, (("link", 100.0),))]

    assert max_min_speeds(flows, {"link": 100.0}) == pytest.approx([1.0, 0.45, 0.45])


def test_the_parking_lot():
    """One long flow over n links, a short one on each: all get half."""
    long = Flow(1.0, tuple((i, 1.0) for i in range(5)))
    short = [Flow(1.0, ((i, 1.0),)) for i in range(5)]

    assert max_min_speeds([long, *short], dict.fromkeys(range(5), 1.0)) == pytest.approx([0.5] * 6)


def test_a_flow_that_asks_for_nothing_gets_its_cap():
    assert max_min_speeds([Flow(0.0, (), 0.75)], {}) == [0.75]


def test_water_fill():
    assert water_fill([1.0, 8.0, 8.0], 9.0) == pytest.approx([1.0, 4.0, 4.0])
    assert water_fill([4.0, 2.0], 10.0) == pytest.approx([4.0, 2.0])
    assert water_fill([4.0], 0.0) == [0.0]
