"""Synthetic token sequences: sequence `i` of step `s` is the same under every plan; each rank draws only its own."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from executor.parallel.context_parallel import positions
from simulator.config.plan import Plan
from simulator.config.workload import Workload


def row(index: int, step: int, *, vocab: int, seq_len: int, seed: int) -> Tensor:
    """Return one sequence of seq_len + 1 token ids."""
    digest = hashlib.sha256(f"{seed}:{step}:{index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))
    return torch.randint(vocab, (seq_len + 1,), generator=generator)


def rank_batch(
    plan: Plan, workload: Workload, *, vocab: int, step: int, seed: int, data_rank: int, cp_rank: int
) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets), each (sequences of this data-parallel rank, tokens of this context-parallel rank)."""
    share = workload.global_batch_size // plan.data_parallel
    rows = range(data_rank * share, (data_rank + 1) * share)
    whole = torch.stack([row(i, step, vocab=vocab, seq_len=workload.seq_len, seed=seed) for i in rows])
    own_positions = positions(workload.seq_len, cp_rank, plan.cp, torch.device("cpu"))
    return whole[:, own_positions], whole[:, own_positions + 1]
