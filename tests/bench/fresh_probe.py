"""What a forked rank runs first. Imports no torch, so that whoever starts ranks needs none."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

LAUNCHES = 4000


def touch(path: str) -> None:
    """Write how long this host takes to launch a small kernel, in seconds; end with 0 if a process like this can."""
    import torch

    here = torch.ones(8, device="cuda")
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            here.add_(1.0)
        best = min(best, (time.perf_counter() - begin) / LAUNCHES)
    Path(path).write_text(f"{best:.9f}", encoding="ascii")
    os._exit(0)


def rank_main(rank: int, request: dict[str, Any], folder: str, port: int) -> None:
    """Be one rank (`tests.bench.fresh_worker.main`)."""
    from tests.bench.fresh_worker import main

    main(rank, request, folder, port)
