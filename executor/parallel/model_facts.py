"""Facts about a rank's model, read from its modules after the last step, for `executor.run.effects`."""

from __future__ import annotations

import torch

from executor.model.shards import local_tensor
from executor.overlap.fsdp_exchange import applied_exchange
from executor.parallel.facts import ModelFacts
from executor.parallel.tensor_overlap import applied_overlap
from executor.parallel.train_step import Trainer


def read_model_facts(trainer: Trainer) -> ModelFacts:
    """Return counts and names read from the modules themselves, not from the request."""
    blocks = [block for part in trainer.parallel.parts for block in part.blocks().values()]
    counters = torch._dynamo.utils.counters  # noqa: SLF001 - the only count of what was compiled
    shards = [
        (trainer.parameter_shards[name].full_shape if name in trainer.parameter_shards else p.shape).numel()
        / local_tensor(p).numel()
        for name, p in trainer.named_parameters()
        if p.dim() > 1 and local_tensor(p).numel()
    ]
    schedule = trainer.parallel.schedule
    methods = {getattr(block.attention.core, "method", "none") for block in blocks}
    return ModelFacts(
        most_shards=round(max(shards, default=1.0)),
        stored="/".join(sorted({str(p.dtype).removeprefix("torch.") for p in trainer.parameters()})),
        blocks=len(blocks),
        recomputed_blocks=sum("forward" in vars(block) for block in blocks),
        compiled_graphs=int(counters["stats"].get("unique_graphs", 0)),
        graph_breaks=sum(counters["graph_break"].values()),
        schedule=type(schedule).__name__ if schedule is not None else None,
        micro_batches=getattr(schedule, "_n_microbatches", trainer.micro_batches),
        tp_overlap=applied_overlap(blocks),
        cp_method="/".join(sorted(methods)),
        fsdp_exchange=applied_exchange(blocks),
    )
