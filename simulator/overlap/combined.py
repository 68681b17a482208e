"""Experts' all-to-all hidden behind compute: layers of a forward pass alternate with layers of another micro batch's
backward pass.

Tokens of one layer are exchanged while the other computes (streams run in this order):

    communication   combine back  |  dispatch forward, dispatch back      |  combine forward
    compute         attention     |  experts back (their weights) experts |  attention back (its weights)

A pass waits only for its own traffic. Everything in a layer around its experts (attention, router, permutation, shared
experts) counts as attention. Delayed weight gradients run after work that the other pass waits for.

Source: Megatron-LM, core/models/common/model_chunk_schedule_plan.py (TransformerLayerSchedulePlan.run) and
core/pipeline_parallel/combined_1f1b.py. DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) and torchtitan 0.2.2
(distributed/dual_pipe_v.py) pair the same parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.columns.plan_table import Floats

NONE, COMBINED, DELAY_WGRAD = "none", "combined", "delay_wgrad"
# Pairs of layers simulated, and how many of them pass until their clocks repeat.
LAYERS, SETTLED = 12, 6
TINY = 1e-12  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """Seconds of one pass of a layer: kernels around its experts and within them, the weight gradients among each that
    may be delayed, and its two collectives in order.
    """

    around_s: Floats
    experts_s: Floats
    around_weight_s: Floats
    experts_weight_s: Floats
    first_s: Floats
    second_s: Floats

    def slowed(self, factor: Floats) -> LayerParts:
        """Return the pass with its kernel times multiplied by `factor`."""
        return LayerParts(
            around_s=factor * self.around_s,
            experts_s=factor * self.experts_s,
            around_weight_s=factor * self.around_weight_s,
            experts_weight_s=factor * self.experts_weight_s,
            first_s=self.first_s,
            second_s=self.second_s,
        )

    @property
    def computed_s(self) -> Floats:
        return self.around_s + self.experts_s

    @property
    def moved_s(self) -> Floats:
        return self.first_s + self.second_s


def pair_s(forward: LayerParts, backward: LayerParts, *, weights_later: bool) -> Floats:
    """Return the seconds that a pair of one forward and one backward layer adds after the pair before it, without
    contention.
    """
    later = 1.0 if weights_later else 0.0
    around_weight, experts_weight = later * backward.around_weight_s, later * backward.experts_weight_s
    nothing = np.zeros(np.broadcast(forward.around_s, backward.around_s).shape)
    compute, wire, tokens, gradients = nothing, nothing, nothing, nothing
    ends = []
    for _ in range(LAYERS):
        wire = combined = np.maximum(wire, gradients) + backward.first_s
        compute = attended = np.maximum(compute, tokens) + forward.around_s
        compute = experts_end = np.maximum(compute, combined) + backward.experts_s - experts_weight
        wire = dispatched = np.maximum(wire, attended) + forward.first_s
        compute = compute + experts_weight
        wire = returned = np.maximum(wire, experts_end) + backward.second_s
        compute = np.maximum(compute, dispatched) + forward.experts_s
        wire = tokens = np.maximum(wire, compute) + forward.second_s
        compute = gradients = np.maximum(compute, returned) + backward.around_s - around_weight
        compute = compute + around_weight
        ends.append(compute)
    return np.asarray((ends[-1] - ends[SETTLED - 1]) / (LAYERS - SETTLED))


def hidden_and_lost_s(
    forward: LayerParts, backward: LayerParts, held: Floats | float, *, weights_later: bool
) -> tuple[Floats, Floats]:
    """Return the seconds of both layers' exchanges that are hidden behind kernels, and by how much kernels take longer
    while exchanges hold a share `held` of the GPU's SMs.
    """
    computed, moved = forward.computed_s + backward.computed_s, forward.moved_s + backward.moved_s
    hidden = np.clip(computed + moved - pair_s(forward, backward, weights_later=weights_later), 0.0, moved)
    lost = held * np.minimum(hidden, computed / (1.0 - held))
    slower = 1.0 + lost / np.maximum(computed, TINY)
    together = pair_s(forward.slowed(slower), backward.slowed(slower), weights_later=weights_later)
    return np.clip(computed + lost + moved - together, 0.0, moved), np.asarray(lost)
