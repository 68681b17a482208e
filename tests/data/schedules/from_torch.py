"""Writes torch.json beside this file: schedule tables as torch.distributed.pipelining makes them.

Needs torch (made with 2.13.0 on a CPU); the tests need only the result. Compute actions alone are kept.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops


def cases() -> list[tuple[str, int, int, int]]:
    """Return (name, ranks, micro batches, stages per rank)."""
    found = []
    for ranks in (1, 2, 3, 4, 8):
        counts = {1, ranks - 1, ranks, 2 * ranks, 2 * ranks + 1, 10} - {0} if ranks < 8 else {8, 16, 20}
        for micro_batches in sorted(counts):
            found += [(name, ranks, micro_batches, 1) for name in ("GPipe", "1F1B")]
            for stages in (2, 3) if ranks < 8 else (2,):
                found += [
                    (name, ranks, micro_batches, stages)
                    for name in ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
                ]
            found += [(name, ranks, micro_batches, 2) for name in ("ZBVZeroBubble", "DualPipeV")]
    return found


def main() -> None:
    tables, refused = [], []
    for case in cases():
        name, ranks, micro_batches, stages = case
        try:
            rows = get_schedule_ops(name, ranks, micro_batches, None if stages == 1 else stages)
        except (ValueError, AssertionError):
            refused.append(case)
            continue
        words = [[str(action) for action in row if action is not None] for row in rows]
        order = [" ".join(word for word in row if "REDUCE_GRAD" not in word) for row in words]
        table = {"schedule": name, "ranks": ranks, "micro_batches": micro_batches, "stages_per_rank": stages}
        tables.append(json.dumps({**table, "order": order}, separators=(",", ":")))
    source = f"torch {torch.__version__}: get_schedule_ops of torch.distributed.pipelining, compute actions only"
    lines = ",\n".join(tables)
    text = f'{{"source":{json.dumps(source)},\n"refused":{json.dumps(refused)},\n"tables":[\n{lines}\n]}}\n'
    (Path(__file__).parent / "torch.json").write_text(text)


if __name__ == "__main__":
    main()
