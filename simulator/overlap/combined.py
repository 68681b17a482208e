"""Experts' all-to-all hidden behind compute: layers of a forward pass alternate with layers of another micro batch's
backward pass.

Tokens of one layer are exchanged while the other computes (streams run in this order):

    communication   combine back  |  dispatch forward, dispatch back      |  combine forward
    compute         attention     |  experts back (their weights) experts |  attention back (its weights)

A pass waits only for its own traffic. Everything in a layer around its experts (attention, router, permutation, shared
experts) counts as attention. Delayed weight gradients run after work that the other pass waits for. One host issues
both passes in this order, and where it waits for counts of tokens before a dispatch, the GPU has nothing left to do.

Source: Megatron-LM, core/models/common/model_chunk_schedule_plan.py (TransformerLayerSchedulePlan.run) and
core/pipeline_parallel/combined_1f1b.py. DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) and torchtitan 0.2.2
(distributed/dual_pipe_v.py) pair the same parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simulator.columns.plan_table import Floats

NONE, COMBINED, DELAY_WGRAD = "none", "combined", "delay_wgrad"
# Pairs of layers simulated, and how many of them pass until their clocks repeat.
LAYERS, SETTLED = 12, 6
TINY = 1e-12  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """Seconds of one pass of a layer: kernels around its experts and within them, the weight gradients among each that
    may be delayed, and its two collectives in order; where the host waits in such a pair of layers, also of the host to
    issue each of these kernels, and of device and host before it waits.
    """

    around_s: Floats
    experts_s: Floats
    around_weight_s: Floats
    experts_weight_s: Floats
    first_s: Floats
    second_s: Floats
    around_host_s: Floats | float = 0.0
    experts_host_s: Floats | float = 0.0
    around_weight_host_s: Floats | float = 0.0
    experts_weight_host_s: Floats | float = 0.0
    before_wait_s: Floats | float = 0.0
    before_wait_host_s: Floats | float = 0.0

    def slowed(self, factor: Floats) -> LayerParts:
        """Return the pass with its kernel times multiplied by `factor`."""
        names = ("around_s", "experts_s", "around_weight_s", "experts_weight_s", "before_wait_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    @property
    def computed_s(self) -> Floats:
        return self.around_s + self.experts_s

    @property
    def moved_s(self) -> Floats:
        return self.first_s + self.second_s


def pair_s(forward: LayerParts, backward: LayerParts, *, weights_later: bool) -> Floats:
    """Return the seconds that a pair of one forward and one backward layer adds after the pair before it, without
    contention. Kernels end no earlier than the host has issued them; the last of two products for experts' weights runs
    after that.
    """
    later = 1.0 if weights_later else 0.0
    around_weight, experts_weight = later * backward.around_weight_s, later * backward.experts_weight_s
    nothing = np.zeros(np.broadcast(forward.around_s, backward.around_s).shape)
    compute, wire, tokens, gradients, host = nothing, nothing, nothing, nothing, nothing
    around_host, experts_host = later * backward.around_weight_host_s, later * backward.experts_weight_host_s
    ends = []
    for _ in range(LAYERS):
        wire = combined = np.maximum(wire, gradients) + backward.first_s
        host = host + forward.before_wait_host_s
        compute = host = np.maximum(np.maximum(compute, tokens) + forward.before_wait_s, host)
        host = host + forward.around_host_s - forward.before_wait_host_s
        compute = attended = np.maximum(compute + forward.around_s - forward.before_wait_s, host)
        host = host + backward.experts_host_s - experts_host
        compute = experts_end = np.maximum(np.maximum(compute, combined) + backward.experts_s - experts_weight, host)
        wire = dispatched = np.maximum(np.maximum(wire, attended), host) + forward.first_s
        host = host + experts_host
        compute = np.maximum(compute + experts_weight, host + experts_weight / 2)
        wire = returned = np.maximum(np.maximum(wire, experts_end), host) + backward.second_s
        host = host + forward.experts_host_s
        compute = np.maximum(np.maximum(compute, dispatched) + forward.experts_s, host)
        wire = tokens = np.maximum(wire, compute) + forward.second_s
        host = host + backward.around_host_s - around_host
        compute = gradients = np.maximum(np.maximum(compute, returned) + backward.around_s - around_weight, host)
        host = host + around_host
        compute = np.maximum(compute + around_weight, host)
        ends.append(compute)
    return np.asarray((ends[-1] - ends[SETTLED - 1]) / (LAYERS - SETTLED))


def hidden_lost_and_stalled_s(
    forward: LayerParts, backward: LayerParts, held: Floats | float, *, weights_later: bool
) -> tuple[Floats, Floats, Floats]:
    """Return the seconds of both layers' exchanges that are hidden behind kernels, by how much kernels take longer
    while exchanges hold a share `held` of the GPU's SMs, and for how long the GPU has nothing to do since the host is
    late.
    """
    computed, moved = forward.computed_s + backward.computed_s, forward.moved_s + backward.moved_s
    hidden = np.clip(computed + moved - pair_s(forward, backward, weights_later=weights_later), 0.0, moved)
    lost = held * np.minimum(hidden, computed / (1.0 - held))
    slower = 1.0 + lost / np.maximum(computed, TINY)
    together = pair_s(forward.slowed(slower), backward.slowed(slower), weights_later=weights_later)
    spare = computed + lost + moved - together
    return np.clip(spare, 0.0, moved), np.asarray(lost), np.maximum(-spare, 0.0)
