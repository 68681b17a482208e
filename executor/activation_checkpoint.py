"""What is kept for the backward pass: everything, the dear operators' results, or only what enters a block.

The modes are those of torchtitan 0.2.2, which the runtime description of that name predicts: `full` wraps every block,
`selective` every second one, `selective-op` keeps the results of attention, reductions and every second product: eagerly
by `executor.kept`, compiled by torch's own policy, which the compiler knows.
A block's `forward` is replaced rather than the block wrapped, so that parameters keep their names.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from executor import kept
from executor.model import Block, Decoder

# Recomputing these costs a collective, or an attention.
_DEAR = (*(f"aten.{name}" for name in kept.ATTENTION), "_c10d_functional.reduce_scatter_tensor")


def _dear() -> set[Any]:
    found = set()
    for name in _DEAR:
        space, op = name.split(".")
        packet = getattr(getattr(torch.ops, space), op, None)
        if packet is not None:
            found.add(packet.default)
    return found


def _keep_dear(dear: set[Any]) -> Any:
    products: dict[str, int] = defaultdict(int)

    def policy(context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op in dear:
            return CheckpointPolicy.MUST_SAVE
        if op in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}:
            run = "again" if context.is_recompute else "first"
            products[run] += 1
            if products[run] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_activation_checkpoint(model: Decoder, mode: str, *, early_stop: bool, compiled: bool) -> None:
    """Apply a mode of `executor.legal.RECOMPUTE` to every block; see `simulator.recomputation` for `early_stop`."""
    if mode == "none":
        return
    contexts = None
    if mode == "selective-op":
        contexts = partial(_keep_dear, _dear()) if compiled else kept.contexts
    for place, block in enumerate(model.layers.values()):
        if mode == "selective" and place % 2:
            continue
        _recompute(block, contexts, early_stop=early_stop)


def _recompute(block: Block, contexts: Any, *, early_stop: bool) -> None:
    plain = block.forward
    extra = {} if contexts is None else {"context_fn": contexts}

    def forward(x: torch.Tensor) -> torch.Tensor:
        # Nothing in a block is random, so the generator's state need not be kept.
        return checkpoint(plain, x, use_reentrant=False, preserve_rng_state=False, early_stop=early_stop, **extra)

    block.forward = forward  # type: ignore[method-assign] # on this instance only
