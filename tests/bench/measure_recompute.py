"""What a recomputed region costs its host beside the operators that run again: small layers, of which the device makes nothing.

    python tests/bench/measure_recompute.py --out recompute.json

A layer of the executor's kind (norms, attention, gated feed-forward; width 128, 64 tokens) is timed forward and backward,
plain, under torch.utils.checkpoint without re-entrance, and with. What is left of the difference once a plain forward pass
is taken off is the region: hooks, random state, leaving and entering autograd.
"""

import argparse
import json
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH, TOKENS, HEADS = 16, 128, 64, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.w1, self.w3, self.w2 = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (p(y).view(1, TOKENS, HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(1, TOKENS, WIDTH))
        y = self.norms[1](x)
        return x + self.w2(functional.silu(self.w1(y)) * self.w3(y))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out
    layers = nn.ModuleList([Layer() for _ in range(LAYERS)]).to("cuda", torch.bfloat16)
    x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    plain = timed(layers, x, None)
    rows = {"plain": plain}
    for name, reentrant in (("without re-entrance", False), ("re-entrant", True)):
        forward, backward = timed(layers, x, reentrant)
        rows[name] = (forward, backward)
        region = (forward + backward) - sum(plain) - plain[0]
        print(name, "region", round(region * 1e6), "us a layer")
    found = {
        "device": torch.cuda.get_device_name(),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds_a_layer": {name: {"forward": a, "backward": b} for name, (a, b) in rows.items()},
    }
    Path(out).write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps(found))


def timed(layers: nn.ModuleList, x: Tensor, reentrant: bool | None) -> tuple[float, float]:
    """Return the median host seconds of one layer's forward and backward pass; `reentrant` None recomputes nothing."""
    forward, backward = [], []
    for _ in range(40):
        torch.cuda.synchronize()
        start = time.perf_counter()
        y = x
        for layer in layers:
            y = layer(y) if reentrant is None else checkpoint(layer, y, use_reentrant=reentrant)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        y.sum().backward()
        torch.cuda.synchronize()
        end = time.perf_counter()
        forward.append((middle - start) / LAYERS)
        backward.append((end - middle) / LAYERS)
    return statistics.median(forward[10:]), statistics.median(backward[10:])


if __name__ == "__main__":
    main()
