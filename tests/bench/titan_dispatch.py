"""What tensor parallelism adds to the host's time of a layer of torchtitan's models, on a CPU.

    python3 tests/bench/titan_dispatch.py [--kinds llama,qwen3,qwen3_moe,latent,latent_moe] [--compile] [--rounds 120]

(a Python with torchtitan 0.2.2 installed.) One process pretends to be a rank of two (torch's `fake` process group sends
nothing), widths are tiny, and the cost of a layer is the difference of a deep and a shallow model: the least processor
time of many passes, all models in turn, so that they meet the same other work. Norms are torch's layer norm, one
operator, as the fused norm of GPUs is; torchtitan's permutation of tokens, a Triton kernel, is replaced.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims as dims_module
import torchtitan.models.moe.utils as moe_utils
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.infra.parallelize import parallelize_deepseekv3
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
from torchtitan.models.llama3.infra.parallelize import parallelize_llama
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model

SHALLOW, DEEP = 2, 6
TOKENS, VOCAB = 16, 128
KINDS = ("llama", "qwen3", "qwen3_moe", "latent", "latent_moe")
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def on_cpu() -> None:
    """Replace what torchtitan runs on GPUs only, and what DTensor does not know of CPUs."""
    dims_module.device_type = "cpu"
    counted = torch.histc
    torch.histc = lambda x, **named: counted(x.float(), **named)
    nn.RMSNorm.forward = lambda self, x: functional.layer_norm(x, self.normalized_shape, self.weight, None, 1e-6)
    moe_utils.generate_permute_indices = _in_order
    heads = Shard(1)
    register_sharding(ATTENTION.default)(lambda q, k, v, *rest, **_: [([heads] * 2, [heads] * 3 + [None] * len(rest))])
    register_sharding(ATTENTION_BACKWARD.default)(lambda *given, **_: [([heads] * 3, _sharded(given, heads))])


def _sharded(given: tuple[Any, ...], heads: Shard) -> list[Shard | None]:
    return [heads] * 6 + [None] * (len(given) - 6)


def _in_order(rows: Tensor, _: int, ranks: int, most: int, *__: Any, **___: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Leave tokens where they are."""
    places = torch.full((most,), -1, dtype=torch.int32)
    count = min(int(rows.sum()), most)
    places[:count] = torch.arange(count, dtype=torch.int32)
    sizes = rows.view(ranks, -1).sum(0).to(torch.int32)
    return places, sizes, torch.cumsum(sizes, 0).to(torch.int32)


def model_of(kind: str, layers: int) -> tuple[Any, Any, Any]:
    """Return the arguments, the class and the function that divides a model."""
    every = {"dim": 64, "n_layers": layers, "n_heads": 4, "vocab_size": VOCAB, "max_seq_len": 64}
    moe = {"num_experts": 4, "top_k": 2, "score_before_experts": False}
    if kind == "llama":
        return TransformerModelArgs(**every, n_kv_heads=4, multiple_of=32), Transformer, parallelize_llama
    if kind.startswith("qwen3"):
        args = Qwen3ModelArgs(**every, n_kv_heads=4, head_dim=16, hidden_dim=128)
        args.moe_enabled, args.moe_inter_dim = "moe" in kind, 32
        args.moe_args = MoEArgs(**moe, num_shared_experts=0, score_func="softmax", route_norm=True)
        return args, Qwen3Model, parallelize_qwen3
    widths = {"inter_dim": 128, "moe_inter_dim": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
    dense = 0 if "moe" in kind else layers
    latent = DeepSeekV3ModelArgs(**every, **widths, original_seq_len=64, n_dense_layers=dense, qk_rope_head_dim=8)
    latent.moe_args, latent.moe_impl = MoEArgs(**moe, num_shared_experts=1), "standard"
    return latent, DeepSeekV3Model, parallelize_deepseekv3


def build(kind: str, layers: int, *, cut: bool, compiled: bool) -> nn.Module:
    args, made, divide = model_of(kind, layers)
    with torch.device("meta"):
        model = made(args)
    job = JobConfig()
    job.training.seq_len, job.activation_checkpoint.mode = TOKENS, "none"
    job.compile.enable, job.compile.components = compiled, ["model"]
    if cut:
        degrees = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "pp", "ep", "etp"), 1) | {"tp": 2}
        parallel = ParallelDims(**degrees, world_size=2)
        parallel.build_mesh()
        model = divide(model, parallel, job)
    elif compiled:
        for name, block in model.layers.named_children():
            model.layers.register_module(name, torch.compile(block, fullgraph=True))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(0.01)
            elif not tensor.is_complex():
                tensor.zero_()
    for positions in ("freqs_cis", "rope_cache"):
        if make := getattr(model, f"_precompute_{positions}", None):
            setattr(model, positions, make())
    return model.train()


def pass_s(model: nn.Module, *, cut: bool) -> float:
    """Return the processor seconds of a forward and a backward pass."""
    tokens, targets = (torch.randint(0, VOCAB, (1, TOKENS)) for _ in range(2))
    for parameter in model.parameters():
        parameter.grad = None
    began = time.process_time()
    with loss_parallel() if cut else nullcontext():
        cross_entropy_loss(model(tokens), targets).backward()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=120)
    options = parser.parse_args()
    torch.set_num_threads(1)
    on_cpu()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    kinds = options.kinds.split(",")
    ways = [(kind, cut, layers) for kind in kinds for cut in (False, True) for layers in (SHALLOW, DEEP)]
    least: dict[tuple[str, bool, int], float] = {}
    gc.disable()
    with torch.autograd.set_multithreading_enabled(False):
        models = {way: build(way[0], way[2], cut=way[1], compiled=options.compile) for way in ways}
        for turn in range(options.rounds + 2):
            for way, model in models.items():
                seconds = pass_s(model, cut=way[1])
                least[way] = min(seconds, least.get(way, seconds)) if turn > 1 else 1e9
    print(
        f"torch {torch.__version__}\n| layer | plain us | tensor parallel us | added us | of the first's |\n|---|--:|--:|--:|--:|"
    )
    first = 0.0
    for kind in kinds:
        plain, cut = (
            1e6 * (least[kind, way, DEEP] - least[kind, way, SHALLOW]) / (DEEP - SHALLOW) for way in (False, True)
        )
        first = first or cut - plain
        print(f"| {kind} | {plain:.0f} | {cut:.0f} | {cut - plain:.0f} | {(cut - plain) / first:.2f} |")


if __name__ == "__main__":
    main()
