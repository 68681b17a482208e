"""A random module on its way: its steps, its values so far on one process, and what the next step may draw."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Step = tuple[Callable[..., Any], tuple[int, ...]]  # a function of the module and of values by their numbers
LARGEST = 1500  # elements of a value
SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 8)


class Drawn(nn.Module):
    """Steps one after another on all values so far."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.results: list[int] = []
        self.named = False
        self.double()

    def forward(self, *values: torch.Tensor) -> Any:
        have = run(self, list(values), self.steps)
        found = [have[at] for at in self.results]
        return {f"r{n}": one for n, one in enumerate(found)} if self.named else tuple(found)


def run(module: nn.Module, have: list[Any], steps: list[Step]) -> list[Any]:
    for step, at in steps:
        made = step(module, *(have[i] for i in at))
        have = [*have, *(made if isinstance(made, tuple | list) else [made])]
    return have


@dataclass
class Drawing:
    """A module on its way: its values so far on one process."""

    draw: random.Random
    module: Drawn
    have: list[torch.Tensor]
    steps: list[Step] = field(default_factory=list)
    arguments: int = 1

    def some(self, fits: Callable[[torch.Tensor], bool] = lambda _: True) -> int:
        """Return the number of a value that fits, of late ones rather. Raises IndexError where none does."""
        found = [n for n, one in enumerate(self.have) if one.is_floating_point() and fits(one)]
        return self.draw.choice(found[-4:] if self.draw.random() < 0.7 else found)

    def parameter(self, *shape: int) -> str:
        """Return the name of a parameter of a shape: a new one, or one that is there."""
        names = [n for n, p in self.module.named_parameters() if tuple(p.shape) == shape]
        if names and self.draw.random() < 0.4:
            return self.draw.choice(names)
        name = f"p{len(list(self.module.parameters()))}"
        scale = 1 / math.sqrt(max(1, shape[-1] if len(shape) > 1 else 4))
        value = scale * torch.randn(*shape, dtype=torch.float64)
        self.module.register_parameter(name, nn.Parameter(value, self.draw.random() > 0.2))
        return name

    def buffer(self, value: torch.Tensor) -> str:
        name = f"b{len(list(self.module.buffers()))}"
        self.module.register_buffer(name, value)
        return name

    def size(self) -> int:
        return self.draw.choice(SIZES)

    def dim(self, at: int) -> int:
        return self.draw.randrange(self.have[at].ndim)

    def is_one(self, chance: float) -> bool:
        return self.draw.random() < chance


Made = tuple[Callable[..., Any], tuple[int, ...]]


def at_least(ndim: int) -> Callable[[torch.Tensor], bool]:
    return lambda one: one.ndim >= ndim
