"""Selective activation recomputation: results of a block's forward pass that its recomputation reuses.

torch's own selective checkpointing intercepts every operator of both runs in Python (a dispatch mode), which costs the
host several times the operators themselves. Here only the functions whose results may be saved check for it: `product`
for linear layers, `products` and `scattered_product` for those overlapped with their collective, `attention` for the
attention kernel, `save_or_replay` inside autograd functions. Both runs build the same graph, as
`torch.utils.checkpoint` requires: the second run saves the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

Results = TypeVar("Results", bound=Tensor | tuple[Any, ...])  # of an operator: one tensor, or several

# Attention kernels: too expensive to recompute.
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
)


class SavedResults:
    """Saved results of one pass through one block. `first_run` and `second_run` are the contexts of the pass and of its
    recomputation.
    """

    def __init__(self) -> None:
        self.results: list[Tensor | tuple[Any, ...]] = []
        self.replays = False
        self._begin()

    def _begin(self) -> None:
        self.next_result = self.products = 0

    def first_run(self) -> AbstractContextManager[None]:
        return _RunContext(self, replays=False)

    def second_run(self) -> AbstractContextManager[None]:
        """Return the context of the recomputation; a pipeline that splits the backward pass enters it twice."""
        return _RunContext(self, replays=True)

    def save_or_replay(self, compute: Callable[[], Results]) -> Results:
        """Return `compute()`, saved in the first run and replayed in the second."""
        if self.replays:
            found = self.results[self.next_result]
            self.next_result += 1
            return cast("Results", _detached(found))  # results of the same operator in the first run
        computed = compute()
        self.results.append(_detached(computed))
        return computed

    def saves_next_product(self) -> bool:
        """Count a linear layer and return whether its result is saved: every second one is, starting with the first."""
        self.products += 1
        return self.products % 2 == 1

    def several_products(self, compute: Callable[[Sequence[int]], Sequence[Tensor]], count: int) -> tuple[Tensor, ...]:
        """Return the results of `count` linear layers; `compute` computes those whose numbers it receives."""
        saves = [self.saves_next_product() for _ in range(count)]
        wanted = [number for number, saved in enumerate(saves) if not (saved and self.replays)]
        made = dict(zip(wanted, compute(wanted), strict=True)) if wanted else {}
        return tuple(
            self.save_or_replay(partial(made.__getitem__, number)) if saved else made[number]
            for number, saved in enumerate(saves)
        )


def _detached(found: Tensor | tuple[Any, ...]) -> Tensor | tuple[Any, ...]:
    """Return detached tensors, since tensors returned to autograd become part of its graph."""
    if isinstance(found, Tensor):
        return found.detach()
    return tuple(one.detach() if isinstance(one, Tensor) else one for one in found)


class _RunContext(AbstractContextManager[None]):
    def __init__(self, saved: SavedResults, *, replays: bool) -> None:
        self.saved, self.replays = saved, replays

    def __enter__(self) -> None:
        global _active
        self.before, _active = _active, self.saved
        self.saved.replays = self.replays
        self.saved._begin()  # noqa: SLF001 - this class is part of SavedResults

    def __exit__(self, *_: object) -> None:
        global _active  # noqa: PLW0603 - as above
        _active = self.before


_active: SavedResults | None = None


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a block's two runs, as `context_fn` of `torch.utils.checkpoint`."""
    saved = SavedResults()
    return saved.first_run(), saved.second_run()


def save_or_replay(compute: Callable[[], Results]) -> Results:
    """Return `compute()`; under selective recomputation it runs once. Call it inside an autograd function's forward."""
    return compute() if _active is None else _active.save_or_replay(compute)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T + bias; x (..., in), weight (out, in). Selective recomputation saves every second result."""
    if _active is None or not _active.saves_next_product():
        return functional.linear(x, weight, bias)
    saved: Tensor = _Product.apply(as_autocast(x), as_autocast(weight), None if bias is None else as_autocast(bias))
    return saved


def products(compute: Callable[[Sequence[int]], Sequence[Tensor]], count: int) -> tuple[Tensor, ...]:
    """Return `compute(range(count))`, results of as many linear layers that share their input.

    Under selective recomputation every second result is saved, and the second run computes the others alone. Call it
    inside an autograd function's forward.
    """
    return tuple(compute(range(count))) if _active is None else _active.several_products(compute, count)


def scattered_product(compute: Callable[[], Tensor]) -> Tensor:
    """Return `compute()`, a linear layer's reduce-scattered result, which selective recomputation saves.

    Call it inside an autograd function's forward.
    """
    if _active is not None:
        _active.saves_next_product()  # counted in any case; this result is always saved, being smaller than the product
    return save_or_replay(compute)


def as_autocast(x: Tensor) -> Tensor:
    """Return x in autocast's type if autocast is on, since it casts only for torch's own operators, not for autograd
    functions.
    """
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return save_or_replay(lambda: functional.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            grad @ weight if needs_x else None,
            rows.t() @ x.flatten(0, -2) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


class _Attention(TorchDispatchMode):
    """Intercepts one call of attention and saves the results of its kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _kernels():
            return save_or_replay(lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def attention() -> AbstractContextManager[Any]:
    """Return the context in which attention must be called so that its results can be saved."""
    return nullcontext() if _active is None else _Attention()


_KERNELS: set[Any] = set()


def _kernels() -> set[Any]:
    if not _KERNELS:
        _KERNELS.update(getattr(torch.ops.aten, name).default for name in ATTENTION if hasattr(torch.ops.aten, name))
    return _KERNELS
