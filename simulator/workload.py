"""What is asked of the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One optimizer step of training: `global_batch_size` sequences of `seq_len` tokens."""

    task: str = "train"
    seq_len: int
    global_batch_size: int

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.global_batch_size
