"""A Llama 3 8B block and four ViT-L blocks on GPUs: what `planner shard` chooses compared with `parallelize_module`.

    torchrun --nproc-per-node=2 -m tests.bench.shard_with_torch OUT.jsonl [--cpu]

Forward and backward in bfloat16, tensor parallelism over all GPUs, inputs and outputs whole on every rank. torch's plan
is the one of its tutorial: column-parallel, then row-parallel layers. Ours is the same split by hand, then the one that
is found by time for the same boundary within the memory of that split; each is predicted first, from datasheets, and
compared with one GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812

from executor.sharding import api
from tests.bench.shard_on_gpus import median_s
from tests.bench.sharded_runs import Bench, run_row

BOUNDARY = {"x": ["R"], "output0": ["R"]}
COLUMNS, ROWS = ("wq", "wk", "wv", "w1", "w3"), ("wo", "w2")


class Block(nn.Module):
    """A pre-norm layer; `gated`: as in Llama, with causal attention, rotary angles and RMS norms, else as in ViT."""

    def __init__(self, embed: int, hidden: int, heads: int, kv_heads: int, tokens: int, *, gated: bool) -> None:
        super().__init__()
        self.width, self.group, self.gated = embed // heads, heads // kv_heads, gated
        norm, bias = (nn.RMSNorm, False) if gated else (nn.LayerNorm, True)
        self.attention_norm, self.ffn_norm = norm(embed), norm(embed)
        self.wq = nn.Linear(embed, embed, bias=bias)
        self.wk = nn.Linear(embed, kv_heads * self.width, bias=bias)
        self.wv = nn.Linear(embed, kv_heads * self.width, bias=bias)
        self.wo = nn.Linear(embed, embed, bias=bias)
        self.w1 = nn.Linear(embed, hidden, bias=bias)
        self.w3 = nn.Linear(embed, hidden, bias=bias) if gated else None
        self.w2 = nn.Linear(hidden, embed, bias=bias)
        at = torch.arange(tokens)[:, None] / 10000 ** (torch.arange(self.width // 2).repeat(2) * 2 / self.width)
        self.register_buffer("cos", at.cos())
        self.register_buffer("sin", at.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (w(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if self.gated:
            q, k = self.rotated(q), self.rotated(k)
            k, v = k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.gated)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        inner = F.gelu(self.w1(y)) if self.w3 is None else F.silu(self.w1(y)) * self.w3(y)
        return x + self.w2(inner)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat((-b, a), -1) * self.sin


class Stack(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def llama(small: bool) -> tuple[nn.Module, tuple[int, ...]]:
    if small:
        return Block(32, 64, 4, 2, 16, gated=True), (1, 16, 32)
    return Block(4096, 14336, 32, 8, 4096, gated=True), (1, 4096, 4096)


def vit(small: bool) -> tuple[nn.Module, tuple[int, ...]]:
    if small:
        return Stack([Block(32, 64, 4, 4, 16, gated=False) for _ in range(2)]), (2, 16, 32)
    return Stack([Block(1024, 4096, 16, 16, 576, gated=False) for _ in range(4)]), (32, 576, 1024)


def by_torch(module: nn.Module, x: torch.Tensor, bench: Bench) -> dict[str, Any]:
    """Return the times of `parallelize_module`'s tensor parallelism, launched one by one and as a CUDA graph."""
    split = copy.deepcopy(module)
    mesh = init_device_mesh(bench.device.type, (dist.get_world_size(),))
    for block in split.modules():
        if isinstance(block, Block):
            styles = {**dict.fromkeys(COLUMNS, ColwiseParallel()), **dict.fromkeys(ROWS, RowwiseParallel())}
            here = {name: style for name, style in styles.items() if getattr(block, name) is not None}
            parallelize_module(block, mesh, here)
    seed = torch.ones_like(x)

    def run() -> None:
        for parameter in split.parameters():
            parameter.grad = None
        split(x).backward(seed)

    row: dict[str, Any] = {"launched_s": median_s(run, bench.device)}
    if not bench.cpu:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run()
            row["graph_s"] = median_s(graph.replay, bench.device)
        except Exception as error:  # noqa: BLE001 - torch says in many ways that something cannot be recorded
            row["graph_failed"] = f"{type(error).__name__}: {error}"[:300]
    return row


def placed(module: nn.Module) -> dict[str, list[str]]:
    """Return torch's split as placements."""
    found = dict(BOUNDARY)
    for name, parameter in module.named_parameters():
        layer = name.split(".")[-2]
        rows = ["S(1)"] if parameter.dim() == 2 else ["R"]
        found[name] = ["S(0)"] if layer in COLUMNS else rows if layer in ROWS else ["R"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    if not asked.cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if asked.cpu else "nccl")
    bench = Bench(cpu=asked.cpu)
    for what, make in (("Llama 3 8B block", llama), ("four ViT-L blocks", vit)):
        torch.manual_seed(1)
        module, shape = make(asked.cpu)
        module = module.to(bench.device, bench.dtype)
        x = torch.randn(shape, device=bench.device).to(bench.dtype)
        mesh = {"tp": dist.get_world_size()}
        split = placed(module)
        ways = {
            "parallelize_module": None,
            "planner shard, the same split": {"placements": split, "policy": "min_time"},
            "planner shard, found by time": {"choose": ["*"], "policy": "min_time", "placements": BOUNDARY},
        }
        memory: float | None = None
        for way, constraints in ways.items():
            row: dict[str, Any] = {"what": what, "by": way, "ranks": dist.get_world_size()}
            try:
                if constraints is None:
                    row |= by_torch(module, x, bench)
                else:
                    asked_of = partial(api.request, mesh=mesh, **constraints)
                    run_row(row, bench, module, (x,), {}, asked_of, memory)
                    memory = row["state_bytes"] + row["predicted_peak_bytes"]
            except Exception as error:  # noqa: BLE001 - the other rows are still worth their time
                row["failed"] = f"{type(error).__name__}: {error}"[:1500]
            if dist.get_rank() == 0:
                print(row, flush=True)
                with asked.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
