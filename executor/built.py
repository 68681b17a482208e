"""What a rank's model turned out to be, counted after its last step: plain numbers for `executor.effects`."""

from __future__ import annotations

from typing import Any

import torch

from executor.shards import local
from executor.tensor_overlap import applied_overlap
from executor.train_step import Trainer


def built(trainer: Trainer) -> dict[str, Any]:
    """Return counts and names read from the modules themselves, not from what was asked for."""
    blocks = [block for part in trainer.parallel.parts for block in part.layers.values()]
    counters = torch._dynamo.utils.counters  # noqa: SLF001 - the only count of what was compiled
    shards = [
        (trainer.cuts[name].whole if name in trainer.cuts else p.shape).numel() / local(p).numel()
        for name, p in trainer.named_parameters()
        if p.dim() > 1 and local(p).numel()
    ]
    schedule = trainer.parallel.schedule
    methods = {getattr(block.attention.core, "method", "none") for block in blocks}
    return {
        "most_shards": round(max(shards, default=1.0)),
        "stored": "/".join(sorted({str(p.dtype).removeprefix("torch.") for p in trainer.parameters()})),
        "blocks": len(blocks),
        "recomputed_blocks": sum("forward" in vars(block) for block in blocks),
        "compiled_graphs": int(counters["stats"].get("unique_graphs", 0)),
        "graph_breaks": sum(counters["graph_break"].values()),
        "schedule": type(schedule).__name__ if schedule is not None else None,
        "micro_batches": getattr(schedule, "_n_microbatches", trainer.micro_batches),
        "tp_overlap": applied_overlap(blocks),
        "cp_method": "/".join(sorted(methods)),
    }
