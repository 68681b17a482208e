"""Bounds of layers of which some stay in 16 bits: each counts as the lesser of both, wherever it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from simulator.analytical.layer_cost import AMOUNTS, BlockCost, BlockMemory, PassCost
from simulator.runtimes.model_operators import WIDE

_WIDE = frozenset(WIDE.values())


def least_costs(blocks: Mapping[str, BlockCost]) -> dict[str, BlockCost]:
    """Return the blocks without those in 16 bits, each with the lesser seconds of the two of its kind."""
    return {
        name: _lesser(block, blocks[WIDE[name]]) if WIDE.get(name) in blocks else block
        for name, block in blocks.items()
        if name not in _WIDE
    }


def least_memory(blocks: Mapping[str, BlockMemory]) -> dict[str, BlockMemory]:
    """Return the blocks without those in 16 bits, each with the lesser bytes of the two of its kind."""
    found: dict[str, BlockMemory] = {}
    for name, block in blocks.items():
        if name in _WIDE:
            continue
        other = blocks.get(WIDE.get(name, ""), block)
        found[name] = BlockMemory(
            saved_bytes={mode: np.minimum(own, other.saved_bytes[mode]) for mode, own in block.saved_bytes.items()},
            everything_bytes=np.minimum(block.everything_bytes, other.everything_bytes),
            bounds=block.bounds,
        )
    return found


def _lesser(one: BlockCost, other: BlockCost) -> BlockCost:
    return replace(
        one,
        forward=_lesser_pass(one.forward, other.forward),
        backward=_lesser_pass(one.backward, other.backward),
        recompute={mode: _lesser_pass(cost, other.recompute[mode]) for mode, cost in one.recompute.items()},
    )


def _lesser_pass(one: PassCost, other: PassCost) -> PassCost:
    amounts = {name: np.minimum(getattr(one, name), getattr(other, name)) for name in AMOUNTS}
    # Schedules put weight gradients off: bounds leave them out, so the most of them is left out.
    amounts |= {name: np.maximum(getattr(one, name), getattr(other, name)) for name in ("weight_s", "weight_host_s")}
    exposed = {axis: np.minimum(s, other.communication_s.get(axis, 0.0)) for axis, s in one.communication_s.items()}
    return replace(one, **amounts, communication_s=exposed)
