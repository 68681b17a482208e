"""Every operator that is known, with one dim of an operand sharded, and a training step of a sharded module."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402 - after the check for torch

from executor.sharding import api, capture  # noqa: E402 - as above
from planner.sharding.frontends.captured import graph_statements  # noqa: E402 - as above
from tests.executor.sharding import operators, ranks  # noqa: E402 - as above


@pytest.mark.parametrize("name", operators.OPERATORS)
def test_operators_are_known(name) -> None:
    module, _ = operators.known(name)

    found = graph_statements(capture(module, ()).graph)

    assert not [line.op for line in found if not line.known]


def test_operators_on_two_ranks_are_those_of_one_process() -> None:
    ranks.run(operators.every(1), 2)


@pytest.mark.nightly
def test_every_dim_of_every_operand() -> None:
    ranks.run(operators.every(), 2)


class Normalized(nn.Module):
    """Convolutions with batch norms, and a tensor without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.n = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.d, self.m = nn.Conv2d(8, 4, 3, groups=2), nn.BatchNorm2d(4, momentum=0.3)
        self.register_buffer("nothing", torch.empty(4, 0, 8, 8))
        self.double()

    def forward(self, x):
        y = torch.relu(self.n(torch.cat([self.nothing, self.c(x)], 1)))
        return self.m(self.d(y))


PLACED = (
    {"x": ["S(0)"]},
    {"x": ["S(3)"]},
    {"c.weight": ["S(0)"], "n.weight": ["S(0)"], "n.running_mean": ["S(0)"], "d.weight": ["S(0)"]},
)


def _training_worker() -> None:
    """Three steps with clipped gradients: parameters and running statistics are those of one process."""
    api.plan = ranks.planned_here
    for placements in PLACED:
        torch.manual_seed(0)
        alone, x = Normalized(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
        sharded = api.shard(alone, (x,), mesh={"d": 2}, placements=placements)
        norms = []
        for module in (alone, sharded):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            for _ in range(3):
                y = module(x)
                y = y if module is alone else y.full_tensor()
                optimizer.zero_grad()
                (y - 1.3).pow(3).sum().backward()
                norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                norms.append(norm if module is alone else norm.full_tensor())
                optimizer.step()
        torch.testing.assert_close(norms[:3], norms[3:])
        found, expected = sharded.state_dict(), alone.state_dict()
        assert found.keys() == expected.keys()
        for name, one in expected.items():
            torch.testing.assert_close(found[name].full_tensor(), one, msg=f"{placements} {name}")


def test_a_sharded_module_is_trained_as_any_module() -> None:
    ranks._on_ranks(_training_worker, 2)
