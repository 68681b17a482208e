"""Random operators that model code rarely calls: options, losses, windows, choices among equals, ends of gradients.

Each family returns one step for `random_modules.draw_module`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.executor.sharding.drawing import Drawing, Made, Step, at_least


def chosen(d: Drawing, functions: dict[str, Any], *at: int) -> Made:
    return functions[d.draw.choice([*functions])], at


def windows(d: Drawing) -> Made:
    """Convolutions, pools and paddings of images."""
    at = d.some(lambda one: one.ndim == 4)
    rows, channels, height, width = d.have[at].shape
    groups = d.draw.choice([n for n in range(1, channels + 1) if channels % n == 0])
    k, stride, pad = d.draw.choice([1, 2, 3]), d.draw.choice([1, 1, 2]), d.draw.choice([0, 1])
    w, back = d.parameter(2 * groups, channels // groups, k, 2), d.parameter(channels, 2, k, 2)
    rotated = torch.tensor([[[0.9, 0.1, 0.0], [-0.1, 0.8, 0.1]]], dtype=torch.float64).expand(rows, 2, 3)
    functions = {
        "convolution": lambda m, x: F.conv2d(x, getattr(m, w), None, stride, pad, 1, groups),
        "dilated": lambda m, x: F.conv2d(x, getattr(m, w), None, 1, pad, 2, groups),
        "transposed": lambda m, x: F.conv_transpose2d(x, getattr(m, back), None, stride),
        "largest": lambda _, x: F.max_pool2d(x, 2, stride, 1, ceil_mode=bool(pad)),
        "adaptive": lambda _, x: F.adaptive_avg_pool2d(x, (k, 2)) + F.adaptive_max_pool2d(x, (k, 2)),
        "bilinear": lambda _, x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=bool(pad)),
        "nearest": lambda _, x: F.interpolate(x, size=(height + 1, 2 * width), mode="nearest"),
        "shuffle": lambda _, x: F.channel_shuffle(F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), groups),
        "columns": lambda _, x: F.fold(F.unfold(x, 2, padding=1), (height, width), 2, padding=1),
        "reflected": lambda _, x: F.pad(x, (1, 0, 1, 1), mode="reflect"),
        "around": lambda _, x: F.pad(x, (1, 0, 1, 1), mode="circular"),
        "instances": lambda _, x: F.instance_norm(x, eps=1e-2),
        "sampled": lambda _, x: F.grid_sample(x, F.affine_grid(rotated, list(x.shape)), align_corners=False),
    }
    return chosen(d, functions, at)


def losses(d: Drawing) -> Made:
    at = d.some(at_least(2))
    shape = d.have[at].shape
    how, smooth = d.draw.choice(["mean", "sum", "none"]), d.draw.choice([0.0, 0.1])
    near = torch.rand(shape, dtype=torch.float64)
    last, first = torch.randint(0, shape[-1], shape[:-1]), torch.randint(0, shape[1], (shape[0], *shape[2:]))
    some = torch.where(torch.rand(last.shape) > 0.6, -100, last).flatten()
    some[0] = 0
    weights, signs = torch.rand(shape[1], dtype=torch.float64) + 0.5, (near > 0.5).double() * 2 - 1
    functions = {
        "classes": lambda _, x: F.cross_entropy(x.flatten(0, -2), some, reduction=how, label_smoothing=smooth),
        "weights": lambda _, x: F.cross_entropy(x, first, weights, reduction=how, label_smoothing=smooth),
        "shares": lambda _, x: F.cross_entropy(x, near.softmax(1), reduction=how),
        "likelihood": lambda _, x: F.nll_loss(x.log_softmax(-1).flatten(0, -2), some, reduction=how),
        "divergence": lambda _, x: F.kl_div(x.log_softmax(-1), near.softmax(-1), reduction=how),
        "logits": lambda _, x: F.binary_cross_entropy_with_logits(x, near, pos_weight=near[0], reduction=how),
        "squares": lambda _, x: F.mse_loss(x, near, reduction=how) + F.huber_loss(x, near, how, 0.3),
        "gaussian": lambda _, x: F.gaussian_nll_loss(x, near, x.square() + 0.2, reduction=how),
        "margin": lambda _, x: F.multi_margin_loss(x.flatten(0, -2), last.flatten(), reduction=how),
        "signs": lambda _, x: F.soft_margin_loss(x, signs, reduction=how) + F.poisson_nll_loss(x, near),
        "cosine": lambda _, x: F.cosine_similarity(x + 0.1, near, dim=-1),
    }
    return chosen(d, functions, at)


def options(d: Drawing) -> Made:
    """Optional arguments, dtypes of results, complex and whole numbers."""
    at = d.some(at_least(1))
    shape, dim, keep = d.have[at].shape, d.dim(at), d.is_one(0.5)
    size, other, short = shape[dim], torch.randn(shape, dtype=torch.float64), torch.float32
    half = 1 + size // 2
    functions = {
        "sum in": lambda _, x: x.sum(dim, dtype=short).double() + x.mean(dim, dtype=short),
        "softmax in": lambda _, x: x.softmax(dim, dtype=short),
        "log_softmax in": lambda _, x: F.log_softmax(x, dim, dtype=short).double(),
        "running sum in": lambda _, x: x.cumsum(dim, dtype=short) + x,
        "alpha": lambda _, x: torch.add(x, other, alpha=-2) + torch.rsub(x, other, alpha=2),
        "floor": lambda _, x: torch.div(x, other, rounding_mode="floor") * x + x.remainder(0.7) + x.fmod(0.3),
        "smallest": lambda _, x: x.topk(half, dim, largest=keep).values,
        "places of smallest": lambda _, x: x.gather(dim, x.topk(half, dim, largest=keep).indices),
        "descending": lambda _, x: x.sort(dim=dim, descending=True).values * other,
        "places descending": lambda _, x: x.gather(dim, x.argsort(dim=dim, descending=True, stable=True)),
        "places": lambda _, x: x.gather(dim, x.argmin(dim, keepdim=True)) + x.argmax(),
        "norms": lambda _, x: torch.linalg.vector_norm(x + 0.1, 3, dim, keep) + x.norm(1) + x.norm(float("inf")),
        "differences": lambda _, x: torch.cat([x, x, x], dim).diff(2, dim),
        "activations": lambda _, x: F.elu(x, 1.5) + F.softplus(x, 2.0, 1.0) + F.gelu(x, approximate="tanh"),
        "infinity": lambda _, x: x / float("inf") + x.clamp(min=float("-inf")),
        "complex": lambda _, x: (x * 1j).imag + (x + (0.5 + 2j)).real + torch.polar(x.abs() + 0.1, x).angle(),
        "complex result": lambda _, x: (torch.complex(x, 2 * x), x),
        "Fourier": lambda _, x: torch.fft.rfft(x, dim=dim).abs().square(),
        "whole numbers": lambda _, x: ((x.detach() * 10).long() % 7 * x, (x > 0.1).long().sum(dim), x > 0),
        "mixed": lambda _, x: torch.cat([x, other.float()], dim) + torch.tensor(2.5),
        "buckets": lambda _, x: torch.bucketize(x.detach(), torch.tensor([-0.5, 0.2]).double(), right=True) * x,
        "reduced": lambda _, x: x.index_reduce(dim, torch.arange(size), other, "amax", include_self=keep),
        "repeated": lambda _, x: x.repeat_interleave(torch.arange(1, size + 1), dim),
        "written": lambda _, x: x.slice_scatter(x.narrow(dim, 0, half - 1 or 1) * 2, dim, 0, half - 1 or 1),
        "scans": lambda _, x: (1 + 0.1 * x).cumprod(dim) + x.cummax(dim).values + x.logcumsumexp(dim),
        "spread": lambda _, x: torch.std_mean(x + other, dim, correction=0),
        "not numbers": lambda _, x: torch.where(x > 0.8, math.nan, x).nanmean(dim) + x.nan_to_num(0.1),
    }
    return chosen(d, functions, at)


def ties(d: Drawing) -> Made:
    """Functions with a choice, or an edge, of values that are often equal or zero."""
    at = d.some(at_least(1))
    shape, dim, keep = d.have[at].shape, d.dim(at), d.is_one(0.5)
    rows, whole = torch.randint(0, shape[dim], shape), torch.randint(-1, 2, shape).double()

    def equal(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-0.2, 0.2)

    functions = {
        "largest": lambda _, x: x.relu().amax(dim, keepdim=keep) + x.relu().amin(dim, keepdim=keep),
        "of all": lambda _, x: equal(x).amax() * equal(x).max() * x.relu().min(),
        "with places": lambda _, x: equal(x).max(dim, keepdim=keep).values,
        "two": lambda _, x: torch.maximum(equal(x), x.relu()) + torch.minimum(equal(x), x) + torch.fmax(equal(x), x),
        "edges": lambda _, x: F.relu(x * whole) + (x * whole).abs() + equal(x).clamp(-0.2, 0.2),
        "middle": lambda _, x: equal(x).median(dim).values + equal(x).kthvalue(1, dim).values,
        "order": lambda _, x: equal(x).sort(dim=dim, stable=True).values,
        "products": lambda _, x: (x * whole).prod(dim, keepdim=keep),
        "norms": lambda _, x: (x * 0).norm(2, dim) + (x * whole).norm(1, dim) + equal(x).norm(float("inf"), dim),
        "normalised": lambda _, x: F.normalize(x * whole, dim=dim),
        "first": lambda _, x: equal(x).topk(1, dim, largest=keep).values,
        "scattered": lambda _, x: equal(x).scatter_reduce(dim, rows, equal(x), "amax", include_self=keep),
        "powers": lambda _, x: (x * whole) ** 2 + (x * whole) ** 3 + torch.xlogy(x.abs(), x.abs() + 1),
        "pooled": lambda _, x: F.max_pool1d(equal(x).reshape(1, 1, -1), 1) + F.softshrink(whole * 0.5 + x * 0).sum(),
    }
    return chosen(d, functions, at)


def gradient_ends(d: Drawing) -> Made:
    """`detach_`, writes into what is detached, functions of functions, and gradients of gradients."""
    at = d.some(at_least(1))
    other = d.some(lambda one: one.shape == d.have[at].shape)
    how = d.draw.choice(["late", "written", "part", "again", "truncated", "diagonal", "strided"])

    def ended(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = x.clone()
        if how == "late":
            before = made * 2
            return before + made.detach_() * y
        if how == "written":
            return made.detach().mul_(y) * x
        if how == "part":
            part = made.detach().view(-1)
            part[:1] += y.reshape(-1)[:1]
            return part.view(x.shape) * y + x
        if how == "again":
            return made.detach_().mul_(y).add_(x) * x
        if how == "truncated":
            state = (x * y).tanh()
            state.detach_()
            return (state * y).tanh()
        if how == "diagonal" and x.ndim == 2:
            return made.fill_diagonal_(0.5)
        return made.contiguous().as_strided((1 + x.numel() // 2,), (1,)) * y.sum()

    functions: dict[str, Step | Any] = {
        "vmap": lambda _, x, y: torch.vmap(lambda row, one: row.softmax(-1) * one.sum() if row.ndim else row)(x, y),
        "jvp": lambda _, x, y: torch.func.jvp(torch.sin, (x,), (y,))[1],
        "slope": lambda _, x, y: (
            torch.autograd.grad((x * y).sin().sum(), x, create_graph=True)[0] if x.requires_grad else x
        ),
        "checkpoint": lambda _, x, y: checkpoint(lambda z: (z.sin() * y).softmax(-1), x, use_reentrant=False),
        "grad": lambda _, x, y: torch.func.grad(lambda z: z.square().sum())(x) * y,
    }
    return (ended, (at, other)) if d.is_one(0.6) else chosen(d, functions, at, other)


FAMILIES = (windows, losses, options, ties, gradient_ends)
