"""Robust least squares around a prior, for few parameters and predictions that are dear.

What a plan's step takes is a maximum of what several resources take, so a cost may show in few of the runs, or in none
before it has grown. Damped Gauss-Newton steps with differences as wide as a few percent see past such kinks, and need
fewer predictions than a trust region, which starts as narrow as the first guess is close to the prior.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Loss = Literal["soft_l1", "cauchy"]

ROUNDS = 15
HALVINGS = 3
WIDTH = 0.05  # of differences
FURTHEST = 0.7  # that a parameter moves in a round
ENOUGH = 1e-3  # relative gain of a round below which the next would gain next to nothing
FOLLOWED = 3e-2  # the same of derivatives that were not found at this point


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Parameters, the residuals there and their derivatives, shape (residuals, parameters)."""

    found: Floats
    residuals: Floats
    jacobian: Floats


def solve(missed: Callable[[Floats], Floats], start: Floats, spreads: Floats, *, loss: Loss = "soft_l1") -> Solution:
    """Return the parameters that make `missed` least, each held near 0 by its prior spread.

    `missed` is asked for several answers at once: it takes (answers, parameters) and returns (answers, residuals).
    A residual counts as its square near 0, and far beyond 1 linearly with soft L1, 2 (sqrt(1 + r^2) - 1), or next to
    nothing with `cauchy`, log(1 + r^2). Only the first has no minima where it ignores what it should meet: begin with
    it. Between rounds derivatives follow from what a step did (Broyden, Math. Comp. 19, 1965); they are found again
    where that gains little.
    """
    held = np.diag(spreads**-2.0)
    at, (here, jacobian) = start, _at(missed, start)
    cost, exact = _cost(here, at, spreads, loss), True
    for _ in range(ROUNDS):
        weights = 1 / (1 + here**2) if loss == "cauchy" else 1 / np.sqrt(1 + here**2)
        slope = jacobian.T @ (weights * here) + held @ at
        step = np.linalg.solve(jacobian.T @ (weights[:, None] * jacobian) + held, -slope)
        step *= min(1.0, FURTHEST / max(float(np.abs(step).max()), FURTHEST))
        before = cost
        for halved in range(HALVINGS + 1 if exact else 1):
            there = at + step / 2**halved
            (residuals,) = missed(there[None])
            reached = _cost(residuals, there, spreads, loss)
            if reached < cost:
                moved = there - at
                jacobian = jacobian + np.outer(residuals - here - jacobian @ moved, moved) / (moved @ moved)
                at, here, cost = there, residuals, reached
                break
        enough = before - cost < (ENOUGH if exact else FOLLOWED) * before
        if enough and exact:
            break
        if enough:
            _, jacobian = _at(missed, at)
        exact = enough
    return Solution(found=at, residuals=here, jacobian=jacobian)


def _cost(residuals: Floats, at: Floats, spreads: Floats, loss: Loss) -> float:
    far = np.log1p(residuals**2) if loss == "cauchy" else 2 * (np.sqrt(1 + residuals**2) - 1)
    return float(np.sum(far) + np.sum((at / spreads) ** 2))


def _at(missed: Callable[[Floats], Floats], at: Floats) -> tuple[Floats, Floats]:
    """Return the residuals at a point, and their derivatives."""
    here, *moved = missed(np.vstack([at, at + WIDTH * np.eye(len(at))]))
    return here, (np.array(moved) - here).T / WIDTH
