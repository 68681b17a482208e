"""The host time of a layer on this machine, measured on the CPU alone, without a GPU.

    python -m executor.calibrate.host_alone --records FILE --machine NAME --gpu-name GPU

One process is a rank of two (torch's `fake` process group sends nothing), tensors are tiny, and the cost of a layer is
the difference between a deep and a shallow model. Times are the least processor time of several passes in one thread,
since other processes only add to it. A layer is run plain, and sharded by `parallelize_module`, where every operator
goes through DTensor's dispatch.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.calibrate.processors import Processors
from executor.launch.records import Recorder
from topology.codec import to_builtins
from topology.profile.samples import LAYER_CUT, LAYER_PLAIN, HostSample, Provenance

WIDTH, HEADS, FFN, TOKENS = 64, 4, 128, 16
SHALLOW, DEEP, ROUNDS = 1, 5, 10


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = q * 0.5 + k * 0.5, k * 0.5 + q * 0.5  # as many operators as rotary positions take
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        whole: Tensor = self.wo(seen.transpose(1, 2).flatten(-2))
        return whole


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, FFN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """A Llama's layer: (1, TOKENS, WIDTH) to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


def blocks(layers: int, *, cut: bool) -> nn.Sequential:
    """Return `layers` blocks; with `cut` sharded over the ranks of the process group, including the tokens between
    them.
    """
    made = nn.Sequential(*(Block() for _ in range(layers)))
    if not cut:
        return made
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    styles: dict[str, ParallelStyle] = {
        **dict.fromkeys(("attention_norm", "ffn_norm"), SequenceParallel()),
        **dict.fromkeys(("attention", "feed_forward"), whole),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in made:
        parallelize_module(block, mesh, styles)
    return made


def pass_s(module: nn.Module, x: Tensor, rounds: int) -> float:
    """Return the least processor seconds of a forward and a backward pass, on one processor after the other: one that
    shares its core takes 1.6 times as long.
    """
    found = []
    with Processors() as processors:
        for _ in range(rounds + 2):
            processors.turn()
            module.zero_grad()
            began = time.process_time()
            module(x).sum().backward()
            found.append(time.process_time() - began)
    return min(found[2:])


def layer_s(*, cut: bool, rounds: int = ROUNDS) -> float:
    """Return the processor seconds that a layer adds, forward and backward."""
    x = torch.randn(1, TOKENS // (dist.get_world_size() if cut else 1), WIDTH)
    shallow, deep = (pass_s(blocks(layers, cut=cut), x, rounds) for layers in (SHALLOW, DEEP))
    return (deep - shallow) / (DEEP - SHALLOW)


def time_host_alone(recorder: Recorder, *, rounds: int = ROUNDS) -> None:
    """Record a layer's seconds, plain and sharded; outside this call the process has no process group."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    gc.disable()
    try:
        with torch.autograd.set_multithreading_enabled(False):
            for name, cut in ((LAYER_PLAIN, False), (LAYER_CUT, True)):
                sample = HostSample(name=name, seconds=layer_s(cut=cut, rounds=rounds), count=rounds)
                recorder.write("host", sample=sample)
    finally:
        gc.enable()
        dist.destroy_process_group()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="executor.calibrate.host_alone")
    for name in ("records", "machine", "gpu-name", "command"):
        parser.add_argument(f"--{name}", default="")
    options = parser.parse_args(argv)
    recorder = Recorder(options.records)
    head = Provenance(
        machine=options.machine,
        gpu=options.gpu_name,
        device="cpu",
        gpus=0,
        versions={"python": sys.version.split()[0], "torch": str(torch.__version__)},
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=options.command,
    )
    recorder.write("header", **to_builtins(head))
    time_host_alone(recorder)
    recorder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
