"""Gaussian estimates updated by measurements: the linear-Gaussian update of Kalman's filter.

R. E. Kalman, A new approach to linear filtering and prediction problems, J. Basic Eng. 82, 1960.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def gain(across: Floats, inner: Floats, noise: ArrayLike) -> Floats:
    """Return the Kalman gain: by how much each unknown changes for each observation, shape (unknowns, observations).

    `across` (unknowns, observations) is their covariance before anything is seen, `inner` (observations, observations)
    that of the observations without their `noise`, the standard deviations of single observations.
    """
    return np.asarray(np.linalg.solve(observed(inner, noise), across.T).T)


def observed(inner: Floats, noise: ArrayLike) -> Floats:
    """Return the covariance of the observations, their noise included."""
    return np.asarray(inner + np.diag(np.square(noise)))


def conditioned(covariance: Floats, seen: Floats, noise: ArrayLike) -> Floats:
    """Return the covariance of unknowns after a measurement of `seen @ unknowns` with noise; `seen` is (observations,
    unknowns).
    """
    across = covariance @ seen.T
    return np.asarray(covariance - gain(across, seen @ across, noise) @ across.T)
