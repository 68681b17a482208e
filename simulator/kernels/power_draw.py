"""The power that work on a GPU draws next to matrix products, and how long its limiter averages."""

from __future__ import annotations

from simulator.kernels.efficiency import efficiency
from simulator.kernels.roofline import Roofline

# Power that other work of a step draws, as shares of the reference GPU's power limit, which matrix products alone
# reach: kernels that move memory, attention, collectives that nothing runs next to, and idle time. Source: fitted to
# 104 steps of our executor on one H100 and one H200, eager and compiled, their other kernels as profiles have them
# (examples/validation/kernels.md): no bias, 2 % in the median. Collectives: fitted there to 75 steps of several H200.
# Measured there on an H200, a GPU that waits draws 0.18, and attention 0.82 at the clocks of products. Copies at the
# full rate of memory draw 0.87; few kernels of a step reach that.
MOVING = 0.5
ATTENDING = 0.8
SENDING = 0.39
IDLE = 0.2
# Seconds over which a GPU's power limiter averages. Source: in three runs that load data for 50 to 150 ms of a step,
# kernels ran at 1.55 to 1.6 GHz on average (fresh.jsonl: 4/21, 9/05, 9/06). That is what a pause of 5 to 30 ms
# explains; with the whole pause they would have run at 1.9 GHz.
POWER_WINDOW_S = 0.02


def drawn(share: float, roofline: Roofline) -> float:
    """Return the power that work draws over the power limit of a GPU, if it draws a `share` of that of the reference
    GPU of its architecture. No work draws more than products, which a lower limit slows down.
    """
    reference_w = efficiency(roofline.gpu.architecture).reference_w
    return min(share * reference_w / (roofline.gpu.power_w or reference_w), 1.0)
