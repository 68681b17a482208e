"""Shares of a step's kernel time that were measured, or interpolated between measurements."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simulator.analytical.layer_cost import BlockCost, PassCost
from simulator.columns.plan_table import Floats
from simulator.pipeline.stages import StageLayout
from simulator.runtimes.parts import RecomputeSpec
from simulator.step.units import LAYERS


def known_shares(
    layout: StageLayout, blocks: Mapping[str, BlockCost], modes: Mapping[str, RecomputeSpec]
) -> tuple[Floats, Floats]:
    """Return (measured, fitted) shares of kernel time on the pipeline rank that computes longest, each of shape
    (plans,).
    """
    computing, measured, fitted = (
        _of_ranks(layout, blocks, modes, name) for name in ("compute_s", "measured_s", "fitted_s")
    )

    slowest = np.argmax(computing, axis=1)[:, None]
    total = np.maximum(np.take_along_axis(computing, slowest, axis=1), 1e-30)
    measured, fitted = ((np.take_along_axis(each, slowest, axis=1) / total)[:, 0] for each in (measured, fitted))
    return measured, fitted


def _of_ranks(
    layout: StageLayout, blocks: Mapping[str, BlockCost], modes: Mapping[str, RecomputeSpec], quantity: str
) -> Floats:
    """Return a quantity summed over all passes of one micro batch on each pipeline rank, shape (plans, ranks)."""

    def of(cost: PassCost) -> Floats:
        return np.asarray(getattr(cost, quantity)).reshape(-1, 1)

    dense, moe = layout.layers
    held = {"embedding": 1.0 * layout.first, "head": 1.0 * layout.last, "dense": 1.0 * dense, "moe": 1.0 * moe}
    total = sum(
        (
            count * (of(blocks[name].forward) + of(blocks[name].backward))
            for name, count in held.items()
            if name in blocks
        ),
        np.zeros(layout.exists.shape),
    )
    for mode, layers in layout.by_mode.items():
        for name, count in zip(LAYERS, layers, strict=True):
            if name in blocks and mode in blocks[name].recompute:
                total = total + count * modes[mode].layers * of(blocks[name].recompute[mode])
    return np.asarray(total)
