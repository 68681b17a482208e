"""Products that add to a stored float32 result, and head and loss in pieces that use them, on one GPU.

    python3 tests/bench/added_products.py products      milliseconds by shape and depth (kernels.md)
    python3 tests/bench/added_products.py pieces        head and loss by tokens a piece (savers.md)

The GPU is at its power limit: other products run before every sample.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from executor.model import vocabulary_loss

DEVICE = torch.device("cuda", 0)
RESULTS = ((128256, 4096), (128256, 2048), (32000, 4096))
DEPTHS = (8192, 4096, 2048, 1046, 1024, 512, 256)
PIECES = (512, 1024, 1046, 1536, 2048, 4096, 8192)  # tokens
TOKENS, WARM_S, HEAT_S, SAMPLE_MS, SAMPLES = 8192, 1.5, 0.15, 120.0, 3


class Timer:
    """Times calls on a hot GPU."""

    def __init__(self) -> None:
        self.warm = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
        self.heat(WARM_S)

    def heat(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(20):
                _ = self.warm @ self.warm
            torch.cuda.synchronize()

    def once_ms(self, call: Callable[[], object], count: int = 1) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    def __call__(self, call: Callable[[], object]) -> float:
        call()
        count = max(3, int(SAMPLE_MS / self.once_ms(call)))
        self.heat(HEAT_S)
        return median(self.once_ms(call, count) for _ in range(SAMPLES))


def products(timer: Timer) -> None:
    for rows, columns in RESULTS:
        total = torch.zeros(rows, columns, device=DEVICE)
        half = torch.empty_like(total, dtype=torch.bfloat16)
        print(f"{rows} x {columns}: multiplied in place {timer(lambda: total.mul_(1.0)):.3f} ms")
        for depth in DEPTHS:
            left, right = (torch.randn(depth, size, device=DEVICE, dtype=torch.bfloat16) for size in (rows, columns))
            calls = (
                lambda: torch.mm(left.t(), right, out=half),
                lambda: torch.mm(left.t(), right, out_dtype=torch.float32, out=total),
                lambda: torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total),
            )
            alone, wide, adds = map(timer, calls)
            print(f"  depth {depth}: alone {alone:.3f}, wide {wide:.3f}, adds {adds:.3f} ms", flush=True)


def pieces(timer: Timer) -> None:
    for words, width in RESULTS:
        head = nn.Linear(width, words, bias=False, device=DEVICE)
        x = torch.randn(1, TOKENS, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(words, (1, TOKENS), device=DEVICE)
        loss = vocabulary_loss.VocabularyLoss(words, None, compiled=False)
        cut = vocabulary_loss.HeadInPieces.of(head, loss)

        def call(tokens: int | None) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                vocabulary_loss.HEAD_LOGITS = (tokens or 0) * words
                total = cut(x, targets) if tokens else loss(head(x), targets)
            total.backward()
            head.weight.grad = x.grad = None

        for tokens in (None, *PIECES):
            call(tokens)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call(tokens)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
            ms = timer(lambda: call(tokens))
            print(f"{words} x {width}, pieces of {tokens or 'all'}: {ms:.2f} ms, {peak:.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("products", "pieces"))
    options = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    {"products": products, "pieces": pieces}[options.what](Timer())


if __name__ == "__main__":
    main()
