"""What samples of an engine change in its costs: its host's times, and how much longer its kernels take than priced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simulator.columns.plan_table import Floats
from topology.profile.profile import CollectiveSample


class Ratio(NamedTuple):
    """Measured over priced time at so many tokens of a step."""

    tokens: float
    ratio: float


class LaunchTime(NamedTuple):
    """Seconds that each kernel of a step takes beyond its price, where so many answers go on."""

    tokens: float
    late_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Steps of one engine over `tp` ranks. Curves ascend in tokens; empty ones change nothing, seconds of 0 neither.

    Few tokens are read and written within microseconds: what their kernels take longer is `late_s` of each, whatever
    the model. `by_tokens` scales what grows with the tokens of larger steps, all-reduces with it but where `reduced`
    has their own ratios; `cached_ratio` scales attention of answers over cached keys, `pair_ratio` that of prompts.
    """

    tp: int
    by_answers: tuple[LaunchTime, ...] = ()
    by_tokens: tuple[Ratio, ...] = ()
    reduced: tuple[Ratio, ...] = ()
    cached_ratio: float = 1.0
    pair_ratio: float = 1.0
    host_step_s: float = 0.0
    host_sequence_s: float = 0.0
    host_launch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredServing:
    """What a profile says of one engine on one kind of GPU: steps by degree, and NCCL's times for any engine."""

    steps: tuple[MeasuredSteps, ...] = ()
    collectives: tuple[CollectiveSample, ...] = ()

    def of(self, tp: int) -> MeasuredSteps | None:
        """Return the steps over `tp` ranks, or of the nearest degree that was timed; None without any."""
        if not self.steps:
            return None
        return min(self.steps, key=lambda one: abs(np.log(one.tp / tp)))


def scaled(curve: tuple[Ratio, ...], tokens: Floats) -> Floats:
    """Return the ratios of a curve at `tokens`: straight between points over the logarithm, flat beyond its ends."""
    if not curve:
        return np.ones_like(tokens)
    at, ratio = np.log([one.tokens for one in curve]), [one.ratio for one in curve]
    return np.asarray(np.interp(np.log(np.maximum(tokens, 1.0)), at, ratio))
