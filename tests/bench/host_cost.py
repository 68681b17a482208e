"""Host time of one layer under each kind of plan, on a CPU: what Python, dispatch and autograd cost, next to no
arithmetic.

    python3 tests/bench/host_cost.py [--only tp2] [--compiled] [--profile tp2]

One process pretends to be a rank of two (torch's `fake` process group sends nothing), widths are tiny, and the cost of
a layer is the difference of a deep and a shallow model. A GPU's host is quicker or slower than this one by some factor;
what is compared are ways of running the same layer. The least processor time of several passes, one thread: whatever
else runs only adds to it.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - the path comes first
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from executor.parallel.meshes import build_meshes  # noqa: E402
from executor.parallel.parallelize import Setup  # noqa: E402
from executor.parallel.train_step import Trainer  # noqa: E402
from simulator.config.model import MixtureOfExperts, Model  # noqa: E402
from simulator.config.plan import Plan  # noqa: E402
from simulator.config.runtime import Runtime  # noqa: E402
from simulator.config.workload import Workload  # noqa: E402

SHALLOW, DEEP = 2, 10
DENSE = {
    "name": "tiny", "family": "x", "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 128, "vocab": 128,
}  # fmt: skip
SPARSE = {**DENSE, "moe": MixtureOfExperts(experts=8, experts_per_token=2, ffn=32)}
SP = {"tp": 2, "sequence_parallel": True, "micro_batch_size": 2}
CASES = {
    "one": (DENSE, Plan(micro_batch_size=2)),
    "fsdp2": (DENSE, Plan(dp_shard=2, micro_batch_size=1)),
    "fsdp2-selop": (DENSE, Plan(dp_shard=2, micro_batch_size=1, recompute="selective-op")),
    "tp2": (DENSE, Plan(**SP)),
    "tp2-whole": (DENSE, Plan(tp=2, micro_batch_size=2)),
    "tp2-selective": (DENSE, Plan(**SP, recompute="selective")),
    "tp2-selop": (DENSE, Plan(**SP, recompute="selective-op")),
    "tp2-full": (DENSE, Plan(**SP, recompute="full")),
    **{f"tp2-{mode}": (DENSE, Plan(**SP, tp_overlap=mode)) for mode in ("chunked", "copy_engine")},
    "moe-one": (SPARSE, Plan(micro_batch_size=2)),
    "moe-fsdp2": (SPARSE, Plan(dp_shard=2, micro_batch_size=1)),
    "moe-ep2": (SPARSE, Plan(dp_shard=2, ep=2, micro_batch_size=1)),
    "moe-tp2": (SPARSE, Plan(**SP)),
    "moe-tp2-ep2": (SPARSE, Plan(**SP, ep=2)),
}


def trainer(shapes: dict[str, object], layers: int, plan: Plan, *, compiled: bool) -> Trainer:
    types = {"param_dtype": "float32", "compute_dtype": "bfloat16", "reduce_dtype": "float32"}
    runtime = Runtime(**types, compile=compiled)
    workload = Workload(seq_len=8, global_batch_size=plan.data_parallel * plan.micro_batch_size)
    model = Model(**shapes, layers=layers)
    meshes = build_meshes(plan, "cpu")
    return Trainer(
        Setup(plan=plan, model=model, workload=workload, runtime=runtime, meshes=meshes, device=torch.device("cpu"))
    )


def passes(some: Trainer, rounds: int) -> tuple[float, float]:
    """Return the least seconds of the processor that forward and backward passes take."""
    tokens, targets = some.batch(0)
    module = some.parallel.modules[0]
    forward, backward = [], []
    gc.disable()
    for turn in range(rounds + 2):
        for parameter in some.parameters():
            parameter.grad = None
        begin = time.process_time()
        with some._precision():
            loss = some.parallel.loss(module(tokens), targets)
        middle = time.process_time()
        loss.backward()
        end = time.process_time()
        if turn > 1:
            forward.append(middle - begin)
            backward.append(end - middle)
    gc.enable()
    return min(forward), min(backward)


def world(ranks: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiled", action="store_true", help="blocks compiled")
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.only.split(",") if options.only else list(CASES)
    print("| plan | forward us a layer | backward us a layer | both |")
    print("|---|--:|--:|--:|")
    for name in names:
        shapes, plan = CASES[name]
        world(plan.gpus)
        with torch.autograd.set_multithreading_enabled(False):
            ends = [
                passes(trainer(shapes, layers, plan, compiled=options.compiled), options.rounds)
                for layers in (SHALLOW, DEEP)
            ]
        some = [(deep - shallow) / (DEEP - SHALLOW) * 1e6 for shallow, deep in zip(*ends, strict=True)]
        print(f"| {name} | {some[0]:.0f} | {some[1]:.0f} | {sum(some):.0f} |", flush=True)
        if options.profile:
            profiler, watched = cProfile.Profile(), trainer(shapes, DEEP, plan, compiled=options.compiled)
            passes(watched, 2)
            with torch.autograd.set_multithreading_enabled(False):
                profiler.enable()
                passes(watched, 5)
                profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
