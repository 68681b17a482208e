"""Results of a block's first run that its second run takes instead of computing them: selective recomputation.

torch's own way looks at every operator of both runs from Python (a dispatch mode), which costs the host several times
what the operators do. Here the few functions whose results may be kept ask by themselves: `product` for linear layers,
`attention` for a core of attention, `kept` for anything inside an autograd function. Both runs build the same graph, so
that what `torch.utils.checkpoint` counts on holds: the second run's nodes save the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

Results = Tensor | tuple[Any, ...]

# Recomputing these costs an attention.
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
)


class Kept:
    """What one pass through one block keeps. `first` and `again` are the contexts of its two runs."""

    def __init__(self) -> None:
        self.results: list[Results] = []
        self.replays = False
        self._begin()

    def _begin(self) -> None:
        self.taken = self.products = 0

    def first(self) -> AbstractContextManager[None]:
        return _Run(self, replays=False)

    def again(self) -> AbstractContextManager[None]:
        """May be entered more than once: a pipeline that splits the backward pass runs a block again for each half."""
        return _Run(self, replays=True)

    def once(self, compute: Callable[[], Results]) -> Results:
        """Return what `compute` returned in the first run."""
        if self.replays:
            found = self.results[self.taken]
            self.taken += 1
            return _apart(found)
        found = compute()
        self.results.append(_apart(found))
        return found

    def odd_product(self) -> bool:
        """Count a product, and return whether its result is kept: that of every second one, beginning with the first."""
        self.products += 1
        return self.products % 2 == 1


def _apart(found: Results) -> Results:
    """Return the same numbers in other objects: autograd makes those that it hands out part of its graph."""
    if isinstance(found, Tensor):
        return found.detach()
    return tuple(one.detach() if isinstance(one, Tensor) else one for one in found)


class _Run(AbstractContextManager[None]):
    def __init__(self, kept: Kept, *, replays: bool) -> None:
        self.kept, self.replays = kept, replays

    def __enter__(self) -> None:
        global _now
        self.before, _now = _now, self.kept
        self.kept.replays = self.replays
        self.kept._begin()  # noqa: SLF001 - the same thing's other half

    def __exit__(self, *_: object) -> None:
        global _now  # noqa: PLW0603 - as above
        _now = self.before


_now: Kept | None = None


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a block's two runs, as `torch.utils.checkpoint` asks for them."""
    made = Kept()
    return made.first(), made.again()


def kept(compute: Callable[[], Results]) -> Results:
    """Return what `compute` returns, computed once. To be called where autograd does not look, in a function of its own."""
    return compute() if _now is None else _now.once(compute)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T + bias; x (..., in), weight (out, in). Every second one of a block is kept, if anything is."""
    if _now is None or not _now.odd_product():
        return functional.linear(x, weight, bias)
    return _Product.apply(as_autocast(x), as_autocast(weight), None if bias is None else as_autocast(bias))


def as_autocast(x: Tensor) -> Tensor:
    """Return x in the type that products have here: its own, but under autocast, which looks at torch's own alone."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return kept(lambda: functional.linear(x, weight, bias))  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = slope.flatten(0, -2)
        return (
            slope @ weight if needs_x else None,
            rows.t() @ x.flatten(0, -2) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


class _Attention(TorchDispatchMode):
    """Watches nothing but one call of attention, of which it keeps the kernel's results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _kernels():
            return kept(lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def attention() -> AbstractContextManager[Any]:
    """Return the context in which a core of attention is to be called."""
    return nullcontext() if _now is None else _Attention()


_KERNELS: set[Any] = set()


def _kernels() -> set[Any]:
    if not _KERNELS:
        _KERNELS.update(getattr(torch.ops.aten, name).default for name in ATTENTION if hasattr(torch.ops.aten, name))
    return _KERNELS
