"""Memory savers: options of a run that reduce the memory of the same training step.

`chunked_loss` computes head and loss for a piece of the tokens at a time (torchtune's LinearCrossEntropyLoss, TRL's
chunked_nll, torchtitan's ChunkedLossWrapper); `fused_linear_loss` in kernels that give the gradients of tokens and head
at once (Liger-Kernel). `activation_offload` keeps what layers save for backward in host memory in the meantime
(`simulator.step.away`). `optimizer_in_backward` updates parameters as soon as their gradients are computed, and frees
these (`torch.Tensor.register_post_accumulate_grad_hook`; torchtune's optimizer_in_bwd). `bf16_gradients` adds gradients
up and reduces them in bfloat16 (Megatron-LM's --grad-reduce-in-bf16). `tiled_mlp` runs the feed-forward network on as
many tokens at a time as the model is wide, and again in backward (DeepSpeed's TiledMLP, arXiv 2506.13996). The
runtimes' descriptions state which savers each has and how it runs them (`simulator/runtimes/*.toml`: savers).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from topology.errors import BadPlan

CHUNKED_LOSS, LINEAR_LOSS, ACTIVATION_OFFLOAD, OPTIMIZER_IN_BACKWARD, BF16_GRADIENTS, TILED_MLP = SAVERS = (
    "chunked_loss",
    "fused_linear_loss",
    "activation_offload",
    "optimizer_in_backward",
    "bf16_gradients",
    "tiled_mlp",
)
TITLES = {
    CHUNKED_LOSS: "loss in pieces",
    LINEAR_LOSS: "fused product and loss",
    ACTIVATION_OFFLOAD: "activations in host memory",
    OPTIMIZER_IN_BACKWARD: "optimizer in backward",
    BF16_GRADIENTS: "gradients added up in bfloat16",
    TILED_MLP: "feed-forward networks in tiles",
}
# Patterns for savers in plain text, within one clause.
_SAID = {
    CHUNKED_LOSS: r"chunked[ -_]?(ce|nll|loss|losses|cross[ -_]entropy|output loss)\b",
    LINEAR_LOSS: r"(fused )?linear cross[ -_]entropy|\bliger\b",
    ACTIVATION_OFFLOAD: r"(activations?|checkpoints?) (cpu )?offload|(activations?|checkpoints?) (are )?offloaded"
    r"|offload(s|ed|ing)? (of )?(activations?|checkpoints?)",
    OPTIMIZER_IN_BACKWARD: r"optimi[sz]er[ -](fused )?in(to)?[ -]b(ack)?wa?r?d|fuses the optimi[sz]er into backward",
}
# Savers that sources name where they speak of several runs.
_OF_SOME = {TILED_MLP: r"(mlp|ffn)s? (tiling|in tiles)|tiled (mlp|ffn)"}
_NEGATED = re.compile(r"\b(without|no|not|never|off)\b")


def canonical_savers(words: Iterable[str]) -> tuple[str, ...]:
    """Return savers in the order of `SAVERS`, each once. Raises BadPlan for an unknown word."""
    given = [word.strip().lower().replace("-", "_") for word in words]
    for word in given:
        if word not in SAVERS:
            raise BadPlan(f"memory saver {word[:40]!r} is unknown", why=f"known: {', '.join(SAVERS)}")
    return tuple(saver for saver in SAVERS if saver in given)


def savers_of_some(text: str) -> tuple[str, ...]:
    """Return the savers named in a text that a run need not have had."""
    return tuple(saver for saver, said in _OF_SOME.items() if re.search(said, text.lower()))


def optimizer_said(text: str) -> str:
    """Return the paged or 8-bit optimizer that a plain text names; empty if none."""
    clauses = [clause for clause in re.split(r"[;,()]", text.lower()) if not _NEGATED.search(clause)]
    said = " ".join(clause for clause in clauses if re.search(r"\b(optimi[sz]er|adamw?)\b", clause))
    narrow, paged = re.search(r"\b8[ -]?bit\b", said), re.search(r"\bpaged\b", said)
    return f"{'paged' if paged else ''}adamw{'8bit' if narrow else ''}" if narrow or paged else ""


def savers_said(text: str) -> tuple[str, ...]:
    """Return the savers that a plain text says a run had, without those that a clause denies."""
    clauses = [clause for clause in re.split(r"[;,()]", text.lower()) if not _NEGATED.search(clause)]
    return tuple(saver for saver, said in _SAID.items() if any(re.search(said, clause) for clause in clauses))
