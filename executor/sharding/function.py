"""`ShardedFunction`: a function of DTensors on many GPUs, written as for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from executor.sharding.api import ShardedModule, shard
from executor.sharding.places import tokens_of


class ShardedFunction:
    """A function of tensors, written as for one GPU, that takes and returns DTensors, like nvFuser's wrapped
    definitions.

        mlp = ShardedFunction(lambda x, up, down: F.linear(F.gelu(F.linear(x, up)), down))
        y = mlp(x, up, down)         # DTensors in, the placements found for the result out

    A program is made for every new set of shapes and placements. Weights stay where they are, activations move.
    """

    def __init__(self, function: Callable[..., Any], **constraints: Any) -> None:
        self.function, self.constraints = function, {"policy": "follow_weights", "open_outputs": True, **constraints}
        self._made: dict[Any, ShardedModule] = {}

    def __call__(self, *args: DTensor) -> Any:
        key = tuple((one.shape, one.dtype, one.device_mesh, one.placements) for one in args)
        if key not in self._made:
            whole = [torch.empty(one.shape, dtype=one.dtype) for one in args]
            placements = {f"args_{i}": tokens_of(one.placements) for i, one in enumerate(args)}
            constraints = {
                "gradients": [n for n, one in zip(placements, args, strict=True) if one.requires_grad],
                **self.constraints,
            }
            module = _Function(self.function)
            constraints["backward"] = bool(constraints["gradients"])
            mesh = args[0].device_mesh
            self._made[key] = shard(module, whole, mesh=mesh, placements=placements, dynamic=False, **constraints)
        return self._made[key](*args)


class _Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)
