"""A pipeline in 1F1B whose stages are tensor parallel, then routed experts in two mesh axes; both compared with one
process.

    torchrun --nproc-per-node 4 examples/sharding/stages.py

Runs on NCCL where there are GPUs, else on gloo. The modules are written as for one GPU.
"""

import os

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional

from executor.sharding import ShardedModule, shard
from executor.sharding.weights import local


class Layer(nn.Module):
    def __init__(self, embed: int = 64, mlp: int = 256) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(embed), nn.Linear(embed, mlp), nn.Linear(mlp, embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Experts(nn.Module):
    """Tokens sorted by their expert, none dropped. torch captures its grouped product in bfloat16 alone."""

    def __init__(self, experts: int = 8, embed: int = 64, mlp: int = 32, chosen: int = 2) -> None:
        super().__init__()
        self.chosen, self.gate = chosen, nn.Linear(embed, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, embed, mlp) / 8)
        self.down = nn.Parameter(torch.randn(experts, mlp, embed) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, experts = self.gate(x).softmax(-1).topk(self.chosen, -1)
        by_expert, order = experts.flatten().sort()
        counts = torch.histc(by_expert.float(), len(self.up), 0, len(self.up) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = functional.silu(functional.grouped_mm(x[order // self.chosen], self.up, offs=ends))
        made = functional.grouped_mm(inner, self.down, offs=ends) * shares.flatten()[order, None]
        return made[order.argsort()].view(len(x), self.chosen, -1).sum(1)


def largest_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, as a part of the largest element."""
    return float((found.detach().float() - expected.detach().float()).abs().max() / expected.detach().abs().max())


def of_gradients(sharded: ShardedModule, expected: dict[str, torch.Tensor]) -> float:
    """Return how far the gradients of this rank's pieces of the parameters are from `expected`, by name in the
    module.
    """
    program, place, found = sharded.program, sharded.ranks.place, 0.0
    parameters = dict(sharded.named_parameters())
    for one in sharded.captured.graph.inputs:
        if one.target in parameters:
            own = place.piece(expected[one.target], program.buffers[program.inputs[one.name]])
            found = max(found, largest_difference(local(parameters[one.target].grad), own))
    return found


def gradients_of(model: nn.Module, y: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(y, parameters, gradient), strict=True))


def pipeline(device: torch.device) -> tuple[float, float]:
    """Return how far the result of eight rows and the parameters' gradients are from one process's."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), Layer(), Layer()).to(device)
    x, gradient = torch.randn(8, 16, 64, device=device), torch.randn(8, 16, 64, device=device)
    expected = model(x)
    sharded = shard(
        model,
        (x,),
        mesh={"pp": 2, "tp": 2},
        placements={"*.up.weight": ["R", "S(0)"], "*.up.bias": ["R", "S(0)"], "*.down.weight": ["R", "S(1)"]},
        stages={"axis": "pp", "of": {"2": 1, "3": 1}, "micro_batches": 4, "schedule": "1f1b"},
    )
    y = sharded.step(x, gradients=[gradient])
    gradients = gradients_of(model, expected, gradient)
    return largest_difference(y.full_tensor(), expected), of_gradients(sharded, gradients)


def experts(device: torch.device) -> tuple[float, float]:
    """Return how far the result of 32 tokens and the parameters' gradients are from one process's, in bfloat16."""
    torch.manual_seed(0)
    model = Experts().to(device, torch.bfloat16)
    x, gradient = torch.randn(2, 32, 64, device=device, dtype=torch.bfloat16)
    expected = model(x)
    sharded = shard(
        model,
        (x,),
        mesh={"ep": 2, "tp": 2},
        placements={"up": ["S(0)", "S(2)"], "down": ["S(0)", "S(1)"], "x": ["S(0)", "R"], "output0": ["S(0)", "R"]},
    )
    y = sharded.step(x, gradients=[gradient])
    gradients = gradients_of(model, expected, gradient)
    return largest_difference(y.full_tensor(), expected), of_gradients(sharded, gradients)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    for way in (pipeline, experts):
        found = torch.tensor(way(device), device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{way.__name__}: result within {found[0]:.0e}, gradients within {found[1]:.0e} of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
