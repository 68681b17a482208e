"""Haliax's axis maps on a plain module: FSDP and TP in ten lines, HSDP and two dims in twelve.

    torchrun --nproc-per-node 4 examples/sharding/axis_maps.py    # on gloo; stages.py runs on NCCL, too

Dims of inputs and parameters get names once. `parameters` says over which mesh axes a named dim is sharded while a
parameter rests, `compute` how it is used and how inputs and results lie. Nobody names a collective.
"""

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional

from executor.sharding import ShardedModule, shard

AXES = {
    "input": "batch embed",
    "*.up.weight": "mlp embed",
    "*.up.bias": "mlp",
    "*.down.weight": "embed mlp",
    "*.down.bias": "embed",
}


class Layer(nn.Module):
    def __init__(self, embed: int = 32, mlp: int = 128) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(embed, mlp), nn.Linear(mlp, embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


def fsdp(model: nn.Module, x: torch.Tensor) -> ShardedModule:
    return shard(
        model,
        (x,),
        axes=AXES,
        mesh={"data": 4},
        parameters={"embed": "data"},
        compute={"batch": "data"},
    )


def tensor_parallel(model: nn.Module, x: torch.Tensor) -> ShardedModule:
    return shard(
        model,
        (x,),
        axes=AXES,
        mesh={"model": 4},
        parameters={"mlp": "model"},
        compute={"mlp": "model"},
    )


def hsdp(model: nn.Module, x: torch.Tensor) -> ShardedModule:
    return shard(
        model,
        (x,),
        axes=AXES,
        mesh={"replica": 2, "data": 2},
        parameters={"embed": "data"},
        compute={"batch": ["replica", "data"]},
    )


def two_dims(model: nn.Module, x: torch.Tensor) -> ShardedModule:
    return shard(
        model,
        (x,),
        axes=AXES,
        mesh={"data": 2, "model": 2},
        parameters={"embed": "data", "mlp": "model"},
        compute={"batch": "data", "mlp": "model"},
    )


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(), Layer()), torch.randn(8, 32)
    expected = model(x)
    for way in (fsdp, tensor_parallel, hsdp, two_dims):
        sharded = way(model, x)
        y = sharded(x)
        y.square().mean().backward()
        torch.testing.assert_close(y.full_tensor(), expected)
        if dist.get_rank() == 0:
            held = sum(piece.numel() for piece in sharded.parameters())
            whole = sum(p.numel() for p in model.parameters())
            print(f"{way.__name__}: result {y.placements}, {held:,} of {whole:,} held")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
