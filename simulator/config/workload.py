"""The workload: a training step."""

from __future__ import annotations

from dataclasses import dataclass

ROUTINGS = ("balanced", "natural")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One optimizer step of training: `global_batch_size` sequences of `seq_len` tokens.

    `expert_imbalance` is the load of the busiest expert rank over the mean; it depends on data and router, not on the
    plan. `routing` is `balanced` where all experts get equally many tokens, `natural` where the router decides, "" for
    the runtime's default (`ROUTINGS`). `expert_counts` are the tokens that a router sent to each expert. Sequences are
    packed of documents of `document_len` tokens, across which attention does not reach; 0: a sequence is one document.
    """

    task: str = "train"
    seq_len: int
    global_batch_size: int
    expert_imbalance: float = 1.0
    routing: str = ""
    expert_counts: tuple[int, ...] = ()
    document_len: int = 0

    @property
    def attended_len(self) -> int:
        """Tokens of a sequence that attention reaches across."""
        return min(self.document_len or self.seq_len, self.seq_len)

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.global_batch_size
