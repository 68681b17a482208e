"""Random modules as people write them: views, writes in place, masks, detached and frozen parts, statistics, reuse.

`draw_module(seed)` returns the same module and arguments every time. Sizes are odd and even, so that pieces differ; a
module that one process cannot differentiate, or that answers rounding errors with other numbers, is drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.executor.sharding.drawing import LARGEST, SIZES, Drawing, Drawn, Made, at_least, run
from tests.executor.sharding.random_operators import FAMILIES, gradient_ends, losses, options, ties, windows


def elementwise(d: Drawing) -> Made:
    at = d.some()
    name = d.draw.choice(["gelu", "silu", "tanh", "sigmoid", "relu", "softplus", "leaky_relu", "elu"])
    what = d.draw.choice(
        ["sin", "exp", "square", "abs", "neg", "reciprocal", "clamp", "log1p", "erf", "rsqrt", name, name]
    )
    if what in {"exp", "reciprocal", "log1p", "rsqrt"}:
        return (lambda _, x: getattr(torch, what)(1 + x.abs() * 0.3)), (at,)
    if what == "clamp":
        return (lambda _, x: x.clamp(-0.7, 0.9)), (at,)
    return (lambda _, x: getattr(torch, what, None)(x) if hasattr(torch, what) else getattr(F, what)(x)), (at,)


def binary(d: Drawing) -> Made:
    one = d.some()
    shape = d.have[one].shape

    def alike(other: torch.Tensor) -> bool:
        pairs = zip(reversed(shape), reversed(other.shape), strict=False)
        return other.ndim <= len(shape) and all(b in {1, a} for a, b in pairs)

    how = d.draw.choice(["add", "sub", "mul", "div", "where", "maximum", "scaled", "lerp", "addcmul", "atan2"])
    functions = {
        "add": lambda _, x, y: x + y,
        "sub": lambda _, x, y: x - y * 0.5,
        "mul": lambda _, x, y: x * y,
        "div": lambda _, x, y: x / (1.5 + y.square()),
        "where": lambda _, x, y: torch.where(x > 0.1, x, y),
        "maximum": lambda _, x, y: torch.maximum(x, y + 0.01),
        "scaled": lambda _, x, y: torch.add(x, y, alpha=2) - 1,
        "lerp": lambda _, x, y: torch.lerp(x, y.expand_as(x), 0.3),
        "addcmul": lambda _, x, y: torch.addcmul(x, y, y, value=0.5),
        "atan2": lambda _, x, y: torch.atan2(x, y.square() + 0.5),
    }
    return functions[how], (one, d.some(alike))


def with_parameter(d: Drawing) -> Made:
    at = d.some(at_least(1))
    shape = d.have[at].shape
    last, how = (
        shape[-1],
        d.draw.choice(["linear", "linear", "matmul", "scale", "both", "norm", "rms", "einsum", "buffer"]),
    )
    if how == "linear":
        w, b = d.parameter(d.size(), last), None
        if d.is_one(0.5):
            b = d.parameter(getattr(d.module, w).shape[0])
        return (lambda m, x: F.linear(x, getattr(m, w), None if b is None else getattr(m, b))), (at,)
    if how == "matmul":
        w = d.parameter(last, d.size())
        return (lambda m, x: x @ getattr(m, w)), (at,)
    if how == "both":
        w = d.parameter(last, last)
        return (lambda m, x: x @ getattr(m, w) + F.linear(x, getattr(m, w))), (at,)
    if how == "einsum":
        w = d.parameter(last, d.size())
        return (lambda m, x: torch.einsum("...i,ij->...j", x, getattr(m, w))), (at,)
    if how == "buffer":
        b = d.buffer(torch.randn(last, dtype=torch.float64))
        return (lambda m, x: x * getattr(m, b) + getattr(m, b).sum()), (at,)
    if how in {"norm", "rms"} and last > 2:
        w = d.parameter(last)
        if how == "rms":
            return (lambda m, x: F.rms_norm(x, (last,), getattr(m, w), 1e-3)), (at,)
        return (lambda m, x: F.layer_norm(x, (last,), getattr(m, w), getattr(m, w), 1e-3)), (at,)
    dims = [n if d.is_one(0.6) else 1 for n in shape]
    w = d.parameter(*dims)
    return (lambda m, x: x * getattr(m, w)), (at,)


def reduction(d: Drawing) -> Made:
    at = d.some(at_least(1))
    ndim = d.have[at].ndim
    keep, dim = d.is_one(0.5), d.dim(at)
    dims = sorted(d.draw.sample(range(ndim), d.draw.randint(1, ndim)))
    how = d.draw.choice(
        ["sum", "mean", "amax", "amin", "logsumexp", "var", "norm", "max", "all", "prod", "dims", "dims"]
    )
    if how == "all":
        return (lambda _, x: x.mean() if keep else x.sum()), (at,)
    if how == "max":
        return (lambda _, x: x.max(dim, keepdim=keep).values), (at,)
    if how == "norm":
        return (lambda _, x: torch.linalg.vector_norm(x + 0.1, dim=dims, keepdim=keep)), (at,)
    if how == "var":
        return (lambda _, x: x.var(dim, correction=0, keepdim=keep)), (at,)
    if how == "prod":
        return (lambda _, x: (x.abs() + 0.5).prod(dim, keepdim=keep)), (at,)
    if how == "dims":
        return (lambda _, x: x.sum(dims, keepdim=keep) * 0.3), (at,)
    return (lambda _, x: getattr(x, how)(dim, keepdim=keep)), (at,)


def along(d: Drawing) -> Made:
    at = d.some(at_least(1))
    dim, by = d.dim(at), d.draw.randint(1, 3)
    functions = {
        "softmax": lambda _, x: x.softmax(dim),
        "log_softmax": lambda _, x: x.log_softmax(dim),
        "cumsum": lambda _, x: x.cumsum(dim) * 0.5,
        "flip": lambda _, x: x.flip(dim),
        "roll": lambda _, x: x.roll(by, dim),
        "sort": lambda _, x: x.sort(dim).values,
        "normalize": lambda _, x: F.normalize(x + 0.1, dim=dim),
        "pad": lambda _, x: F.pad(x, (1, 2)),
        "glu": lambda _, x: F.glu(torch.cat([x, x * 0.5], dim), dim),
        "diff": lambda _, x: torch.cat([x, x], dim).diff(dim=dim),
    }
    return functions[d.draw.choice([*functions])], (at,)


def view(d: Drawing) -> Made:
    at = d.some(at_least(1))
    shape = d.have[at].shape
    dim, ndim = d.dim(at), len(shape)
    order = d.draw.sample(range(ndim), ndim)
    size = shape[dim]
    how = d.draw.choice(
        ["permute", "transpose", "flatten", "split", "squeeze", "narrow", "step", "chunk", "expand", "select"]
    )
    how = d.draw.choice(
        [how, "unbind", "stack", "cat", "repeat", "interleave", "diagonal", "halves", "negative", "reshape"]
    )
    if how == "permute":
        return (lambda _, x: x.permute(order)), (at,)
    if how == "transpose":
        return (lambda _, x: x.transpose(dim, -1)), (at,)
    if how == "flatten":
        first, last = sorted((dim, d.dim(at)))
        return (lambda _, x: x.flatten(first, last)), (at,)
    if how == "split":
        by = d.draw.choice([n for n in range(1, size + 1) if size % n == 0])
        return (lambda _, x: x.unflatten(dim, (by, -1))), (at,)
    if how == "squeeze":
        return (lambda _, x: x.unsqueeze(dim) if size > 1 else x.squeeze(dim)), (at,)
    if how in {"narrow", "negative"}:
        low = d.draw.randrange(size)
        high = d.draw.randint(low + 1, size)
        cut = (slice(None),) * dim + (slice(low - size if how == "negative" else low, high),)
        return (lambda _, x: x[cut]), (at,)
    if how == "step":
        cut = (slice(None),) * dim + (slice(None, None, 2),)
        return (lambda _, x: x[cut]), (at,)
    if how == "chunk":
        return (lambda _, x: x.chunk(2, dim)), (at,)
    if how == "halves":
        return (lambda _, x: torch.tensor_split(x, 2, dim)), (at,)
    if how == "expand":
        return (lambda _, x: x.unsqueeze(dim).expand(*shape[:dim], 3, *shape[dim:])), (at,)
    if how == "select":
        return (lambda _, x: x.select(dim, size // 2)), (at,)
    if how == "unbind":
        return (lambda _, x: x.unbind(dim)[0] + x.unbind(dim)[-1]), (at,)
    if how == "repeat":
        return (lambda _, x: x.repeat(*(2 if n == dim else 1 for n in range(ndim)))), (at,)
    if how == "interleave":
        return (lambda _, x: x.repeat_interleave(2, dim)), (at,)
    if how == "diagonal" and ndim > 1:
        return (lambda _, x: x.diagonal(0, 0, 1)), (at,)
    if how == "reshape":
        return (lambda _, x: x.transpose(0, -1).reshape(-1, size)), (at,)
    same = d.some(lambda one: one.shape == shape)
    return (lambda _, x, y: torch.stack([x, y], dim) if how == "stack" else torch.cat([x, y, x], dim)), (at, same)


def product(d: Drawing) -> Made:
    """Products of two values, and attention."""
    at = d.some(at_least(3))
    batch = d.have[at].shape
    other = d.some(lambda one: one.ndim == len(batch) and one.shape[:-2] == batch[:-2] and one.shape[-1] == batch[-1])
    how = d.draw.choice(["scores", "attention", "causal", "masked"])
    if how == "scores":
        return (lambda _, x, y: x @ y.transpose(-1, -2)), (at, other)
    if how == "masked":
        seen = torch.rand(batch[-2], d.have[other].shape[-2]) > 0.4
        seen[:, 0] = True
        return (lambda _, x, y: F.scaled_dot_product_attention(x, y, y, seen)), (at, other)
    return (lambda _, x, y: F.scaled_dot_product_attention(x, y, y, is_causal=how == "causal")), (at, other)


def masked(d: Drawing) -> Made:
    at = d.some(at_least(2))
    shape = d.have[at].shape
    mask = torch.rand(shape[-2:]) > 0.4
    how = d.draw.choice(["fill", "triangle", "where", "infinite", "compare", "count", "given"])
    if how == "fill":
        return (lambda _, x: x.masked_fill(mask, 0.5)), (at,)
    if how == "triangle":
        return (lambda _, x: x.tril(1) - x.triu(2) * 0.5), (at,)
    if how == "infinite":
        later = torch.ones(shape[-2:], dtype=torch.bool).triu(1)
        return (lambda _, x: x.masked_fill(later, float("-inf")).softmax(-1)), (at,)
    if how == "compare":
        return (lambda _, x: x * (x > x.mean(-1, keepdim=True) + 0.01)), (at,)
    if how == "count":
        return (lambda _, x: x / (1 + (x > 0.2).sum(-1, keepdim=True))), (at,)
    if how == "given":
        b = d.buffer(mask)
        return (lambda m, x: torch.where(~getattr(m, b) | (x > 0.3), x, -0.2)), (at,)
    return (lambda _, x: torch.where(mask, x, x.square())), (at,)


def in_place(d: Drawing) -> Made:
    """Writes into values, into parts of them, and through their views."""
    at = d.some(at_least(1))
    shape = d.have[at].shape
    dim = d.dim(at)
    cut = (slice(None),) * dim + (slice(shape[dim] // 3, None, d.draw.choice([1, 1, 2])),)
    how = d.draw.choice(
        ["part", "whole", "view", "fill", "copy", "masked", "chain", "row", "transposed", "other", "index"]
    )
    fresh = d.is_one(0.98 if at < d.arguments else 0.5)  # writes into arguments are refused

    def base(x: torch.Tensor) -> torch.Tensor:
        return x.clone() if fresh else x

    if how == "other":
        same = d.some(lambda one: one.shape == shape)
        return (lambda _, x, y: base(x).add_(y, alpha=0.5)), (at, same)
    if how == "copy":
        same = d.some(lambda one: one.shape == shape)

        def copied(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            made = base(x)
            made[cut] = y[cut] * 0.5
            return made

        return copied, (at, same)

    def written(_: Any, x: torch.Tensor) -> torch.Tensor:
        made = base(x)
        if how == "part":
            made[cut] *= 0.5
        elif how == "whole":
            made.mul_(0.7).tanh_()
        elif how == "view":
            made.view(-1)[: max(1, made.numel() // 2)].add_(0.3)
        elif how == "fill":
            made[cut] = 0.25
        elif how == "masked":
            made.masked_fill_(made.detach() > 0.2, 0.1)
        elif how == "chain":
            part = made[cut]
            part.mul_(2)
            made.add_(0.1)
            return part + 1
        elif how == "row":
            made.select(dim, 0).zero_()
        elif how == "index":
            made.index_fill_(dim, torch.tensor([0]), 0.4)
        else:
            made.transpose(0, -1)[0] += 1.0
        return made

    return written, (at,)


def stopped(d: Drawing) -> Made:
    """Where gradients end, or half of them."""
    at = d.some()
    other = d.some(lambda one: one.shape == d.have[at].shape)
    functions = {
        "detach": lambda _, x, y: x.detach() * y,
        "alone": lambda _, x, y: x.detach(),
        "through": lambda _, x, y: x + (x.round() - x).detach() + y * 0.1,
        "statistics": lambda _, x, y: x - x.mean().detach() + y.detach().square(),
        "shadow": lambda _, x, y: torch.where(x.detach() > 0.1, x, y.detach()),
        "data": lambda _, x, y: x * y.data.abs(),
    }
    return functions[d.draw.choice([*functions])], (at, other)


def without_grad(d: Drawing) -> Made:
    """A region without autograd of some steps, with or without one inside that has it."""
    steps, numbers = [], []
    for _ in range(d.draw.randint(1, 3)):
        step, at = d.draw.choice(PLAIN)(d)
        steps.append(step)
        numbers.append(at)
    inner, last = d.is_one(0.3), d.is_one(0.5)
    sizes = [len(at) for at in numbers]

    def region(module: nn.Module, *values: torch.Tensor) -> Any:
        made: list[torch.Tensor] = []
        with torch.no_grad():
            start = 0
            for number, (step, size) in enumerate(zip(steps, sizes, strict=True)):
                operands = values[start : start + size]
                start += size
                with torch.set_grad_enabled(inner and number == len(steps) - 1):
                    found = step(module, *operands)
                made += list(found) if isinstance(found, tuple | list) else [found]
        return made[-1] if last else tuple(made)

    return region, tuple(n for at in numbers for n in at)


def indexed(d: Drawing) -> Made:
    at = d.some(at_least(1))
    shape = d.have[at].shape
    dim = d.dim(at)
    rows = torch.randint(0, shape[dim], (d.size(),))
    wide = torch.randint(0, shape[dim], (*shape[:dim], 3, *shape[dim + 1 :]))
    order = torch.randperm(shape[dim])
    cut = (slice(None),) * dim
    functions = {
        "rows": lambda _, x: x[(*cut, rows)],
        "select": lambda _, x: x.index_select(dim, rows),
        "gather": lambda _, x: x.gather(dim, wide),
        "scatter": lambda _, x: torch.zeros_like(x).scatter_add(dim, wide, x.gather(dim, wide)),
        "permuted": lambda _, x: x[(*cut, order)] * x,
        "best": lambda _, x: x.gather(dim, x.argmax(dim, keepdim=True)),
        "put": lambda _, x: x.index_put((order[:2],), x[0], accumulate=True),
        "add": lambda _, x: x.index_add(dim, rows, x.index_select(dim, rows)),
        "topk": lambda _, x: x.topk(max(1, shape[dim] // 2), dim).values,
    }
    return functions[d.draw.choice([*functions])], (at,)


def layer(d: Drawing) -> Made:
    """Layers with statistics or windows."""
    at = d.some(at_least(3))
    shape, size = d.have[at].shape, d.size()
    channels = shape[1]
    flat = (shape[0], channels, -1)
    how = d.draw.choice(["conv", "conv", "batch", "group", "pool", "table"])
    if how == "batch":
        name = f"n{len(list(d.module.children()))}"
        d.module.add_module(name, nn.BatchNorm1d(channels, momentum=0.3, eps=1e-2).double())
        d.module.get_submodule(name).train(d.module.training)
        return (lambda m, x: getattr(m, name)(x.reshape(flat))), (at,)
    if how == "group":
        groups = d.draw.choice([n for n in range(1, channels + 1) if channels % n == 0])
        return (lambda _, x: F.group_norm(x.reshape(flat), groups, eps=1e-2)), (at,)
    if how == "pool":
        return (lambda _, x: F.avg_pool1d(x.reshape(flat), 2, 1, 1)), (at,)
    if how == "table":
        w, ids = d.parameter(size, 4), torch.randint(0, size, shape[:2])
        return (lambda m, x: F.embedding(ids, getattr(m, w)) * x.flatten(2).mean(-1, keepdim=True)), (at,)
    w = d.parameter(size, channels, d.draw.choice([1, 2, 3]))
    return (lambda m, x: F.conv1d(x.reshape(flat), getattr(m, w), padding=1)), (at,)


PLAIN = (elementwise, binary, with_parameter, reduction, view, masked)
STRATA = {
    "views": (view, view, elementwise, binary, with_parameter),
    "in place": (in_place, in_place, view, binary, with_parameter),
    "detached": (stopped, without_grad, with_parameter, binary, view),
    "masks": (masked, masked, product, with_parameter, binary),
    "reductions": (reduction, reduction, along, with_parameter, binary),
    "rows": (indexed, indexed, with_parameter, view, binary),
    "layers": (layer, layer, product, with_parameter, reduction),
    "windows": (windows, windows, binary, elementwise, reduction),
    "losses": (losses, with_parameter, binary, view),
    "options": (options, options, with_parameter, view, binary),
    "ties": (ties, ties, with_parameter, view),
    "gradients": (gradient_ends, gradient_ends, with_parameter, view, binary, in_place),
    "everything": (*PLAIN, along, in_place, stopped, without_grad, indexed, layer, product, *FAMILIES),
}


def draw_module(seed: int, stratum: str = "everything") -> tuple[Drawn, tuple[torch.Tensor, ...]]:
    """Return a module and its arguments; the same for the same seed and stratum."""
    draw = random.Random(f"{stratum} {seed}")
    while True:
        torch.manual_seed(draw.randrange(2**31))
        found = _drawn(draw, STRATA[stratum])
        if found is not None and _is_calm(*found):
            return found


def _drawn(
    draw: random.Random, families: tuple[Callable[[Drawing], Made], ...]
) -> tuple[Drawn, tuple[torch.Tensor, ...]] | None:
    module = Drawn().train(draw.random() < 0.5)
    shape = [draw.choice(SIZES) for _ in range(draw.choice([2, 3, 3, 3, 4]))]
    args = [torch.randn(shape, dtype=torch.float64)]
    if draw.random() < 0.4:
        args.append(torch.randn(shape, dtype=torch.float64))
    args = [one.requires_grad_(draw.random() < 0.3) for one in args]
    d = Drawing(draw, module, list(args), arguments=len(args))
    wanted, tries = draw.randint(2, 7), 0
    while len(module.steps) < wanted and tries < 60:
        tries += 1
        try:
            step, at = draw.choice(families)(d)
            have = run(module, d.have, [(step, at)])
        except (AttributeError, IndexError, RuntimeError, ValueError):
            continue
        if any(one.numel() > LARGEST or not one.numel() or not one.isfinite().all() for one in have):
            continue
        module.steps.append((step, at))
        d.have = have
    made = list(range(len(args), len(d.have)))
    differentiable = [n for n in made if d.have[n].requires_grad and d.have[n].is_floating_point()]
    if not differentiable:
        return None
    others = draw.sample(range(len(d.have)), min(draw.choice([0, 0, 1, 2]), len(d.have)))
    module.results = [differentiable[-1], *others]
    module.named = draw.random() < 0.3
    return module, tuple(one.detach().requires_grad_(one.requires_grad) for one in args)


def _is_calm(module: Drawn, args: tuple[torch.Tensor, ...]) -> bool:
    """Return whether one process runs and differentiates the module, and rounding errors stay small."""
    try:
        first = outcome(module, args)
        shaken = [(one.detach() * (1 + 1e-13)).requires_grad_(one.requires_grad) for one in args]
        second = outcome(module, tuple(shaken))
    except RuntimeError:
        return False
    pairs = zip(first, second, strict=True)
    return all(
        (a is None) == (b is None) and (a is None or (a.isfinite().all() and torch.allclose(a, b, 1e-10, 1e-10)))
        for a, b in pairs
    )


def outcome(module: nn.Module, args: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
    """Return all results, gradients of parameters and arguments, buffers after the call, and arguments after it.

    Buffers are put back. Raises RuntimeError where autograd cannot.
    """
    kept = {name: one.clone() for name, one in module.named_buffers()}
    args = tuple(one.detach().clone().requires_grad_(one.requires_grad) for one in args)
    results = module(*args)
    results = list(results.values()) if isinstance(results, dict) else list(results)
    leaves = [one for one in (*module.parameters(), *args) if one.requires_grad]
    gradients = torch.autograd.grad(weighted(results), leaves, allow_unused=True)
    buffers = [one.clone() for one in module.buffers()]
    for name, one in module.named_buffers():
        one.copy_(kept[name])
    return [*(one.detach() for one in results), *gradients, *buffers, *(one.detach() for one in args)]


def weighted(results: list[torch.Tensor]) -> torch.Tensor:
    """Return one number of all results that gradients flow from, with weights that differ by element."""
    total = torch.zeros((), dtype=torch.float64)
    graded = [one for one in results if one.is_floating_point() and one.requires_grad]
    for one in graded[: 1 + len(graded) // 2]:  # nothing is asked of the others
        weight = torch.linspace(0.5, 1.5, one.numel(), dtype=torch.float64).view(one.shape)
        total = total + (one * weight).sum()
    return total


def tokens(draw: random.Random, shape: tuple[int, ...], mesh: dict[str, int]) -> list[str]:
    """Return a random placement, even or uneven; more than one axis of a mesh may have the same dim."""
    return [draw.choice(["R", *(f"S({dim})" for dim in range(len(shape)))]) for _ in mesh]
