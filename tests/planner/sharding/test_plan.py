"""Whole programs: collectives and bytes by formula, and every tensor right on every virtual rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.sharding.layouts.layout import placements_of
from planner.sharding.plans.plan import plan_sharding
from tests.examples import examples
from tests.planner.sharding import cases, virtual_ranks
from tests.planner.sharding.known import KNOWN


@pytest.mark.parametrize(("stated", "collectives", "placements"), KNOWN, ids=[stated["id"] for stated, _, _ in KNOWN])
def test_known_graphs(stated, collectives, placements) -> None:
    problem = cases.problem(stated)

    found = plan_sharding(problem)

    assert [(c.kind, c.mesh_dim, float(c.ring_send_bytes)) for c in found.collectives] == collectives
    for name, tokens in placements.items():
        assert " ".join(placements_of(found.choice.layouts[name], problem.mesh)) == tokens
    virtual_ranks.run(problem, cases.values(problem), found=found)


@pytest.mark.parametrize("stated", [c for c, _, _ in KNOWN if "schedule" not in c], ids=lambda c: c["id"])
@pytest.mark.parametrize("policy", ["min_ring_bytes", "follow_weights"])
def test_every_policy_computes_the_same(stated, policy) -> None:
    problem = cases.problem({**stated, "policy": policy})

    virtual_ranks.run(problem, cases.values(problem))


SIZES = {"t": 8, "h": 4, "f": 12}
# Each takes tensors of given dims to one of given dims; "?" is the new name.
STEPS = [
    ("? = linear({}, {}) :: t h+, f h+ -> t f", ("t h", "f h"), "t f"),
    ("? = linear({}, {}) :: t f+, h f+ -> t h", ("t f", "h f"), "t h"),
    ("? = {}.T @ {} :: t+ f, t+ h -> f h", ("t f", "t h"), "f h"),
    ("? = einsum('tf,th->fh', {}, {}) :: t+ f, t+ h -> f h", ("t f", "t h"), "f h"),
    ("? = linear({}, {}, {}) :: t h+, f h+, f -> t f", ("t h", "f h", "f"), "t f"),
    ("? = gelu({}) :: t h -> t h", ("t h",), "t h"),
    ("? = {} + {} :: t f, t f -> t f", ("t f", "t f"), "t f"),
    ("? = {} - {} :: t h, t h -> t h", ("t h", "t h"), "t h"),
    ("? = silu({}) * {} :: t f, t f -> t f", ("t f", "t f"), "t f"),
    ("? = {}.T :: f h -> h f", ("f h",), "h f"),
    ("? = {}.sum(0) :: t+ f -> f", ("t f",), "f"),
    ("? = gelu({}).mean(0) :: t+ f -> f", ("t f",), "f"),
    ("? = softmax({}, -1) :: t f* -> t f", ("t f",), "t f"),
    ("? = rmsnorm({}, {}) :: t f*, f -> t f", ("t f", "f"), "t f"),
    ("? = set({}) :: f h -> f h", ("f h",), "f h"),
    ("? = 3.0 * {} :: t h -> t h", ("t h",), "t h"),
]


@st.composite
def graphs(draw):
    """Up to five operators on what is there so far, over one or two mesh axes, placed and pinned at will."""
    mesh = draw(st.sampled_from([{"x": 2}, {"x": 4}, {"a": 2, "b": 2}]))
    token = st.sampled_from(["R", "R", "S(0)", "S(1)", "P(sum)"])
    known = {"t h": ["x", "d"], "f h": ["w"], "h f": ["v"], "t f": ["g"], "f": ["c"]}
    inputs, shapes = {}, {name: dims for dims, names in known.items() for name in names}
    for name, dims in shapes.items():
        tokens = [draw(token) for _ in mesh]
        inputs[name] = f"{dims}: {' '.join(t if t != 'S(1)' or ' ' in dims else 'R' for t in tokens)}"
    ops, pins = [], {}
    for number in range(draw(st.integers(1, 5))):
        text, wanted, result = draw(st.sampled_from(STEPS))
        name = f"o{number}"
        ops.append(text.replace("?", name).format(*(draw(st.sampled_from(known[dims])) for dims in wanted)))
        known[result] = [*known[result], name, name]
        if draw(st.integers(0, 3)) == 0:
            pins[name] = " ".join(draw(st.sampled_from(["R", "S(0)"])) for _ in mesh)
    policy = draw(st.sampled_from(["min_ring_bytes", "follow_weights", None]))
    return cases.case("drawn", mesh, ops, inputs, SIZES, pins, policy=policy)


@examples(80)
@given(graphs())
def test_any_graph_computes_what_one_process_computes(stated) -> None:
    problem = cases.problem(stated)

    virtual_ranks.run(problem, cases.values(problem))
