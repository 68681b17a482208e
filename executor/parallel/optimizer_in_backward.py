"""The optimizer in the backward pass: a parameter is updated as soon as its gradient is computed, which is then freed.

FSDP calls hooks of sharded parameters when their gradients have been reduced (torch 2.13, torch/distributed/fsdp/
_fully_shard/_fsdp_collectives.py: `foreach_reduce`); without FSDP they run when autograd has accumulated a gradient.
Gradients never exist all at once, so they are not clipped; only their norm is reported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.model.shards import local_tensor
from executor.parallel.gradients import cuts_of


class OptimizerInBackward:
    """Updates `named` parameters in backward passes, each by an optimizer that `build` makes for its local shard.

    With `keeps` gradients are stored in `seen` by name, for a check.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        build: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._build, self.keeps = build, False
        self.seen: dict[str, Tensor] = {}
        self._local: dict[str, tuple[nn.Parameter, torch.optim.Optimizer]] = {}
        self._norms: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
        # With a strong reference to this object, a hook would keep its parameter and states alive: gc cannot see hooks.
        update = weakref.WeakMethod(self._update)

        def hook(parameter: nn.Parameter, name: str) -> None:
            if (call := update()) is not None:
                call(name, parameter)

        for name, parameter in named:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(hook, name=name))

    @torch.no_grad()
    def _update(self, name: str, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None:
            return
        here = local_tensor(grad)
        norm = torch.linalg.vector_norm(here, dtype=torch.promote_types(here.dtype, torch.float32))
        self._norms.setdefault(cuts_of(grad), []).append(norm)
        if self.keeps:
            self.seen[name] = grad.clone()
        if name not in self._local:  # FSDP reallocates its shards in the first forward pass
            own = nn.Parameter(local_tensor(parameter.detach()))
            self._local[name] = own, self._build([own])
        own, optimizer = self._local[name]
        own.grad = here
        optimizer.step()
        own.grad = parameter.grad = None

    def norm(self, device: torch.device) -> Tensor:
        """Return the 2-norm of all gradients of the last backward pass; a collective call."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for groups, norms in self._norms.items():
            square = torch.stack(norms).double().square().sum()
            for group in groups:
                dist.all_reduce(square, group=group)
            total += square
        self._norms = {}
        return total.sqrt()
