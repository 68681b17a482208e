"""Operators of PyTorch as modules call them, each with operands that are parameters or whole numbers.

`every(number)` places one dim of one operand of each in turn: a rule that is wrong shows in the result or in a
gradient.
"""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.executor.sharding.ranks import Case


class Called(nn.Module):
    """An operator by its name here; tensors of floating or complex numbers are parameters."""

    def __init__(self, operator, tensors) -> None:
        super().__init__()
        self.operator, self.names = operator, []
        for number, one in enumerate(tensors):
            name = f"t{number}"
            self.names.append(name)
            if one.dtype.is_floating_point or one.dtype.is_complex:
                self.register_parameter(name, nn.Parameter(one))
            else:
                self.register_buffer(name, one)

    def forward(self):
        return OPERATORS[self.operator][0](*(getattr(self, name) for name in self.names))


def real(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def numbers(below, *shape):
    return torch.randint(0, below, shape)


MASK = torch.tensor([[True, False, True, True, True, False]] * 6)
OPERATORS = {
    "attention, mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK),
        real(2, 4, 6, 8),
        real(2, 4, 6, 8),
        real(2, 4, 6, 8),
    ),
    "attention, added to scores": (
        F.scaled_dot_product_attention,
        real(2, 4, 6, 8),
        real(2, 4, 6, 8),
        real(2, 4, 6, 8),
        real(4, 6, 6),
    ),
    "attention, grouped, mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
        real(2, 4, 6, 8),
        real(2, 2, 6, 8),
        real(2, 2, 6, 8),
        real(2, 1, 6, 6),
    ),
    "attention, causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        real(2, 4, 6, 8),
        real(2, 4, 6, 8),
        real(2, 4, 6, 8),
    ),
    "stack": (lambda a, b: torch.stack([a, b, a], 1), real(4, 6), real(4, 6)),
    "cat of one twice": (lambda a, b: torch.cat([a, b, a], -1), real(4, 6), real(4, 6)),
    "cat of uneven": (lambda a, b: torch.cat([a, b], 1), real(4, 6), real(4, 2)),
    "index": (lambda x, i: x[:, i], real(4, 6, 2), numbers(6, 4)),
    "index, two dims": (lambda x, i, j: x[i, :, j], real(4, 6, 8), numbers(4, 2, 1), numbers(8, 6)),
    "index, together": (lambda x, i, j: x[:, i, j], real(4, 6, 8), numbers(6, 2), numbers(8, 2)),
    "index of rows": (lambda x, i: x[i], real(4, 6), numbers(4, 8) - 2),
    "index_put": (lambda x, i, v: x.index_put((i,), v), real(4, 6), torch.tensor([0, 2]), real(2, 6)),
    "index_put, added": (lambda x, i, v: x.index_put((i,), v, accumulate=True), real(4, 6), numbers(4, 8), real(8, 6)),
    "gather": (lambda x, i: x.gather(1, i), real(4, 6, 2), numbers(6, 4, 8, 2)),
    "take_along_dim": (lambda x, i: x.take_along_dim(i, 0), real(4, 6), numbers(4, 2, 6)),
    "index_select": (lambda x, i: x.index_select(1, i), real(4, 6), numbers(6, 8)),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), real(4, 6), numbers(4, 8), real(8, 6)),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), real(4, 6), numbers(4, 8, 6), real(8, 6)),
    "embedding, padding": (lambda w, i: F.embedding(i, w, padding_idx=2), real(8, 6), numbers(8, 4, 6)),
    "embedding_bag": (lambda w, i: F.embedding_bag(i, w, mode="mean"), real(8, 6), numbers(8, 4, 2)),
    "embedding_bag, offsets": (
        lambda w, i, o, s: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s),
        real(8, 6),
        numbers(8, 8),
        torch.tensor([0, 2, 4, 6]),
        real(8),
    ),
    "one_hot": (lambda x, i: F.one_hot(i, 6).to(x.dtype) @ x, real(6, 2), numbers(6, 4)),
    "logsumexp": (lambda x: x.logsumexp(1), real(4, 6)),
    "vector norm": (lambda x: F.normalize(x, dim=-1), real(4, 6, 2)),
    "variance": (lambda x: x.var(1, keepdim=True) + x.std(0), real(4, 6)),
    "product, largest": (lambda x: x.prod(1) * x.max(1).values + x.min(), real(4, 6)),
    "sort": (lambda x: x.sort(1).values * torch.arange(6), real(4, 6)),
    "argmax": (lambda x, w: x[x.argmax(-1)] * w, real(6, 6), real(6)),
    "smallest": (lambda x: x.topk(3, 1, largest=False).values * torch.arange(3), real(4, 6)),
    "softmax in another dtype": (lambda x: x.softmax(1, dtype=torch.float32).double() * x, real(4, 6)),
    "roll": (lambda x, y: x.roll((1, -2), (1, 2)) * y, real(4, 6, 8), real(4, 6, 8)),
    "flip": (lambda x, y: x.flip(0, 2) * y, real(4, 6, 8), real(4, 6, 8)),
    "running sum": (lambda x: x.cumsum(1).logcumsumexp(0), real(4, 6)),
    "repeats": (lambda x, y: x.repeat_interleave(4, 1) * y + x.repeat(1, 4), real(4, 1), real(4, 4)),
    "triangle": (lambda x: x.tril() - x.triu(1), real(2, 4, 6)),
    "windows of a dim": (lambda x: x.unfold(1, 4, 2), real(4, 6, 2)),
    "loss, smoothing": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), real(8, 6), numbers(6, 8)),
    "loss, weights": (
        lambda x, t, w: F.cross_entropy(x, t, w.detach().abs(), ignore_index=2, label_smoothing=0.2),
        real(8, 6),
        numbers(6, 8),
        real(6),
    ),
    "loss of places": (lambda x, t: F.cross_entropy(x, t, ignore_index=1), real(4, 6, 2, 8), numbers(6, 4, 2, 8)),
    "loss of shares": (lambda x, t: F.cross_entropy(x, t.softmax(-1), label_smoothing=0.1), real(8, 6), real(8, 6)),
    "negative log likelihood": (
        lambda x, t: F.nll_loss(x.log_softmax(1), t, reduction="sum"),
        real(8, 6),
        numbers(6, 8),
    ),
    "convolution in groups": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2),
        real(2, 4, 6, 6),
        real(8, 2, 3, 3),
        real(8),
    ),
    "convolution by channel": (lambda x, w: F.conv1d(x, w, padding=2, groups=4), real(2, 4, 6), real(4, 1, 3)),
    "convolution, same size": (lambda x, w: F.conv2d(x, w, padding="same"), real(2, 4, 6, 6), real(8, 4, 3, 3)),
    "convolution, transposed": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
        real(2, 4, 6, 6),
        real(4, 8, 3, 3),
        real(8),
    ),
    "convolution, transposed in groups": (
        lambda x, w: F.conv_transpose1d(x, w, stride=2, groups=2),
        real(2, 4, 6),
        real(4, 2, 3),
    ),
    "batch norm": (
        lambda x, w, b, m, v: F.batch_norm(x, m.detach(), v.detach().abs(), w, b),
        real(2, 4, 6, 6),
        real(4),
        real(4),
        real(4),
        real(4),
    ),
    "instance norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), real(2, 4, 6, 6), real(4), real(4)),
    "weight norm": (lambda v, g: torch._weight_norm(v, g, 0), real(4, 6, 2), real(4, 1, 1)),
    "baddbmm": (
        lambda b, x, y: torch.baddbmm(b, x, y, beta=0.5, alpha=2.0),
        real(2, 4, 8),
        real(2, 4, 6),
        real(2, 6, 8),
    ),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y, alpha=2.0), real(4, 8), real(4, 6), real(6, 8)),
    "outer": (torch.outer, real(4), real(6)),
    "distances": (torch.cdist, real(2, 4, 6), real(2, 8, 6)),
    "pixel shuffle": (
        lambda x, y: F.pixel_shuffle(x, 2) * F.pixel_unshuffle(y, 2).mean(),
        real(2, 8, 4, 6),
        real(2, 4, 8, 4),
    ),
    "im2col": (lambda x: F.unfold(x, 3, padding=1), real(2, 4, 6, 6)),
    "pooling": (lambda x: F.adaptive_avg_pool3d(x, 2) + F.max_pool3d(x, 2, 2), real(2, 4, 4, 4, 4)),
    "padding": (lambda x: F.pad(x, (1, 2), mode="reflect"), real(2, 4, 6)),
    "Fourier": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2.0), real(2, 4, 6)),
    "Fourier of two dims": (lambda x: torch.fft.fftn(x, dim=(1, 2)).real, real(2, 4, 6)),
    "complex pairs": (lambda x: torch.view_as_real(torch.view_as_complex(x).conj().square()), real(4, 6, 2)),
    "put back": (
        lambda x, y: torch.slice_scatter(torch.select_scatter(x, y, 1, 2), y.unsqueeze(1), 1, 4, 5),
        real(4, 6, 2),
        real(4, 2),
    ),
    "copy": (lambda x, y: x.square().index_copy_(0, torch.arange(4), x).copy_(y) * x, real(4, 6), real(6)),
    "expand_as": (lambda x, y: x.expand_as(y) * y, real(4, 1), real(4, 6)),
    "bits": (lambda x, i, j: x * ((i > 2) & (j > 1)), real(4, 6), numbers(6, 4, 6), numbers(6, 1, 6)),
}


def known(name):
    """A module that calls an operator, and its tensors."""
    torch.manual_seed(0)
    _, *tensors = OPERATORS[name]
    return Called(name, tensors), tensors


def every(number=None):
    """Cases with one dim of one operand placed; of each operator so many, drawn, or all."""
    cases = []
    for name in OPERATORS:
        module, tensors = known(name)
        places = [(f"t{at}", d) for at, one in enumerate(tensors) for d, n in enumerate(one.shape) if n % 2 == 0]
        draw = random.Random(name)
        for tensor, dim in places if number is None else draw.sample(places, min(number, len(places))):
            placements = {tensor: [f"S({dim})"]}
            cases.append(Case(f"{name}, {tensor} S({dim})", module, (), {"d": 2}, {"placements": placements}))
        if len(places) > 1:
            both = dict(draw.sample(places, 2))
            placements = {tensor: [f"S({dim})"] for tensor, dim in both.items()}
            cases.append(Case(f"{name}, {both}", module, (), {"d": 2}, {"placements": placements}))
    return cases
