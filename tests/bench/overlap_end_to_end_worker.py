"""Measures on every rank, for `overlap_end_to_end.py`.

A step is forward, backward and AdamW of some Llama blocks (no embedding, no head), one sequence, bf16,
sequence-parallel between the tensor-parallel products. All ways have the same weights; what is not a tensor-parallel
product is compiled in all of them. Ways take turns for rounds of steps; the median counts, the largest over ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from executor import overlap
from executor.gpu import symmetric_memory as symmetric
from executor.launch.records import Deadline, Recorder
from executor.overlap.mode import Mode
from tests.bench.overlap_alone import Alone

ROUNDS, STEPS = 9, 3
IN_STEPS = ("nccl", "copy_engine", "fused")  # modes that whole steps choose from
FUSED = ("symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    name: str
    width: int
    inner: int
    heads: int
    kv_heads: int
    layers: int


SIZES = (
    Size(name="8B-like", width=4096, inner=14336, heads=32, kv_heads=8, layers=8),
    Size(name="70B-like", width=8192, inner=28672, heads=64, kv_heads=8, layers=4),
)


@torch.compile(dynamic=False)
def attend(q: Tensor, k: Tensor, v: Tensor, depth: int, angles: Tensor) -> Tensor:
    """Causal attention of (1, S, heads·depth) with rotary positions; `angles` is (S, depth/2)."""
    q, k, v = (t.unflatten(-1, (-1, depth)).transpose(1, 2) for t in (q, k, v))
    q, k = rotate(q, angles), rotate(k, angles)
    return (
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    )


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    one, two = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(x.dtype)


@torch.compile(dynamic=False)
def gate(g: Tensor, u: Tensor) -> Tensor:
    return nn.functional.silu(g) * u


@torch.compile(dynamic=False)
def norm(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.depth = size.width // size.heads
        self.wq = nn.Linear(size.width, size.width, bias=False)
        self.wk = nn.Linear(size.width, size.kv_heads * self.depth, bias=False)
        self.wv = nn.Linear(size.width, size.kv_heads * self.depth, bias=False)
        self.wo = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return self.wo(attend(self.wq(x), self.wk(x), self.wv(x), self.depth, angles))


class FeedForward(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.width, size.inner, bias=False)
        self.w3 = nn.Linear(size.width, size.inner, bias=False)
        self.w2 = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(gate(self.w1(x), self.w3(x)))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(size), FeedForward(size)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(size.width, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class AsynchronousBlock(Block):
    """A type of its own, so that what was compiled for the plain block is not taken for this one."""


class OverlappedBlock(nn.Module):
    """The same from this rank's parts of the weights, its four products in the modes named."""

    def __init__(self, block: Block, modes: Mapping[str, str | Mode], group: dist.ProcessGroup) -> None:
        super().__init__()
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        self.modes, self.group, self.depth = modes, group, block.attention.depth

        def part(linear: nn.Linear, dim: int) -> nn.Parameter:
            return nn.Parameter(linear.weight.detach().chunk(world, dim)[rank].clone())

        a, f = block.attention, block.feed_forward
        self.qkv = nn.ParameterList([part(a.wq, 0), part(a.wk, 0), part(a.wv, 0)])
        self.up = nn.ParameterList([part(f.w1, 0), part(f.w3, 0)])
        self.o, self.down = part(a.wo, 1), part(f.w2, 1)
        self.norms = nn.ParameterList(
            [nn.Parameter(n.weight.detach().clone()) for n in (block.attention_norm, block.ffn_norm)]
        )

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        gather, scatter, modes, group = overlap.all_gather_matmul, overlap.matmul_reduce_scatter, self.modes, self.group
        q, k, v = gather(norm(x, self.norms[0]), tuple(self.qkv), group, mode=modes["qkv"], dim=1)
        x = x + scatter(attend(q, k, v, self.depth, angles), self.o, group, mode=modes["o"], dim=1)
        g, u = gather(norm(x, self.norms[1]), tuple(self.up), group, mode=modes["up"], dim=1)
        return x + scatter(gate(g, u), self.down, group, mode=modes["down"], dim=1)


class Steps:
    """Blocks and their optimizer; a call is a training step."""

    def __init__(self, blocks: list[nn.Module], x: Tensor, angles: Tensor) -> None:
        self.blocks, self.x, self.angles = nn.ModuleList(blocks), x, angles
        self.optimizer = torch.optim.AdamW(self.blocks.parameters(), lr=1e-5, fused=True)

    def __call__(self) -> Tensor:
        x = self.x
        for block in self.blocks:
            x = block(x, self.angles)
        loss = x.float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def blocks_of(size: Size, kind: type[Block] = Block) -> list[Block]:
    """The same weights on every rank."""
    torch.manual_seed(1)
    with torch.device("cuda"):
        blocks = [kind(size).to(torch.bfloat16) for _ in range(size.layers)]
    for block in blocks:
        for name, parameter in block.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)
    return blocks


def with_dtensor(blocks: list[Block], mesh: object, *, asynchronous: bool) -> list[nn.Module]:
    """Cut the blocks by PyTorch's styles, as torchtitan does, and compile them one by one."""
    plan = {
        "attention_norm": SequenceParallel(),
        "ffn_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    torch._inductor.config._micro_pipeline_tp = asynchronous
    return [torch.compile(parallelize_module(block, mesh, plan), dynamic=False) for block in blocks]


def chosen_modes(
    size: Size, tokens: int, group: dist.ProcessGroup
) -> tuple[dict[str, str], dict[str, dict[str, float]]]:
    """Measure every mode at every site, forward and backward, and take the fastest."""
    world, draw = dist.get_world_size(group), lambda *s: torch.randn(s, device="cuda", dtype=torch.bfloat16) * 0.05
    kv = size.width // size.heads * size.kv_heads
    sites = {
        "qkv": (size.width, (size.width, kv, kv)), "o": (size.width, None),
        "up": (size.width, (size.inner, size.inner)), "down": (size.inner, None),
    }  # fmt: skip
    modes, times = {}, {}
    for site, (depth, columns) in sites.items():
        if columns:
            x = draw(1, tokens // world, depth).requires_grad_()
            weights = tuple(draw(n // world, depth).requires_grad_() for n in columns)
            slopes = tuple(draw(1, tokens, n // world) for n in columns)
        else:
            x = draw(1, tokens, depth // world).requires_grad_()
            weights, slopes = (
                (draw(size.width, depth // world).requires_grad_(),),
                (draw(1, tokens // world, size.width),),
            )

        def call(mode: str, x=x, weights=weights, slopes=slopes, columns=columns) -> None:
            if columns:
                outs = overlap.all_gather_matmul(x, weights, group, mode=mode, dim=1)
            else:
                outs = (overlap.matmul_reduce_scatter(x, weights[0], group, mode=mode, dim=1),)
            torch.autograd.grad(outs, (x, *weights), slopes)

        times[site] = interleaved({mode: (lambda mode=mode: call(mode)) for mode in overlap.MODES}, rounds=3, count=6)
        modes[site] = min(times[site], key=times[site].get)
    return modes, times


def modes_in_steps(sites: Mapping[str, str], steps: Steps) -> tuple[dict[str, str], list[dict[str, object]]]:
    """Start from the modes of single sites and take, site by site, the mode with which a whole step is the shortest."""

    def step_with(modes: dict[str, str]) -> Callable[[], object]:
        def step() -> None:
            for block in steps.blocks:
                block.modes = modes
            steps()

        return step

    best, tried = dict(sites), []
    for site in sites:
        seconds = interleaved({mode: step_with(best | {site: mode}) for mode in IN_STEPS}, rounds=3, count=2)
        tried.append({"site": site, "seconds": seconds})
        best[site] = min(seconds, key=seconds.get)
    return best, tried


def interleaved(calls: dict[str, Callable[[], object]], *, rounds: int, count: int) -> dict[str, float]:
    """Median seconds of a call, ways taking turns; the largest over ranks."""
    return {name: median(values) for name, values in samples_of(calls, rounds=rounds, count=count).items()}


def samples_of(calls: dict[str, Callable[[], object]], *, rounds: int, count: int) -> dict[str, list[float]]:
    """Seconds of a call by round, ways taking turns; the largest over ranks."""
    samples = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            dist.barrier()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(count):
                call()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / 1e3 / count)
    mine = torch.tensor(list(samples.values()), device="cuda")
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return dict(zip(samples, mine.tolist(), strict=True))


def hidden(samples: Mapping[str, list[float]]) -> list[float]:
    """Share of the exposed communication that the chosen modes hide, by round: of what a step in nccl mode takes longer
    than one in which nothing moves.
    """
    ways = (samples["nccl mode"], samples["chosen modes"], samples["nothing moved"])
    return [(nccl - chosen) / (nccl - nothing) for nccl, chosen, nothing in zip(*ways, strict=True)]


def fused_operators(step: Callable[[], object]) -> int:
    """Count PyTorch's fused operators in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.name in FUSED for event in profile.events())


def left(deadline: Deadline, seconds: float) -> bool:
    """Say whether all ranks have so many seconds left."""
    flag = torch.tensor(deadline.left_s - seconds, device="cuda")
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag > 0)


class Bench:
    """Inputs and ways of one size."""

    def __init__(self, size: Size, tokens: int, recorder: Recorder, deadline: Deadline) -> None:
        self.size, self.tokens, self.recorder, self.deadline = size, tokens, recorder, deadline
        self.group, world = dist.group.WORLD, dist.get_world_size()
        torch.manual_seed(2)
        whole = torch.randn((1, tokens, size.width), device="cuda", dtype=torch.bfloat16)
        self.x = whole.chunk(world, 1)[dist.get_rank()].contiguous()
        half = size.width // size.heads // 2
        powers = 5e5 ** (-torch.arange(half, device="cuda") / half)
        self.angles = torch.outer(torch.arange(tokens, device="cuda"), powers)

    def ours(self, modes: Mapping[str, str | Mode], *, compiled: bool) -> Steps:
        blocks = [OverlappedBlock(block, modes, self.group) for block in blocks_of(self.size)]
        for block in blocks if compiled else ():
            block.compile()
        return Steps(blocks, self.x, self.angles)

    def choose(self, *, in_steps: bool) -> dict[str, str]:
        """Return the mode of each site with which an eager step is the shortest, or the site alone."""
        sites, times = chosen_modes(self.size, self.tokens, self.group)
        self.recorder.write("sites", model=self.size.name, tokens=self.tokens, seconds=times)
        if not in_steps:
            self.recorder.write("chosen", model=self.size.name, modes=sites)
            return sites
        modes, tried = modes_in_steps(sites, self.ours(sites, compiled=False))
        self.recorder.write("chosen", model=self.size.name, modes=modes, of_single_sites=sites, in_steps=tried)
        return modes

    def time(self, modes: dict[str, str], *, compiled: bool, torchs: bool) -> None:
        ways = {"chosen modes": modes, "nccl mode": dict.fromkeys(modes, "nccl")}
        steps = {name: self.ours(by_site, compiled=compiled) for name, by_site in ways.items()}
        steps["nothing moved"] = self.ours(dict.fromkeys(modes, Alone()), compiled=compiled)
        losses = {name: float(step()) for name, step in steps.items()}
        if torchs:
            losses |= add_torchs(steps, self.size, self.x, self.angles, self.recorder, self.deadline)
        of = {"model": self.size.name, "compiled": compiled, "tokens": self.tokens, "world": dist.get_world_size()}
        self.recorder.write("numbers", **of, first_losses=losses)
        samples = samples_of(steps, rounds=ROUNDS, count=STEPS)
        self.recorder.write("hidden", **of, by_round=hidden(samples))
        for name, seconds in samples.items():
            fused = fused_operators(steps[name])
            self.recorder.write("step", **of, what=name, seconds=median(seconds), by_round=seconds, fused=fused)
        symmetric.check_delivered()


def add_torchs(
    steps: dict[str, Steps], size: Size, x: Tensor, angles: Tensor, recorder: Recorder, deadline: Deadline
) -> dict[str, float]:
    """Add steps of DTensor's tensor parallelism, plain and asynchronous; return the losses of their first steps."""
    mesh, losses = init_device_mesh("cuda", (dist.get_world_size(),)), {}
    for name, kind in (("DTensor", Block), ("async TP", AsynchronousBlock)):
        if not left(deadline, 25):
            recorder.missing(f"{size.name}: {name}")
            continue
        blocks = with_dtensor(blocks_of(size, kind), mesh, asynchronous=kind is AsynchronousBlock)
        steps[name] = Steps(blocks, x, angles)
        losses[name] = float(steps[name]())  # compiled here, while the switch stands
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ours-alone", action="store_true", help="without DTensor and async TP, which compile")
    parser.add_argument("--compiled", action="store_true", help="compiled steps alone, in the modes of single sites")
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch._inductor.config.fx_graph_cache = False  # a cached graph might be the other way's
    torch._functorch.config.enable_autograd_cache = False
    torch._dynamo.config.recompile_limit = 64  # all ways share the code of a block
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    # One process a GPU: a backward pass on a thread of its own only costs hand-overs of the interpreter's lock.
    torch.autograd.set_multithreading_enabled(False)
    # Without this PyTorch's pass declines the group in silence, and async TP is plain TP (pytorch issue 193027).
    enable_symm_mem_for_group(dist.group.WORLD.group_name)
    recorder, deadline = Recorder(options.out if rank == 0 else None), Deadline.since_launch(options.seconds)
    modes: dict[str, dict[str, str]] = {}
    for compiled in (True,) if options.compiled else (False, True):
        for size in SIZES:
            if not left(deadline, 25 if options.ours_alone else 50):
                recorder.missing(f"{size.name}, {'compiled' if compiled else 'eager'}")
                continue
            bench = Bench(size, options.tokens, recorder, deadline)
            modes[size.name] = modes.get(size.name) or bench.choose(in_steps=not options.compiled)
            bench.time(modes[size.name], compiled=compiled, torchs=not (compiled or options.ours_alone))
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    symmetric.release()
    recorder.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
