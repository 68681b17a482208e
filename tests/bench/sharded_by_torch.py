"""A Llama block and a vision transformer alongside `parallelize_module`: torch's tensor-parallel plans for them, and
the compiler's programs with the same placements, and with the best ones of the same boundary and memory.

Both run the same module, forward and backward, and both are timed as CUDA graphs where they can be recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from executor.sharding import api
from tests.bench.shard_on_gpus import median_s
from tests.bench.sharded_runs import Bench, Row, run_row

TOKENS, COLUMNS, ROWS = 4096, ["S(0)"], ["S(1)"]
CUT, WHOLE = ["S(1)"], ["R"]


class Attention(nn.Module):
    """Attention over heads, as many as the weights of this rank have; `angles` are rotary ones."""

    def __init__(self, width: int, heads: int, kv_heads: int, *, bias: bool, causal: bool) -> None:
        super().__init__()
        self.head, self.causal, kv_width = width // heads, causal, width // heads * kv_heads
        self.wq, self.wo = nn.Linear(width, width, bias), nn.Linear(width, width, bias)
        self.wk, self.wv = nn.Linear(width, kv_width, bias), nn.Linear(width, kv_width, bias)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        batch, seq, _ = x.shape
        q, k, v = (w(x).view(batch, seq, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if angles is not None:
            q, k = (
                one * angles[0] + torch.cat((-one.chunk(2, -1)[1], one.chunk(2, -1)[0]), -1) * angles[1]
                for one in (q, k)
            )
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.wo(mixed.transpose(1, 2).reshape(batch, seq, -1))


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Plain(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.gelu(self.w1(x)))


class LlamaBlock(nn.Module):
    """A block of Llama 3 8B, or a narrow one."""

    def __init__(self, *, small: bool) -> None:
        super().__init__()
        width, hidden, heads, kv_heads = (32, 64, 4, 2) if small else (4096, 14336, 32, 8)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, kv_heads, bias=False, causal=True)
        self.feed_forward = Gated(width, hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), (cos, sin))
        return x + self.feed_forward(self.ffn_norm(x))


class VisionBlock(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, heads, bias=True, causal=False)
        self.feed_forward = Plain(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class VisionTransformer(nn.Module):
    """ViT-L/16 with two of its blocks, without a class token, or a narrow one."""

    def __init__(self, *, small: bool) -> None:
        super().__init__()
        width, hidden, heads, patch, places = (32, 64, 4, 4, 16) if small else (1024, 4096, 16, 16, 196)
        self.patches, self.places = nn.Conv2d(3, width, patch, patch), nn.Parameter(torch.randn(1, places, width) / 50)
        self.blocks = nn.ModuleList([VisionBlock(width, hidden, heads) for _ in range(2)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@dataclass(frozen=True)
class TorchPlan:
    """A module, torch's plan for it, and the placements that this plan has; `cut` is whether tokens lie sharded outside
    attention and feed-forward.
    """

    name: str
    make: Callable[[Bench], tuple[nn.Module, tuple[torch.Tensor, ...]]]
    plan: dict[str, Any]
    placements: dict[str, list[str]]
    cut: bool = False
    gradient: bool = True  # of the first argument


def _llama(bench: Bench) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    module, width, head, tokens = LlamaBlock(small=bench.cpu), *((32, 8, 16) if bench.cpu else (4096, 128, TOKENS))
    at = torch.arange(tokens)[:, None] / 500000 ** (torch.arange(head // 2).repeat(2) / (head // 2))
    return module, (torch.randn(1, tokens, width), at.cos(), at.sin())


def _vision(bench: Bench) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return VisionTransformer(small=bench.cpu), (torch.randn(*((4, 3, 16, 16) if bench.cpu else (64, 3, 224, 224))),)


def _styles(prefix: str = "", *, names: tuple[str, ...] = ("wq", "wk", "wv"), mlp: tuple[str, ...]) -> dict[str, Any]:
    """Return torch's plan of a block: columns, then rows."""
    columns = [*(f"{prefix}attention.{n}" for n in names), *(f"{prefix}feed_forward.{n}" for n in mlp)]
    rows = [f"{prefix}attention.wo", f"{prefix}feed_forward.w2"]
    return {n: ColwiseParallel() for n in columns} | {n: RowwiseParallel() for n in rows}


def _on_cut_tokens(angles: bool) -> dict[str, Any]:
    """Return what torch's tutorial adds for tokens that lie sharded in norms and residuals."""
    into = (Shard(1), *((None,) if angles else ()))
    whole = (Replicate(), *((None,) if angles else ()))
    return {
        "attention_norm": SequenceParallel(),
        "ffn_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=into, desired_input_layouts=whole),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }


LLAMA = {
    **dict.fromkeys(("*.wq.weight", "*.wk.weight", "*.wv.weight", "*.w1.weight", "*.w3.weight"), COLUMNS),
    **dict.fromkeys(("*.wo.weight", "*.w2.weight"), ROWS),
}
VISION = {
    **dict.fromkeys(("*.wq.*", "*.wk.*", "*.wv.*", "*.w1.*"), COLUMNS),
    **dict.fromkeys(("*.wo.weight", "*.w2.weight"), ROWS),
}
PLANS = (
    TorchPlan("Llama 3 8B block", _llama, _styles(mlp=("w1", "w3")), LLAMA),
    TorchPlan(
        "Llama 3 8B block, tokens sharded outside",
        _llama,
        _styles(mlp=("w1", "w3")) | _on_cut_tokens(angles=True),
        LLAMA,
        cut=True,
    ),
    TorchPlan(
        "ViT-L/16, two blocks",
        _vision,
        _styles("blocks.0.", mlp=("w1",)) | _styles("blocks.1.", mlp=("w1",)),
        VISION,
        gradient=False,
    ),
)


def compared(bench: Bench) -> Iterator[tuple[str, Callable[[Row], None]]]:
    """Yield each module with the plan's own placements, then with those found for its boundary and memory."""
    for one in PLANS:
        found: Row = {}  # what the row with the plan's placements says of its memory and of torch's time
        yield f"{one.name}, placed as by parallelize_module", lambda row, o=one, f=found: _as_planned(row, bench, o, f)
        yield (
            f"{one.name}, found by time for its boundary and memory",
            lambda row, o=one, f=found: _found(row, bench, o, f),
        )


def _made(bench: Bench, one: TorchPlan) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(7)
    with torch.device(bench.device):
        module, args = one.make(bench)
    return module.to(bench.device, bench.dtype), tuple(arg.to(bench.dtype) for arg in args)


def _document(one: TorchPlan, captured: Any, **constraints: Any) -> Row:
    mesh, edge = {"d": dist.get_world_size()}, CUT if one.cut else WHOLE
    first = next(each.name for each in captured.graph.inputs if each.kind == "input")
    constraints["placements"] = {first: edge, "output0": edge, **constraints.get("placements", {})}
    return api.request(captured, mesh, gradients=[first] if one.gradient else [], **constraints)


def _as_planned(row: Row, bench: Bench, one: TorchPlan, found: Row) -> None:
    module, args = _made(bench, one)
    run_row(row, bench, module, args, {}, lambda captured: _document(one, captured, placements=one.placements))
    found["memory_bytes"] = row["state_bytes"] + row["predicted_peak_bytes"]
    seconds, recorded = _by_torch(bench, one, module, args)
    found["by_torch"] = {"hand_written_s": seconds, "by_hand_recorded": recorded}
    row |= found["by_torch"]


def _found(row: Row, bench: Bench, one: TorchPlan, found: Row) -> None:
    module, args = _made(bench, one)

    def document(captured: Any) -> Row:
        open_ = [each.name for each in captured.graph.inputs if each.kind == "parameter"]
        return _document(one, captured, choose=open_, policy="min_time")

    run_row(row, bench, module, args, {}, document, found["memory_bytes"])
    row |= found["by_torch"]


def _by_torch(bench: Bench, one: TorchPlan, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[float, bool]:
    """Return the time of torch's plan, and whether it is that of a CUDA graph."""
    ranks = dist.get_world_size()
    own = parallelize_module(copy.deepcopy(module), init_device_mesh(bench.device.type, (ranks,)), one.plan)
    first = args[0].chunk(ranks, 1)[dist.get_rank()] if one.cut else args[0]
    first = first.clone().requires_grad_(one.gradient)
    leaves = [*own.parameters(), *([first] if one.gradient else [])]

    def run() -> Any:
        found = own(first, *args[1:])
        return torch.autograd.grad(found, leaves, torch.ones_like(found))

    launched = median_s(run, bench.device)
    if bench.cpu:
        return launched, False
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            kept = run()
        recorded = median_s(graph.replay, bench.device)
        del kept
    except Exception:  # noqa: BLE001 - torch says in many ways that something cannot be recorded
        return launched, False
    return recorded, True
