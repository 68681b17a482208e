"""By how much the power limit of a GPU slows down products in a step that also does other things: the balance of
`simulator.analytical.clocks` for the steps of an engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.kernels.efficiency import efficiency
from simulator.kernels.power_draw import ATTENDING, IDLE, MOVING, POWER_WINDOW_S, drawn
from simulator.kernels.roofline import Roofline
from topology.cluster import GpuKind

# Power of steps that read weights and caches at the full rate of memory, as `MOVING` of power_draw.py: eight answers
# of 8B and of 3B that go on alone draw 534 and 468 W of 700 (examples/validation/serving_2xH200.md, one H200).
STREAMING = 0.72
CLOSE = 1e-3  # change of clocks at which a balance is found


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLimit:
    """What a GPU's power limit leaves for products. `least` is the time of products at full clocks over that on a GPU
    that does nothing else; the others are shares of the limit that other work leaves, and what a pause leaves at most,
    in seconds of the limit.
    """

    least: float
    exponent: float
    moving: float
    attending: float
    streaming: float
    paused_s: float

    @classmethod
    def of(cls, gpu: GpuKind, full_clocks: float) -> PowerLimit:
        """Return that of a kind of GPU whose products are so many times as fast at full clocks."""
        roofline = Roofline(gpu=gpu)
        moving, attending, streaming, idle = (1.0 - drawn(s, roofline) for s in (MOVING, ATTENDING, STREAMING, IDLE))
        return cls(
            least=1.0 / full_clocks,
            exponent=efficiency(gpu.architecture).power_exponent,
            moving=moving,
            attending=attending,
            streaming=streaming,
            paused_s=idle * POWER_WINDOW_S,
        )

    def held_back(self, limited_s: float, *, moving_s: float, attending_s: float, before_s: float) -> float:
        """Return how much of what the limit can delay products of `limited_s` it does delay them: 0 at full clocks, 1
        on a GPU that does nothing else.

        At full clocks these products and what moves memory take `moving_s`, and attention over prompts `attending_s`.
        For `before_s` no product filled the GPU: what that left of its power counts as far as the limiter averages.
        """
        spare = self.moving * max(0.0, moving_s - self.least * limited_s) + self.attending * attending_s
        spare += min(self.streaming * before_s, self.paused_s)
        taken, before = 1.0, 2.0
        while before - taken > CLOSE:
            taken, before = (taken * limited_s / (taken * limited_s + spare)) ** self.exponent, taken
            if taken <= self.least:
                return 0.0
        return (taken - self.least) / (1.0 - self.least)
