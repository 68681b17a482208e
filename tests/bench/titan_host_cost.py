"""Host time of one torchtitan layer under each kind of plan, on a CPU: `host_cost.py` for torchtitan 0.2.2's Llama.

    python3 tests/bench/titan_host_cost.py [--only tp2,fsdp2tp2]     (a Python with torchtitan installed)

One process pretends to be a rank of several (torch's `fake` process group sends nothing), widths are tiny, and the cost
of a layer is the difference of a deep and a shallow model. What is compared are ways of running the same layer.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims as dims_module
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.infra.parallelize import parallelize_llama
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

SHALLOW, DEEP = 2, 8
TOKENS, VOCAB = 16, 128
CASES: dict[str, tuple[dict[str, int], str]] = {
    "one": ({}, "none"),
    "one-full": ({}, "full"),
    "one-selective-op": ({}, "selective"),
    "fsdp2": ({"dp_shard": 2}, "none"),
    "fsdp2-full": ({"dp_shard": 2}, "full"),
    "fsdp2-selective-op": ({"dp_shard": 2}, "selective"),
    "tp2": ({"tp": 2}, "none"),
    "tp2-full": ({"tp": 2}, "full"),
    "fsdp2tp2": ({"dp_shard": 2, "tp": 2}, "none"),
    "fsdp2tp2-full": ({"dp_shard": 2, "tp": 2}, "full"),
}


def build(layers: int, degrees: dict[str, int], recompute: str) -> nn.Module:
    model_args = TransformerModelArgs(
        dim=64, n_layers=layers, n_heads=4, n_kv_heads=4, vocab_size=VOCAB, multiple_of=32, max_seq_len=64
    )
    with torch.device("meta"):
        model = Transformer(model_args)
    job = JobConfig()
    job.training.seq_len, job.training.mixed_precision_param = TOKENS, "bfloat16"
    job.activation_checkpoint.mode, job.activation_checkpoint.selective_ac_option = recompute, "op"
    every = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1) | degrees
    parallel = ParallelDims(**every, world_size=dist.get_world_size())
    if dist.get_world_size() > 1:
        parallel.build_mesh()
    model = parallelize_llama(model, parallel, job)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).fill_(0.01)
    model.freqs_cis = model._precompute_freqs_cis()
    return model.train()


def passes(model: nn.Module, rounds: int, around: Callable[[], AbstractContextManager[object]]) -> tuple[float, float]:
    """Return the least seconds of the processor that forward and backward passes take."""
    tokens, targets = (torch.randint(0, VOCAB, (1, TOKENS)) for _ in range(2))
    forward, backward = [], []
    gc.disable()
    for turn in range(rounds + 2):
        for parameter in model.parameters():
            parameter.grad = None
        begin = time.process_time()
        with around():
            loss = cross_entropy_loss(model(tokens), targets)
            middle = time.process_time()
            loss.backward()
        if turn > 1:
            forward.append(middle - begin)
            backward.append(time.process_time() - middle)
    gc.enable()
    return min(forward), min(backward)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dims_module.device_type = "cpu"
    print("| plan | forward us a layer | backward us a layer | both | outside layers |")
    print("|---|--:|--:|--:|--:|")
    for name in options.only.split(",") if options.only else list(CASES):
        degrees, recompute = CASES[name]
        ranks = degrees.get("dp_shard", 1) * degrees.get("tp", 1)
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        around = (
            loss_parallel
            if degrees.get("tp", 1) > 1
            else partial(torch.autocast, "cpu", torch.bfloat16)
            if ranks == 1
            else nullcontext
        )
        with torch.autograd.set_multithreading_enabled(False):
            ends = [passes(build(layers, degrees, recompute), options.rounds, around) for layers in (SHALLOW, DEEP)]
        some = [(deep - shallow) / (DEEP - SHALLOW) * 1e6 for shallow, deep in zip(*ends, strict=True)]
        alongside = sum(ends[0]) * 1e6 - SHALLOW * sum(some)
        print(f"| {name} | {some[0]:.0f} | {some[1]:.0f} | {sum(some):.0f} | {alongside:.0f} |", flush=True)


if __name__ == "__main__":
    main()
