"""Robust least squares around a prior, for few parameters and expensive predictions.

A step is the maximum over several resources, so a cost may have an effect in few runs, or in none before it has grown.
Damped Gauss-Newton steps with finite differences of a few percent are not misled by such kinks, and need fewer
predictions than a trust region, whose first steps are short near the prior.
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
FURTHEST = 0.7  # largest change of a parameter in a round
ENOUGH = 1e-3  # least relative gain of a round for another one
FOLLOWED = 3e-2  # the same for derivatives that were updated rather than computed here


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Parameters, with residuals and derivatives there; the latter of shape (residuals, parameters)."""

    found: Floats
    residuals: Floats
    jacobian: Floats


def solve(missed: Callable[[Floats], Floats], start: Floats, spreads: Floats, *, loss: Loss = "soft_l1") -> Solution:
    """Return the parameters that minimise `missed`, each held near 0 by a prior of the given spread.

    `missed` takes several sets of parameters, shape (sets, parameters), and returns residuals, shape (sets, residuals).
    A residual counts as its square near 0; far beyond 1 it counts linearly with soft L1, 2 (sqrt(1 + r^2) - 1), or
    almost nothing with `cauchy`, log(1 + r^2). Cauchy has local minima that ignore good data, so begin with soft L1.
    Between rounds derivatives are updated from each step (Broyden, Math. Comp. 19, 1965); they are computed again when
    a round gains little.
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
