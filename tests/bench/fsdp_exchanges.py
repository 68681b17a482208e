"""FSDP2's exchanges by copy engines, which take no SMs, next to NCCL's: steps of Llama-like blocks on all GPUs.

`python3 tests/bench/fsdp_exchanges.py OUT_DIR [--ranks 2] [--budget 90] [--compiled]` writes `fsdp_exchanges.jsonl` and
prints a line a step. The exchanges are the executor's (`executor/overlap/fsdp_exchange.py`).

Parameters are float32, computed in bfloat16, gradients reduced in float32. Ways take turns; the median counts, the
largest over ranks. `issued` is the host's time for a step without waiting for the GPU, `busy` what one profiled step
spends in kernels by kind, which overlap.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from executor.launch.local_ranks import launch
from executor.launch.records import Deadline, Recorder, read_records
from executor.overlap.fsdp_exchange import PushedGather, PushedScatter, Pushes
from simulator.step.symmetric_memory import GATHER_SETS, SCATTER_SETS
from tests.bench.overlap_end_to_end_worker import SIZES, Block, blocks_of, left, samples_of

LAYERS, TOKENS, ROUNDS, STEPS = 6, (2048, 4096, 1024, 8192), 5, 3


class Blocks(nn.Module):
    """FSDP2 shares streams and looks ahead among the units below one root."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, angles)
        return x


class Steps:
    """Sharded blocks and their optimizer; a call is a training step."""

    def __init__(
        self, x: Tensor, angles: Tensor, *, gathers: Pushes | None, scatters: Pushes | None, compiled: bool
    ) -> None:
        blocks = [block.float() for block in blocks_of(SIZES[0])[:LAYERS]]
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in blocks:
            if compiled:
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self.model, self.x, self.angles = Blocks(blocks), x, angles
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        for module in blocks:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if gathers is not None:
                module.set_custom_all_gather(PushedGather(gathers))
            if scatters is not None:
                module.set_custom_reduce_scatter(PushedScatter(scatters))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def __call__(self) -> Tensor:
        loss = self.model(self.x, self.angles).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def issued(step: Steps) -> float:
    """Median seconds in which the host issues a step that the GPU has not begun."""
    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return median(taken)


def busy(step: Steps) -> dict[str, float]:
    """Seconds of one step's kernels by kind."""
    kinds = {
        "nccl": "exchanges",
        "Memcpy": "exchanges",
        "gemm": "products",
        "nvjet": "products",
        "flash": "attention",
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = next((kind for part, kind in kinds.items() if part in event.name), "others")
            found[kind] = found.get(kind, 0.0) + event.device_time_total / 1e6
    return found


def alone(gathers: Pushes, scatters: Pushes, group: dist.ProcessGroup) -> dict[str, float]:
    """Seconds of a block's exchanges with nothing next to them."""
    world = dist.get_world_size(group)
    numel = sum(p.numel() for p in Block(SIZES[0]).parameters()) // world
    shard = torch.randn(numel, device="cuda", dtype=torch.bfloat16)
    whole, wide = shard.new_empty(numel * world), torch.randn(numel * world, device="cuda")
    part, gather, scatter = torch.empty(numel, device="cuda"), PushedGather(gathers), PushedScatter(scatters)
    calls = {
        "gather, nccl": lambda: dist.all_gather_into_tensor(whole, shard),
        "gather, pushed": lambda: gather(whole, shard, group),
        "scatter, nccl": lambda: dist.reduce_scatter_tensor(part, wide),
        "scatter, pushed": lambda: scatter(part, wide, group, None),
    }
    return {name: median(values) for name, values in samples_of(calls, rounds=3, count=5).items()}


def measure(recorder: Recorder, deadline: Deadline, *, compiled: bool) -> None:
    device, group, size = torch.device("cuda", torch.cuda.current_device()), dist.group.WORLD, SIZES[0]
    numel = sum(p.numel() for p in Block(size).parameters())
    gathers = Pushes("all-gather", GATHER_SETS, 2 * numel, group, device)
    scatters = Pushes("reduce-scatter", SCATTER_SETS, 4 * numel, group, device)
    recorder.write("alone", world=dist.get_world_size(group), parameters=numel, seconds=alone(gathers, scatters, group))
    half = size.width // size.heads // 2
    for tokens in TOKENS:
        if not left(deadline, 12):
            recorder.missing(f"{tokens} tokens")
            return
        torch.manual_seed(2 + dist.get_rank())
        x = torch.randn((1, tokens, size.width), device="cuda", dtype=torch.bfloat16)
        angles = torch.outer(torch.arange(tokens, device="cuda"), 5e5 ** (-torch.arange(half, device="cuda") / half))
        ways = {"nccl": (None, None), "gathers pushed": (gathers, None), "both pushed": (gathers, scatters)}
        steps = {
            name: Steps(x, angles, gathers=one, scatters=other, compiled=compiled)
            for name, (one, other) in ways.items()
        }
        losses = {name: [float(step()) for _ in range(3)] for name, step in steps.items()}
        done = samples_of(steps, rounds=ROUNDS, count=STEPS)
        for name, step in steps.items():
            recorder.write(
                "fsdp_step", what=name, tokens=tokens, compiled=compiled, seconds=median(done[name]), by_round=done[name],
                losses=losses[name], issued=issued(step), busy=busy(step) if tokens in TOKENS[:2] else {},
            )  # fmt: skip
        del steps, step


def worker(out: str, seconds: float, *, compiled: bool) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch._dynamo.config.recompile_limit = 64
    recorder, deadline = Recorder(out if rank == 0 else None), Deadline.since_launch(seconds)
    measure(recorder, deadline, compiled=compiled)
    recorder.close()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", type=float, default=90)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        worker(options.out, options.budget, compiled=options.compiled)
        return 0
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    records = folder / "fsdp_exchanges.jsonl"
    arguments = [str(records), f"--budget={options.budget - 5}", *(["--compiled"] if options.compiled else [])]
    done = launch(
        "tests.bench.fsdp_exchanges", arguments, ranks=options.ranks, budget_s=options.budget, directory=folder / "logs"
    )
    print(f"{done.outcome} after {done.seconds:.0f} s")
    if not done.ok:
        print(done.failure, done.stderr_tail[-3000:])
    for r in read_records(records) if records.exists() else ():
        if r["kind"] == "alone":
            print(", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in r["seconds"].items()))
        if r["kind"] == "fsdp_step":
            kinds = ", ".join(f"{kind} {1e3 * seconds:.1f}" for kind, seconds in r["busy"].items())
            print(
                f"{r['tokens']:6} {r['what']:16} {1e3 * r['seconds']:7.1f} ms, issued in {1e3 * r['issued']:.1f}; {kinds}; "
                f"losses {r['losses']}"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
