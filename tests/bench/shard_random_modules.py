"""Random modules, placed at random and run on ranks of gloo: outputs and gradients are those of one process, or it is
refused.

    python -m tests.bench.shard_random_modules --number 500 --ranks 2

Modules are chains of linear layers, norms, softmax under a mask, views, parts put together again, writes in place,
detached values and regions without autograd; batch and sequence are of random sizes, and inputs and weights are placed
at random.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

import torch
from torch import nn
from torch.nn import functional

from executor.sharding import api
from tests.executor.sharding import ranks
from tests.executor.sharding.ranks import Case, check
from topology.errors import PlannerError

WIDTH = 8
AT_ONCE = 25  # modules of one group of processes, which has a limit of time
STEPS = ("linear", "norm", "act", "attend", "view", "parts", "write", "detach", "region", "mix", "gate", "reduce")


class Chain(nn.Module):
    """Steps by name, each with a linear layer of its own; `seed` draws what a step leaves open."""

    def __init__(self, steps: list[str], seed: int) -> None:
        super().__init__()
        self.steps, self.seed = tuple(steps), seed
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in steps)
        self.norm = nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw = random.Random(self.seed)
        before = x
        for step, layer in zip(self.steps, self.layers, strict=True):
            before, x = x, self.one(step, layer, x, before, draw.random())
        return x

    def one(self, step: str, layer: nn.Module, x: torch.Tensor, before: torch.Tensor, share: float) -> torch.Tensor:
        match step:
            case "norm":
                return self.norm(x) * (1 + share)
            case "act":
                return functional.silu(layer(x)) if share < 0.5 else layer(x).relu() + 0.1 * x
            case "attend":
                scores = layer(x) @ x.transpose(-1, -2) / 3
                later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
                return scores.masked_fill(later, float("-inf")).softmax(-1) @ x
            case "view":
                y = layer(x).view(*x.shape[:2], 2, WIDTH // 2)
                return (y.transpose(2, 3) if share < 0.5 else y.flip(2)).reshape(x.shape)
            case "parts":
                first, second = layer(x).chunk(2, -1 if share < 0.7 else 1) if x.shape[1] % 2 == 0 else (x, x)
                return torch.cat((second * 2, first), -1 if share < 0.7 else 1) if first is not x else x
            case "write":
                y = layer(x)
                if share < 0.5:
                    y[:, 0] = y[:, -1] * 2
                else:
                    y[..., :2] += 1.0
                return y
            case "detach":
                y = layer(x)
                return y * x.detach() if share < 0.5 else x + (y.round() - y).detach() + y
            case "region":
                with torch.no_grad():
                    scale = layer(x).abs().amax(-1, keepdim=True) + 1
                return x / scale
            case "mix":
                return layer(x) + before
            case "gate":
                return torch.where(x > 0, layer(x), 0.5 * before)
            case "reduce":
                return x - layer(x).mean(1 if share < 0.5 else 0, keepdim=True)
        return layer(x)


def drawn(seed: int, number_of_ranks: int) -> Case:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    steps = [draw.choice(STEPS) for _ in range(draw.randint(1, 5))] + ["linear"]
    x = torch.randn(draw.choice((1, 2, 3, 4, 5)), draw.choice((2, 3, 4, 6)), WIDTH, dtype=torch.float64)
    if draw.random() < 0.3:
        x.requires_grad_()
    placements = {"x": [draw.choice(("R", "S(0)", "S(1)", "S(2)"))]}
    for at in range(len(steps)):
        placements[f"layers.{at}.weight"] = [draw.choice(("R", "S(0)", "S(1)"))]
    if draw.random() < 0.3:
        placements["output0"] = [draw.choice(("S(0)", "S(1)", "S(2)"))]
    return Case(
        f"{seed}: {steps}, {list(x.shape)}",
        Chain(steps, seed),
        (x,),
        {"d": number_of_ranks},
        {"placements": placements},
    )


def _worker(first: int, number: int, number_of_ranks: int) -> None:
    api.plan = ranks.planned_here
    found: Counter[str] = Counter()
    for seed in range(first, first + number):
        case = drawn(seed, number_of_ranks)
        try:
            used = {one.target for one in api.capture(case.module, case.args).graph.inputs}
            case.constraints["placements"] = {
                name: at for name, at in case.constraints["placements"].items() if name in {*used, "x", "output0"}
            }
            check(case)
            found["equal"] += 1
        except PlannerError as error:
            found[f"refused: {error.what[:60]}"] += 1
        except AssertionError as error:
            found["wrong"] += 1
            print(f"wrong: {case.name} {case.constraints['placements']}: {str(error)[:300]}", flush=True)
    if not torch.distributed.get_rank():
        for what, times in found.most_common():
            print(f"{times:6d} {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    for first in range(asked.first, asked.first + asked.number, AT_ONCE):
        number = min(AT_ONCE, asked.first + asked.number - first)
        ranks._on_ranks(_worker, asked.ranks, first, number, asked.ranks)


if __name__ == "__main__":
    main()
