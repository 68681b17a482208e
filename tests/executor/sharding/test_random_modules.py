"""Random modules on two ranks, some of every kind; `tests/bench/shard_random_modules.py` runs thousands."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402 - after the check for torch

from executor.sharding import api  # noqa: E402 - as above
from tests.executor.sharding import ranks  # noqa: E402 - as above
from tests.executor.sharding.random_modules import STRATA  # noqa: E402 - as above
from tests.executor.sharding.random_runs import Run, check  # noqa: E402 - as above
from topology.errors import PlannerError  # noqa: E402 - as above

OF_EACH = 2


class Returned(nn.Module):
    """An argument and a parameter as they are among the results, one without a gradient, one that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v, self.u = (nn.Parameter(torch.randn(5, 5, dtype=torch.float64)) for _ in range(3))

    def forward(self, x, y):
        return x @ self.w, y, self.v, (x @ self.u).detach(), x @ self.u, y + self.w.sum()


class Codebook(nn.Module):
    """A table that follows what is encoded, written without autograd as in a VQ-VAE with averages."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 5).double()
        self.register_buffer("table", torch.randn(4, 5, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        y = self.encoder(x)
        with torch.no_grad():
            near = (y.unsqueeze(-2) - self.table).square().sum(-1).argmin(-1)
            hits = nn.functional.one_hot(near, 4).double()
            self.table.lerp_(hits.T @ y / (hits.sum(0)[:, None] + 1), 0.1)
            self.table[0].add_(y.mean(0), alpha=0.5)
            self.calls += 1
        return (y - self.table[near]).square() * y, y + (self.table[near] - y).detach()


def _check_norms_of_half_precision() -> None:
    """Results have the dtype of the operand where weights have more bits and the rows are cut."""
    x = torch.randn(3, 8).bfloat16()
    for norm in (nn.RMSNorm(8), nn.LayerNorm(8)):
        asked = {"placements": {"weight": ["S(0)"]}, "policy": "follow_weights"}
        found = api.shard(norm, (x,), mesh={"d": 2}, **asked)(x)
        assert found.dtype == torch.bfloat16, norm
        torch.testing.assert_close(found.full_tensor(), norm(x), rtol=2e-2, atol=2e-2)


def _worker() -> None:
    api.plan = ranks.planned_here
    torch.manual_seed(0)
    x, y = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    for placed in ({"y": ["S(0)"], "v": ["S(1)"]}, {"y": ["S(1)"], "output1": ["S(0)"]}):
        check(Returned(), (x, y), {"d": 2}, {"placements": placed})
    for placed in ({"x": ["S(0)"]}, {"table": ["S(1)"], "encoder_weight": ["S(0)"]}):
        check(Codebook(), (x,), {"d": 2}, {"placements": placed})
    _check_norms_of_half_precision()
    equal = 0
    for stratum in STRATA:
        for number in range(OF_EACH):
            run = Run(stratum, number, mesh="2")
            if run.refused:
                continue
            try:
                check(run.module, run.args, {"d": 2}, run.asked, captured=run.captured)
            except PlannerError:
                continue
            except AssertionError as error:
                raise AssertionError(run.name) from error
            equal += 1
    assert equal >= 0.9 * OF_EACH * len(STRATA)


def test_random_modules_are_those_of_one_process() -> None:
    ranks._on_ranks(_worker, 2)
