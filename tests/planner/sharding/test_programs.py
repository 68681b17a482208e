"""Whole programs: collectives and bytes in closed form, and every tensor right on every virtual rank."""

import pytest

from planner.sharding.layout import tokens_of
from planner.sharding.steps import answer
from tests.planner.sharding import cases, virtual_ranks


@pytest.mark.parametrize(
    ("stated", "collectives", "placements"), cases.KNOWN, ids=[stated["id"] for stated, _, _ in cases.KNOWN]
)
def test_known_graphs(stated, collectives, placements) -> None:
    problem = cases.problem(stated)

    found = answer(problem)

    assert [(c.kind, c.mesh_dim, float(c.ring_send_bytes)) for c in found.collectives] == collectives
    for name, tokens in placements.items():
        assert " ".join(tokens_of(found.choice.layouts[name], problem.mesh)) == tokens
    virtual_ranks.run(problem, cases.values(problem), found=found)


@pytest.mark.parametrize("stated", [c for c, _, _ in cases.KNOWN if "schedule" not in c], ids=lambda c: c["id"])
@pytest.mark.parametrize("policy", ["min_ring_bytes", "follow_weights"])
def test_every_policy_computes_the_same(stated, policy) -> None:
    problem = cases.problem({**stated, "policy": policy})

    virtual_ranks.run(problem, cases.values(problem))
