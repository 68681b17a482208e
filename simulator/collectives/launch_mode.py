"""How a kernel is launched, which matters more than the wire for small messages."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class LaunchMode(StrEnum):
    """What a measured or predicted time contains.

    QUEUED: launches run ahead of the device, so that only device time counts (nccl-tests; streams of a training step,
    whose host thread is simulated elsewhere). GRAPH: a CUDA graph replays it: device time too. EAGER: a loop of
    torch.distributed calls, never faster than the host issues them. ISOLATED: every call is waited for.
    """

    QUEUED = "queued"
    GRAPH = "graph"
    EAGER = "eager"
    ISOLATED = "isolated"


# torch 2.11 on a 4 x H200 host issues a collective every 17.5 us, whatever the op, up to 1 MiB (measured there).
EAGER_ISSUE_S = 17.5e-6
# all_reduce_bench.py waits for each call: 8 x H200 takes 40 us at 32 KiB where nccl-tests takes 18; the difference is
# 20 to 25 us at all sizes (github.com/stas00/ml-engineering @744d01e1, github.com/ai-dynamo/aiconfigurator @095f58a5).
ISOLATED_HOST_S = 22e-6


def launched(
    device_s: NDArray[np.float64], launch: LaunchMode, *, issue_s: float = EAGER_ISSUE_S
) -> NDArray[np.float64]:
    """Return the time that the caller waits, from the device time; `issue_s` is the host's time per eager call."""
    if launch is LaunchMode.EAGER:
        return np.maximum(device_s, issue_s)
    if launch is LaunchMode.ISOLATED:
        return device_s + ISOLATED_HOST_S
    return device_s


def device_time_s(time_s: float, launch: LaunchMode, *, issue_s: float = EAGER_ISSUE_S) -> float | None:
    """Return the device time within a measured time, or None where the host's time hid it."""
    if launch is LaunchMode.EAGER:
        return time_s if time_s > 1.3 * issue_s else None
    if launch is LaunchMode.ISOLATED:
        rest = time_s - ISOLATED_HOST_S
        return rest if rest > 0.5 * ISOLATED_HOST_S else None
    return time_s
