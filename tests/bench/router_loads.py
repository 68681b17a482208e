"""How unevenly an untrained router fills ranks with experts: the executor's decoder trained on random tokens, on a CPU.

    python tests/bench/router_loads.py [--experts 64] [--per-token 8] [--steps 18] [--seed 1]

Nothing evens the load, as in runs of the executor. A narrow model stands for a wide one: weights are drawn, and move
with each step, in the same proportion to what a product of that width adds up. Prints the standard deviation of the
load of one of two ranks over the mean (`expert_spread` of simulator/runtimes/meshwright.toml), from that of single
experts, and the busiest of two and of four ranks as it was.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2]))

from executor.model import decoder
from executor.model.decoder import Decoder
from executor.parallel.train_step import LEARNING_RATE
from simulator.config.hf_config import load_model
from simulator.config.model import MixtureOfExperts

WIDTH, LAYERS, TOKENS, WORDS, HEAD = 256, 4, 512, 4096, 128
STANDS_FOR = 3840  # the width of the model whose proportions the narrow one has
SETTLED = 3  # steps that are not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--per-token", type=int, default=8)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    loads = torch.stack(list(train(options.experts, options.per_token, options.steps, options.seed)))[SETTLED:]
    scatter = float((loads - 1).square().mean().sqrt())
    print(f"spread of single experts {scatter:.2f}, of one of two ranks {scatter / math.sqrt(options.experts - 1):.3f}")
    for ranks in (2, 4):
        busiest = loads.unflatten(-1, (ranks, -1)).mean(-1).amax(-1)
        print(f"busiest of {ranks} ranks: {float(busiest.mean()):.2f} of the mean")


def train(experts: int, per_token: int, steps: int, seed: int):  # type: ignore[no-untyped-def]
    """Yield the experts' loads over their mean of each step, (layers, experts)."""
    wider = STANDS_FOR / WIDTH
    decoder.STD *= math.sqrt(wider)
    width = WIDTH * per_token // experts if experts > 8 * per_token else WIDTH // max(per_token // 2, 1)
    base = load_model("mixtral-8x7b")
    shape = {"hidden": WIDTH, "heads": WIDTH // HEAD, "kv_heads": WIDTH // HEAD, "head_dim": HEAD, "ffn": width}
    moe = MixtureOfExperts(experts=experts, experts_per_token=per_token, ffn=width)
    model = Decoder(replace(base, **shape, layers=LAYERS, vocab=WORDS, sliding_window=0, sliding_layers=0, moe=moe))
    decoder.init_weights(model, seed=seed)
    model.set_positions(torch.arange(TOKENS), torch.float32)
    loads: list[Tensor] = []
    for layer in model.layers.values():
        layer.moe.register_forward_hook(lambda block, given, _: loads.append(chosen(block, given[0], experts)))
    routers = [p for name, p in model.named_parameters() if "router" in name]
    others = [p for name, p in model.named_parameters() if "router" not in name]
    groups = [
        {"params": routers, "lr": LEARNING_RATE * wider},
        {"params": others, "lr": LEARNING_RATE * math.sqrt(wider)},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        loads.clear()
        tokens = torch.randint(WORDS, (1, TOKENS + 1), generator=torch.Generator().manual_seed(1000 + step))
        _loss(model, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield torch.stack(loads)


def _loss(model: Decoder, tokens: Tensor) -> Tensor:
    x = model.tok_embeddings(tokens[:, :-1])
    for layer in model.layers.values():
        x = layer(x)
    return functional.cross_entropy(model.output(model.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def chosen(block: nn.Module, x: Tensor, experts: int) -> Tensor:
    """Return how many tokens chose each expert, over the mean."""
    _, ids = block.route(x.detach().flatten(0, -2))
    counts = torch.bincount(ids.flatten(), minlength=experts).float()
    return counts / counts.mean()


if __name__ == "__main__":
    main()
