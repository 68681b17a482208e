"""A sharded module called with other batches and lengths than it was captured with: equal to one process."""

from __future__ import annotations

import copy
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import distributed as dist  # noqa: E402 - after the check for torch
from torch import nn  # noqa: E402 - after the check for torch
from torch.nn import functional as F  # noqa: E402, N812 - as above

from executor.sharding import api, shard  # noqa: E402 - as above
from tests.executor.sharding import ranks  # noqa: E402 - as above
from topology.errors import BadInput, UserError  # noqa: E402 - as above

CAPTURED = (4, 6)
SOME = [(3, 5), (1, 7)]  # batch and length
MORE = [*SOME, (6, 6), (2, 1), (8, 12), CAPTURED, (3, 5)]  # the last ones come again
BY_TIME = {"choose": ["*"], "policy": "min_time", "cluster": "h200x4"}


class Layer(nn.Module):
    """Attention with positions and a mask of its length, statistics of the batch, and a decision on its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("angles", torch.arange(16.0)[:, None] / 10, persistent=False)
        self.double()

    def forward(self, x, scale=None):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k + self.angles[:length], v, attn_mask=mask)
        y = self.out(y.transpose(1, 2).reshape(batch, length, width))
        with torch.no_grad():
            level = y.square().mean(-1, keepdim=True)
        if batch * length > 20:
            y = 2 * y
        if self.training:
            y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        return y / (1 + level) + x * (1 if scale is None else scale)


def _outcome(module, args, sharded):
    """Return the result, gradients of parameters and arguments, and buffers."""
    given = [one.clone().requires_grad_() for one in args]
    y = module(*given)
    y = y.full_tensor() if sharded else y
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    (y * weight).sum().backward()
    found = [y.detach(), *(one.grad for one in given)]
    for _, one in sorted(module.named_parameters()):
        found.append(one.grad.full_tensor() if sharded else one.grad)
        one.grad = None
    return found + [one.full_tensor() if sharded else one for _, one in sorted(module.named_buffers())]


def _worker(mesh, constraints, others) -> None:
    api.plan = ranks.planned_here
    for asked in constraints:
        torch.manual_seed(1)
        alone = Layer()
        x = torch.randn(*CAPTURED, 8, dtype=torch.float64, requires_grad=True)
        scale = torch.randn(CAPTURED[1], 1, dtype=torch.float64, requires_grad=True)
        sharded = shard(copy.deepcopy(alone), (x, scale), mesh=mesh, **asked)
        with torch.no_grad():  # autograd being off where a program is made does not mean that it stays off
            sharded(torch.randn(3, 5, 8).double(), torch.randn(5, 1).double())
            alone.norm.load_state_dict({n: one.full_tensor() for n, one in _norm(sharded).items()})
        for batch, length in others:
            args = (torch.randn(batch, length, 8).double(), torch.randn(length, 1).double())
            expected, found = _outcome(alone, args, sharded=False), _outcome(sharded, args, sharded=True)
            for number, (one, mine) in enumerate(zip(expected, found, strict=True)):
                torch.testing.assert_close(mine, one, rtol=1e-8, atol=1e-9, msg=f"{batch, length} {asked} {number}")
        for wrong in ((x[0], scale), (x.float(), scale), (x,)):
            with pytest.raises(BadInput):
                sharded(*wrong)
        with pytest.raises(UserError, match="cannot capture Layer"):
            sharded(x, scale[:5])


def _norm(sharded):
    return {name.removeprefix("norm."): one for name, one in sharded.state_dict().items() if name.startswith("norm.")}


def test_other_batches_and_lengths_are_equal_to_one_process() -> None:
    ranks._on_ranks(_worker, 2, {"d": 2}, [{"placements": {"x": ["S(0)"]}}], SOME)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "constraints"),
    [
        ({"d": 2}, [BY_TIME]),
        ({"d": 2}, [{"axes": {"x": "batch _ _"}, "parameters": {"batch": "d"}, "compute": {"batch": "d"}}]),
        ({"d": 2, "m": 2}, [{"placements": {"x": ["S(0)", "S(1)"], "qkv.weight": ["R", "S(0)"]}}, BY_TIME]),
    ],
)
def test_more_sizes_and_placements(mesh, constraints) -> None:
    ranks._on_ranks(_worker, 2 * len(mesh), mesh, constraints, MORE)


class Locked(nn.Module):
    """Holds what has no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.linear = threading.Lock(), nn.Linear(8, 8).double()

    def forward(self, x):
        return self.linear(x)


def _bounded_worker() -> None:
    planned = []
    api.plan, api.MOST_SIZES = lambda document, **of: planned.append(1) or ranks.planned_here(document, **of), 2
    torch.manual_seed(3)
    alone = nn.Linear(8, 8).double()
    sharded = shard(
        alone, (torch.randn(4, 8).double(),), mesh={"d": 2}, placements={"input": ["S(0)"], "weight": ["S(0)"]}
    )
    late = None
    for rows, programs in ((2, 2), (6, 3), (2, 3), (8, 4), (2, 4), (4, 4), (6, 5), (8, 6)):  # 2 stays, it is used
        x = torch.randn(rows, 8).double()
        y = sharded(x).full_tensor()
        torch.testing.assert_close(y, alone(x))
        if dist.get_rank() == 0:
            assert len(planned) == programs
        late = late or (x, y)
    late[1].square().sum().backward()  # of a program that is gone since
    (expected,) = torch.autograd.grad(alone(late[0]).square().sum(), alone.weight)
    torch.testing.assert_close(sharded.weight.grad.full_tensor(), expected)

    locked, x = Locked(), torch.randn(4, 8).double()
    sharded = shard(locked, (x,), mesh={"d": 2})
    torch.testing.assert_close(sharded(x).full_tensor(), locked(x))
    with pytest.raises(UserError, match=r"cannot be copied.*lock"):
        sharded(torch.randn(6, 8).double())


def test_programs_of_the_sizes_called_last_are_kept_and_a_module_without_a_copy_says_so() -> None:
    ranks._on_ranks(_bounded_worker, 2)


def _stages_worker() -> None:
    api.plan = ranks.planned_here
    torch.manual_seed(2)
    alone = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).double()
    stages = {"axis": "pp", "of": {"2": 1}, "micro_batches": 2}
    sharded = shard(alone, (torch.randn(4, 8).double(),), mesh={"pp": 2}, stages=stages)
    for batch in (8, 6):
        x = torch.randn(batch, 8).double()
        torch.testing.assert_close(sharded(x).full_tensor(), alone(x))
    with pytest.raises(BadInput, match="3, 8"):
        sharded(torch.randn(3, 8).double())


def test_stages_have_other_batches() -> None:
    ranks._on_ranks(_stages_worker, 2)
