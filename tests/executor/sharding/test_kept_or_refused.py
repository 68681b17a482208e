"""What torch.export changes of a module on its way is kept on ranks, or refused by name: never wrong in silence."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402 - after the check for torch
from torch.utils.checkpoint import checkpoint  # noqa: E402 - as above

from executor.sharding import api, capture  # noqa: E402 - as above
from tests.executor.sharding import ranks  # noqa: E402 - as above
from tests.executor.sharding.ranks import Case, run  # noqa: E402 - as above
from topology.errors import BadInput, UserError  # noqa: E402 - as above

torch.manual_seed(0)
X = torch.randn(4, 6, 8, dtype=torch.float64)


class Two(nn.Module):
    """Two linear layers, combined by a function of the module and its input, by its name in this file."""

    def __init__(self, how, wide=True) -> None:
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        if wide:
            self.double()

    def forward(self, x):
        return globals()[self.how](self, x)


def straight_through(self, x):
    y = self.a(x)
    return self.b(y + (y.round() - y).detach())


def quantized(self, x):
    """As in a VQ-VAE: the nearest row of a table, its gradient handed to what was encoded, and the commitment loss."""
    encoded = self.a(x)
    near = (encoded.unsqueeze(-2) - self.b.weight).square().sum(-1).argmin(-1)
    rows = self.b.weight[near]
    chosen = encoded + (rows - encoded).detach()
    return chosen + (rows.detach() - encoded).square() + (rows - encoded.detach()).square()


def weight_decomposed(self, x):
    """As in DoRA: a direction whose norm no gradient passes."""
    return nn.functional.linear(x, self.a.weight / self.a.weight.norm(dim=1, keepdim=True).detach()) * self.b(x)


def without_grad(self, x):
    with torch.no_grad():
        y = self.b(x)
        scale = y.square().mean(-1, keepdim=True)
        with torch.enable_grad():
            z = self.a(y)
    return self.a(x) * y + z / (1 + scale) + self.b(x)


def in_place_beside(self, x):
    y = self.a(x)
    y[:, 0] = 0.0
    with torch.no_grad():
        z = self.b(x)
    return y * z + self.b(x).detach()


def masked(self, x):
    scores = self.a(x) @ x.transpose(-1, -2)
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ self.b(x)


def autocast_inside(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.a(x)
        z = torch.softmax(y @ y.transpose(-1, -2), -1) @ y + x
        with torch.autocast("cpu", enabled=False):
            z = z + self.b(y.float())
        return (self.b(z) * y).float()


def relu_around(self, x):
    return self.b(torch.relu(self.a(x))) * x


def detached_factor(self, x):
    return self.a(x) * self.b(x).detach()


def detached_term(self, x):
    """One layer gets no gradient at all."""
    return self.a(x) + self.b(x).detach()


def in_a_row(self, x):
    return self.b(self.a(x))


def checkpointed(self, x):
    return self.b(checkpoint(self.a, x, use_reentrant=False))


KEPT = (
    "detached_factor",
    "detached_term",
    "straight_through",
    "quantized",
    "weight_decomposed",
    "without_grad",
    "in_place_beside",
    "masked",
    "checkpointed",
    "detached_in_place",
    "written_copy",
    "mapped",
    "slope",
    "filled_diagonal",
    "complex_factor",
    "read_data",
    "result_without_loss",
)
PLACED = [{"x": ["S(0)"]}, {"x": ["S(1)"]}, {"*.weight": ["S(0)"]}, {"a.weight": ["S(1)"], "x": ["S(2)"]}]


def detached_in_place(self, x):
    """A write into what was detached gives it a gradient again."""
    state = self.b(x).tanh()
    state.detach_().mul_(self.a(x))
    return state * x


def written_copy(self, x):
    y = self.a(x)
    shown = y.detach()
    shown[:, 0] *= self.b(x)[:, 1]
    return shown + self.a(x)


def mapped(self, x):
    return torch.vmap(lambda row: self.a(row).softmax(-1) * self.b(row).sum())(x)


def slope(self, x):
    y = self.a(x)
    return torch.autograd.grad(y.sin().sum(), y, create_graph=True)[0] * self.b(x)


def filled_diagonal(self, x):
    scores = self.a(x)[0] @ self.b(x)[0].mT
    return scores.fill_diagonal_(0.5) @ x


def complex_factor(self, x):
    return (self.a(x) * 2j - (1 + 1j)).imag * self.b(x) / float("inf") + self.a(x)


def read_data(self, x):
    return self.a(x) * self.b(x).data + self.b.weight.data.abs().sum(0)


def result_without_loss(self, x):
    """Its gradient is zero times infinity where it is taken for zeros."""
    y = self.a(x)
    return self.b(y), y * self.b(x) * float("inf")


def result_of_a_stage(self, x):
    y = self.a(x)
    return y.sin(), self.b(y)


def powers(self, x):
    return self.b(torch.vander(self.a(x)[0, 0], 8))


def products(self, x):
    """What `powers` is, of operators that torch differentiates: vander's own backward pass raises an error."""
    return self.b(self.a(x)[0, 0].unsqueeze(-1) ** torch.arange(8).flip(0))


class Averaged(Two):
    """Its buffer is written in two regions without autograd, in one of them through a view, and after them."""

    def __init__(self) -> None:
        super().__init__("averaged")
        self.register_buffer("mean", torch.ones(8, dtype=torch.float64))


def averaged(self, x):
    y = self.a(x)
    with torch.no_grad():
        self.mean.mul_(0.9).add_(y.mean((0, 1)))
    z = self.b(y) + self.mean
    with torch.no_grad():
        self.mean[2:].add_(z.std((0, 1))[2:])
    self.mean.mul_(2)
    return z + self.mean


def frozen():
    module = Two("in_a_row")
    module.a.requires_grad_(False)
    return module


def test_gradients_pass_where_they_do_on_one_process() -> None:
    cases = [
        Case(f"{how}, {placed}", Two(how), (X,), {"d": 2}, {"placements": placed})
        for number, how in enumerate(KEPT)
        for placed in (PLACED[number % 4], PLACED[(number + 1) % 4])
    ]
    cases += [Case(f"frozen, {placed}", frozen(), (X,), {"d": 2}, {"placements": placed}) for placed in PLACED[:2]]
    stages = {"stages": {"axis": "d", "of": {"b": 1}, "micro_batches": 2}}
    cases += [Case("stages", Two("result_of_a_stage"), (X,), {"d": 2}, {"placements": {"x": ["R"]}, **stages})]
    run(cases, 2)


def test_inputs_that_require_gradients_have_them() -> None:
    cases = [
        Case(f"{how}, {placed}", Two(how), (X.clone().requires_grad_(),), {"d": 2}, {"placements": placed})
        for how in ("detached_factor", "masked")
        for placed in (PLACED[0], PLACED[3])
    ]
    run(cases, 2)


def _autocast_worker():
    api.plan = ranks.planned_here
    torch.manual_seed(1)
    x, close = X.float(), {"rtol": 2e-2, "atol": 2e-2}
    for name, around, how in (
        ("inside", contextlib.nullcontext(), "autocast_inside"),
        ("around", torch.autocast("cpu", dtype=torch.bfloat16), "relu_around"),
    ):
        module = Two(how, wide=False)
        with around:
            expected = module(x)
            sharded = api.shard(module, (x,), mesh={"d": 2}, placements={"x": ["S(0)"], "b.weight": ["S(1)"]})
            found = sharded(x)
        assert found.dtype == expected.dtype
        dtypes = {node.dtype for node in sharded.captured.graph.nodes}
        assert "bf16" in dtypes, name
        torch.testing.assert_close(found.full_tensor(), expected.detach(), **close, msg=name)
        wanted = torch.autograd.grad(expected.float().square().sum(), list(module.parameters()))
        found.full_tensor().float().square().sum().backward()
        for (parameter, found), gradient in zip(sharded.named_parameters(), wanted, strict=True):
            off = (found.grad.full_tensor() - gradient).norm() / gradient.norm()
            assert off < 0.1, f"{name} {parameter}"  # eight bits, added up in another order
    with pytest.raises(BadInput, match="autocast"):
        sharded(x)


def test_autocast_casts_what_it_casts_on_one_process() -> None:
    ranks._on_ranks(_autocast_worker, 2)


class Flagged(Two):
    def forward(self, x, flag=True):
        return super().forward(x) if flag else self.a(x)


def _calls_worker():
    api.plan = ranks.planned_here
    module = Flagged("in_a_row")
    sharded = api.shard(module, (X,), {"flag": True}, mesh={"d": 2}, placements={"x": ["S(0)"]})
    expected = module(X)
    torch.testing.assert_close(sharded(X, flag=True).full_tensor(), expected)
    others = {
        "6, 8": ((X[0],), {"flag": True}),
        "float32": ((X.float(),), {"flag": True}),
        "False": ((X,), {"flag": False}),
        "other arguments": ((X,), {}),
        "requires a gradient": ((X.clone().requires_grad_(),), {"flag": True}),
    }
    for what, (args, kwargs) in others.items():
        with pytest.raises(BadInput, match=what):
            sharded(*args, **kwargs)
    with pytest.raises(UserError, match="mode"):
        sharded.eval()
    with torch.no_grad():  # nothing is asked of it
        sharded(X.clone().requires_grad_(), flag=True)


def test_a_call_is_the_one_that_was_captured() -> None:
    ranks._on_ranks(_calls_worker, 2)


def _equal_worker():
    """A sharded module is as `alone`, in its result, its gradients and its buffers, in two calls."""
    api.plan = ranks.planned_here
    for module, alone in ((Averaged(), Averaged()), (Two("powers"), Two("products"))):
        alone.load_state_dict(module.state_dict())
        sharded = api.shard(module, (X,), mesh={"d": 2}, placements={"x": ["S(1)"]})
        for _ in range(2):
            expected, found = alone(X), sharded(X).full_tensor()
            torch.testing.assert_close(found, expected)
            expected.sum().backward()
            found.sum().backward()
        for (name, one), other in zip(sharded.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, msg=name)
        for one, other in zip(sharded.buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(one.full_tensor(), other)


def test_buffers_written_twice_and_powers_are_those_of_one_process() -> None:
    ranks._on_ranks(_equal_worker, 2)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def hooked():
    module = Two("in_a_row")
    module.a.register_full_backward_hook(lambda *_: None)
    return module


def watched():
    module = Two("in_a_row")
    module.a.weight.register_hook(lambda gradient: 2 * gradient)
    return module


def reversed_gradient(self, x):
    return self.b(Reversed.apply(self.a(x)))


def reentrant(self, x):
    return self.b(checkpoint(self.a, x, use_reentrant=True))


def branch(self, x):
    return self.a(x) if x.sum() > 0 else self.b(x)


def experts_with_tokens(self, x):
    rows = self.a(x).flatten(0, 1)
    for expert in (rows > 0).sum(0).nonzero():
        rows = rows + expert
    return rows


def rows_of_an_expert(self, x):
    rows, made = self.a(x).flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
    for expert in range(2):
        (mine,) = torch.where(rows.argmax(-1) == expert)
        made.index_add_(0, mine, self.b(rows[mine]))
    return made


def number(self, x):
    return self.a(x) * self.b(x).sum().item()


def noise_like(self, x):
    return self.a(x) + torch.randn_like(x)


def noise(self, x):
    return self.a(x) + torch.rand(8, dtype=x.dtype)


def tensor_hook(self, x):
    y = self.a(x)
    y.register_hook(lambda gradient: -gradient)
    return self.b(y)


def counting(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return self.a(x) * self.calls


def counted():
    module = Two("counting")
    module(X)
    return module


def written_without_grad(self, x):
    y = self.a(x)
    with torch.no_grad():
        y[:, 0] = 0.0
    return self.b(y)


def written_argument(self, x):
    y = self.a(x)
    x[:, 0] = 0.0
    return self.b(y) + x


def written_through_detach(self, x):
    y = self.a(x)
    y.detach()[:, 0] = 0.0
    return y * x


def written_data(self, x):
    y = self.a(x)
    y.data.clamp_(0, 1)
    return self.b(y)


def assigned_data(self, x):
    y = self.a(x)
    y.data = y.clamp(0, 1)
    return self.b(y)


def without_grad_in_autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        y = self.b(x)
    return self.a(x) * y


def with_grad_in_autocast(self, x):
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.enable_grad():
        y = self.b(x)
    return self.a(x) * y


def differentiated(self, x):
    return torch.func.grad(lambda y: y.sin().sum())(self.a(x)) * x


def branches(self, x):
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (self.a(x),))


def kept_statistics(self, x):
    statistics = torch.ones(6, dtype=x.dtype), torch.ones(6, dtype=x.dtype)
    return nn.functional.instance_norm(self.a(x), *statistics, use_input_stats=True)


def places_in_memory(self, x):
    return self.a(x).mT.as_strided((4, 3), (1, 4))


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (Two("written_through_detach"), "writes through detach() or data"),
        (Two("written_data"), "writes through detach() or data"),
        (Two("assigned_data"), "data is assigned"),
        (Two("without_grad_in_autocast"), "switched off inside torch.autocast"),
        (Two("with_grad_in_autocast"), "switched on inside torch.autocast"),
        (Two("differentiated"), "torch.func differentiates"),
        (Two("branches"), "cond is no operator"),
        (Two("kept_statistics"), "running statistics of an instance norm"),
        (Two("places_in_memory"), "lies in memory"),
        (Two("reversed_gradient"), "Reversed is an autograd.Function"),
        (Two("reentrant"), "CheckpointFunction"),
        (hooked(), "a has a hook of the backward pass"),
        (watched(), "a.weight has a hook of the backward pass"),
        (Two("tensor_hook"), "a hook of a tensor's gradient"),
        (counted(), "changes its attribute calls"),
        (Two("written_without_grad"), "without autograd"),
        (Two("written_argument"), "writes into x"),
        (Two("branch"), "return self.a(x) if x.sum() > 0 else self.b(x)"),
        (Two("experts_with_tokens"), "for expert in (rows > 0).sum(0).nonzero():"),
        (Two("rows_of_an_expert"), "depends on values of tensors"),
        (Two("number"), "a number of a tensor's values"),
        (Two("noise_like"), "random numbers"),
        (Two("noise"), "random numbers"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(module, what) -> None:
    with pytest.raises(UserError) as caught:
        capture(module, (X,))

    assert what in caught.value.what
