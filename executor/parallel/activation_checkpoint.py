"""Activation recomputation: save everything, the results of expensive operators, or only the inputs of blocks.

The modes are those of torchtitan 0.2.2: `full` recomputes every block, `selective` every second block, `selective-op`
saves the results of attention, reduce-scatters and every second matmul (eager: `executor.model.saved_results`;
compiled: torch's own policy, which the compiler supports). A block's `forward` is replaced instead of wrapping the
block, so that parameters keep their names. With activation offload (eager, `full`), saved inputs of blocks are kept in
host memory, and the device waits for each copy, as in transformers (`torch.autograd.graph.save_on_cpu`).
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from executor.model import saved_results
from executor.model.decoder import Block, Decoder
from simulator.legality.frameworks import MESHWRIGHT
from simulator.runtimes.library import runtime_spec
from simulator.runtimes.recomputation import wraps

# Recomputing these would repeat a collective or the attention.
_EXPENSIVE = (*(f"aten.{name}" for name in saved_results.ATTENTION), "_c10d_functional.reduce_scatter_tensor")


def _expensive_operators() -> set[Any]:
    found = set()
    for name in _EXPENSIVE:
        space, op = name.split(".")
        packet = getattr(getattr(torch.ops, space), op, None)
        if packet is not None:
            found.add(packet.default)
    return found


def _save_expensive(expensive: set[Any]) -> Any:
    products: dict[str, int] = defaultdict(int)

    def policy(context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op in expensive:
            return CheckpointPolicy.MUST_SAVE
        if op in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}:
            run = "again" if context.is_recompute else "first"
            products[run] += 1
            if products[run] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_activation_checkpoint(
    model: Decoder, mode: str, *, early_stop: bool, compiled: bool, away: bool = False
) -> None:
    """Apply a mode of `MESHWRIGHT.recomputes` to every block; see `simulator.runtimes.recomputation` for
    `early_stop`. `away`: saved inputs of blocks are kept in host memory.
    """
    if mode == "none":
        return
    contexts = None
    if mode == "selective-op":
        contexts = partial(_save_expensive, _expensive_operators()) if compiled else saved_results.checkpoint_contexts
    described = runtime_spec(MESHWRIGHT.name).recompute[mode]
    for index, block in model.blocks().items():
        if wraps(int(index), described):
            _recompute(block, contexts, early_stop=early_stop, away=away)


def _kept(x: torch.Tensor, *, away: bool) -> AbstractContextManager[Any]:
    """Return the context in which a block's input is saved for its backward pass."""
    return save_on_cpu(pin_memory=x.is_cuda) if away else nullcontext()


def _recompute(block: Block, contexts: Any, *, early_stop: bool, away: bool) -> None:
    plain = block.forward
    extra = {} if contexts is None else {"context_fn": contexts}

    def forward(x: torch.Tensor) -> torch.Tensor:
        # A block uses no random numbers, so the state of the generator need not be saved.
        with _kept(x, away=away):
            out: torch.Tensor = checkpoint(
                plain, x, use_reentrant=False, preserve_rng_state=False, early_stop=early_stop, **extra
            )
        return out

    block.forward = forward  # type: ignore[method-assign] # on this instance only
