"""Selective recomputation: what is kept is computed once, and everything comes out as if all had been kept."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - after the check for torch

from executor.model.decoder import Decoder, init_weights  # noqa: E402 - as above
from executor.model.saved_results import ATTENTION  # noqa: E402 - as above
from executor.overlap.autograd import AllGatherMatmul, MatmulReduceScatter  # noqa: E402 - as above
from executor.overlap.nccl import Nccl  # noqa: E402 - as above
from executor.parallel import activation_checkpoint  # noqa: E402 - as above
from executor.parallel.activation_checkpoint import apply_activation_checkpoint  # noqa: E402 - as above
from executor.parallel.tensor_overlap import SavingMode  # noqa: E402 - as above
from tests.executor.workers.verify_worker import MODELS  # noqa: E402 - as above

TOKENS = torch.arange(24).reshape(2, 12)
LAYERS = 2
PRODUCTS = 7  # of a dense layer: q, k, v, o, gate, up, down


class Counted(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        self.products += name in {"mm", "addmm"}
        self.attentions += name in ATTENTION
        return func(*args, **(kwargs or {}))


def decoder(mode: str, model: str = "llama", dtype=torch.float64, *, away: bool = False) -> Decoder:
    made = Decoder(MODELS[model]).to(dtype)
    init_weights(made, seed=1)
    made.set_positions(torch.arange(12), dtype)
    apply_activation_checkpoint(made, mode, early_stop=False, compiled=False, away=away)
    return made


def gradients(made: Decoder) -> dict[str, torch.Tensor]:
    made(TOKENS).square().sum().backward()
    return {name: parameter.grad for name, parameter in made.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("model", ["llama", "qk_norm", "latent", "window", "shared"])
def test_gradients_are_those_without_recomputation(model: str) -> None:
    expected, found = gradients(decoder("none", model)), gradients(decoder("selective-op", model))

    assert expected.keys() == found.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12 * float(expected[name].abs().max()))


def test_what_blocks_keep_waits_in_host_memory_and_nothing_else(monkeypatch) -> None:
    """One tensor a layer goes, its input, and comes back once; gradients are those of what stays."""
    gone, back = [], []

    def hooks(*, pin_memory: bool) -> torch.autograd.graph.saved_tensors_hooks:
        assert not pin_memory
        return torch.autograd.graph.saved_tensors_hooks(
            lambda kept: gone.append(kept.shape) or kept.numpy(force=True).copy(),
            lambda kept: back.append(kept.shape) or torch.from_numpy(kept),
        )

    monkeypatch.setattr(activation_checkpoint, "save_on_cpu", hooks)
    expected, found = gradients(decoder("full")), gradients(decoder("full", away=True))

    assert gone == back == [(*TOKENS.shape, MODELS["llama"].hidden)] * LAYERS
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_attention_and_every_second_product_run_once() -> None:
    """Per layer: 7 products forward, 14 backward, and again the 3 that are not kept; the head has 1 and 2."""
    made = decoder("selective-op")
    with Counted() as counted:
        gradients(made)

    assert counted.attentions == LAYERS
    assert counted.products == LAYERS * (3 * PRODUCTS + PRODUCTS // 2) + 3


class OneRank(Nccl):
    """Overlapped products of one rank, which has nobody to exchange with. Counts exchanges and products."""

    def __init__(self) -> None:
        self.gathered: list[int] = []
        self.scattered: list[int] = []

    def gather_matmul(self, x, operands, group, *, keep=False):
        self.gathered.append(len(operands))
        return tuple(x @ operand for operand in operands), x if keep else None

    def matmul_scatter(self, pairs, group):
        self.scattered.append(len(pairs))
        return sum(x @ operand for x, operand in pairs)

    def start_gather(self, x, group):
        return lambda: x


def test_overlapped_products_keep_what_plain_ones_keep() -> None:
    """Per layer, of q k v, o, gate up, down: k and up are computed again; scattered sums are kept."""
    mode, made = OneRank(), decoder("selective-op")
    saving = SavingMode(mode)

    def project_in(x, linears):
        outs = AllGatherMatmul.apply(saving, None, x.flatten(0, 1), *(linear.weight for linear in linears))
        return tuple(out.unflatten(0, x.shape[:2]) for out in outs)

    def project_out(x, linear):
        return MatmulReduceScatter.apply(saving, None, x.flatten(0, 1), linear.weight).unflatten(0, x.shape[:2])

    for block in made.layers.values():
        for module in (block.attention, block.feed_forward):
            module.project_in, module.project_out = project_in, project_out
    found, expected = gradients(made), gradients(decoder("none"))

    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-12 * float(grad.abs().max()))
    # Forward, then from the last layer: once more, and backward the other way round.
    assert mode.gathered == LAYERS * [3, 2] + LAYERS * [1, 1, 1, 1]
    assert mode.scattered == LAYERS * [1, 1] + LAYERS * [2, 3]


def test_the_second_run_makes_the_nodes_of_the_first() -> None:
    """Torch's checkpointing compares what both save, in number, shape and type, and raises where they differ."""
    made = decoder("selective-op", dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = made(TOKENS).square().sum()
    loss.backward()

    assert all(parameter.grad is not None for parameter in made.parameters())


def test_results_are_kept_for_as_long_as_the_graph_is_there() -> None:
    """A pipeline that splits the backward pass runs a block again for each half."""
    made = decoder("selective-op")
    x = torch.randn(2, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    block = made.layers["0"]
    out = block(x).square().sum()
    (inputs,) = torch.autograd.grad(out, (x,), retain_graph=True)
    weights = torch.autograd.grad(out, tuple(block.parameters()))

    plain = decoder("none").layers["0"]
    expected = torch.autograd.grad(plain(x).square().sum(), (x, *plain.parameters()))
    for mine, theirs in zip((inputs, *weights), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
