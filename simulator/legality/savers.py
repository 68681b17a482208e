"""Memory savers: the runtimes that have them, from their descriptions, and what each cannot be combined with.

Sources: torchtune, recipes/full_finetune_single_device.py (activation offload only with checkpointing; optimizer_in_bwd
without accumulation and clipping); torchtitan 0.2.2, components/optimizer.py (early_step_in_backward refuses pipelines
and expert parallelism); torch/nn/parallel/distributed.py (hooks of parameters run before DDP sums).
"""

# ruff: noqa: ARG005 - every predicate and sentence has the same signature, whether or not it reads all of it

from __future__ import annotations

import numpy as np

from simulator.config.savers import ACTIVATION_OFFLOAD, CHUNKED_LOSS, LINEAR_LOSS, OPTIMIZER_IN_BACKWARD, TITLES
from simulator.legality.rule import Rule, RuleFacts, batch_rule, policy_rule, rule
from simulator.runtimes.library import is_described, spec_for

# Implementations of savers that are not modelled, where more is known than that a runtime has none.
OTHERWISE = {
    ("megatron-lm", ACTIVATION_OFFLOAD): "say for how many layers (--offload-layers); its"
    " --fine-grained-activation-offloading of listed modules has no cost here",
    ("megatron-lm", CHUNKED_LOSS): "--cross-entropy-loss-fusion keeps whole logits, and is what is costed",
    ("nemo-automodel", LINEAR_LOSS): "its cut cross-entropy has no cost here",
    ("nemo-automodel", CHUNKED_LOSS): "its chunked cross-entropy has no cost here",
    ("torchtitan", CHUNKED_LOSS): "without a release; say torchtitan@0.3.0, which has it (ChunkedLossWrapper)",
    ("meshwright", LINEAR_LOSS): "our executor's own is chunked_loss",
}


def _lacking(q: RuleFacts) -> tuple[str, ...]:
    """Return the savers that a run asks for and its runtime lacks."""
    if q.runtime is None or not q.runtime.savers or not is_described(q.runtime.name):
        return ()
    has = spec_for(q.runtime).savers
    return tuple(word for word in q.runtime.savers if word not in has)


def _missing_text(q: RuleFacts) -> str:
    word, spec = _lacking(q)[0], spec_for(q.runtime) if q.runtime else None
    has = ", ".join(spec.savers) if spec and spec.savers else "none"
    why = OTHERWISE.get((spec.names[0] if spec else "", word), "")
    return f"{TITLES[word]} ({word}) is not known of {q.framework.title}{f': {why}' if why else ''}; it has {has}"


def _asks(word: str, q: RuleFacts) -> bool:
    return q.runtime is not None and word in q.runtime.savers


SAVER_RULES: tuple[Rule, ...] = (
    rule(
        "saver",
        lambda c, q: np.ones(len(c), dtype=np.bool_),
        lambda p, q: _missing_text(q),
        applies=lambda q: bool(_lacking(q)),
    ),
    rule(
        "saver-losses",
        lambda c, q: np.ones(len(c), dtype=np.bool_),
        lambda p, q: f"{CHUNKED_LOSS} and {LINEAR_LOSS} both replace the loss: ask for one",
        applies=lambda q: _asks(CHUNKED_LOSS, q) and q.runtime is not None and "linear_loss" in q.runtime.fused,
    ),
    rule(
        "saver-pipeline",
        lambda c, q: c.pp > 1,
        lambda p, q: (
            f"{', '.join(q.runtime.savers if q.runtime else ())} with pp {p.pp}: stages of a pipeline are not modelled"
            " with memory savers"
        ),
        applies=lambda q: _asks(ACTIVATION_OFFLOAD, q) or _asks(OPTIMIZER_IN_BACKWARD, q) or _asks(CHUNKED_LOSS, q),
    ),
    rule(
        "saver-tensor",
        lambda c, q: c.tp > 1,
        lambda p, q: f"{q.framework.title} has its memory savers without tensor parallelism alone: tp is {p.tp}",
        applies=lambda q: (
            not q.framework.cuts_with_savers and (_asks(CHUNKED_LOSS, q) or _asks(OPTIMIZER_IN_BACKWARD, q))
        ),
    ),
    policy_rule(
        "activation-offload",
        "recompute",
        lambda c, q: c.recompute != "full",
        lambda p, q: (
            f"{ACTIVATION_OFFLOAD} moves what checkpoints keep, and needs recompute full (it is {p.recompute}): without"
            " it all that layers save would move"
        ),
        applies=lambda q: _asks(ACTIVATION_OFFLOAD, q),
    ),
    rule(
        "activation-offload",
        lambda c, q: np.ones(len(c), dtype=np.bool_),
        lambda p, q: f"{q.framework.title} moves what eager layers keep: {ACTIVATION_OFFLOAD} with compile off",
        applies=lambda q: (
            _asks(ACTIVATION_OFFLOAD, q)
            and q.runtime is not None
            and q.runtime.compile
            and not q.framework.compiles_away
        ),
    ),
    batch_rule(
        "optimizer-in-backward",
        lambda c, q: q.workload.global_batch_size > c.dp_replicate * c.dp_shard * c.micro_batch_size,
        lambda p, q: (
            f"{OPTIMIZER_IN_BACKWARD} updates with the gradients of one micro batch: global batch"
            f" {q.workload.global_batch_size} is more than {p.data_parallel} ranks x micro batch {p.micro_batch_size}"
        ),
        applies=lambda q: _asks(OPTIMIZER_IN_BACKWARD, q),
    ),
    rule(
        "optimizer-in-backward",
        lambda c, q: (
            (c.dp_replicate > 1) & (c.dp_shard * c.cp == 1) | (c.offload != "none") | (c.zero_stage > 0) | (c.ep > 1)
        ),
        lambda p, q: (
            f"{OPTIMIZER_IN_BACKWARD} needs gradients that are summed when they are there: with FSDP or on one GPU,"
            " without DDP, ZeRO, expert parallelism or parameters in host memory"
        ),
        applies=lambda q: _asks(OPTIMIZER_IN_BACKWARD, q),
    ),
)
