"""Times of operators on one GPU, as curves of physical form with constants fitted to its samples.

- matrix products: arithmetic at the rate left after the losses of tiles, waves and the pipeline along k; never faster
  than memory allows; plus a fixed start-up time. A library that spreads the last wave over all SMs (stream-k) wastes at
  most `1 - wave_floor` of it.
- attention: arithmetic at a rate that longer sequences and more heads fill, for each head width and direction.
- kernels that move memory: the bytes that the runtime's description counts over a bandwidth that grows with size.

A curve's residuals are smooth in the logarithms of the sizes, so residuals of neighbouring samples correct it
(`Smooth`). The constants come from `simulator.fitting.operator_fit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulator.config.model import causal_keys
from simulator.kernels.operators import ATTENTION_BACKWARD
from simulator.kernels.roofline import TILES, matmul_utilization

Floats = NDArray[np.float64]

# Smoothing of residuals: the kernel's width in doublings of each size, and the number of samples that a residual of
# zero counts for. Source: leave-one-out errors of the products in examples/profiles/h200x4.json, 2.6 % and least from
# 0.55 to 1.0 doublings and 0.3 to 1 sample.
SMOOTHING_DOUBLINGS = 0.7
PRIOR_SAMPLES = 0.3

# Further tiles that measured products show, which matter where a time is known to a few percent.
FITTED_TILES = (*TILES, (192.0, 128.0, 0.96), (128.0, 192.0, 0.96))


@dataclass(frozen=True, slots=True)
class Smooth:
    """Smoothed residuals of samples in the space of log sizes. `error` is the mean leave-one-out error."""

    points: Floats  # (samples, axes), in doublings
    residuals: Floats  # log(measured / curve)
    error: float

    def at(self, points: Floats) -> tuple[Floats, Floats]:
        """Return (log of the correction, the effective number of samples nearby), one value per row of `points`."""
        distance = ((points[:, None, :] - self.points[None, :, :]) ** 2).sum(axis=-1)
        weight = np.exp(-distance / (2 * SMOOTHING_DOUBLINGS**2))
        near = weight.sum(axis=1)
        return np.asarray((weight @ self.residuals) / (near + PRIOR_SAMPLES)), near


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulCurve:
    """Constants of the products of one dtype; `rest` maps a direction (memory layout) to the curve's residuals."""

    flops: float  # arithmetic rate of a product without any of the losses
    ramp_k: float
    wave_floor: float
    floor_s: float
    sms: float
    bytes_per_s: float
    element_bytes: float
    rest: dict[str, Smooth] = field(default_factory=dict)

    def seconds(self, m: Floats, n: Floats, k: Floats, batch: Floats, direction: str) -> Floats:
        curve = self.curve_s(m, n, k, batch)
        rest = self.rest.get(direction) or next(iter(self.rest.values()))
        points = np.stack([np.log2(m * batch), np.log2(n), np.log2(k)], axis=1)
        return np.asarray(curve * np.exp(rest.at(points)[0]))

    def curve_s(self, m: Floats, n: Floats, k: Floats, batch: Floats) -> Floats:
        used = matmul_utilization(
            FITTED_TILES, m, n, k, batch, sms=self.sms, ramp_k=self.ramp_k, wave_floor=self.wave_floor
        )
        arithmetic = 2.0 * batch * m * n * k / (self.flops * used)
        moved = batch * (m * k + k * n + m * n) * self.element_bytes
        return np.asarray(np.maximum(arithmetic, moved / self.bytes_per_s) + self.floor_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """One head width and direction: a rate, of which half is reached at `ramp_s` keys."""

    flops: float
    ramp_s: float
    floor_s: float
    rest: Smooth

    def seconds(self, flops: Floats, queries: Floats, keys: Floats, heads: Floats) -> Floats:
        points = np.stack([np.log2(queries), np.log2(keys), np.log2(heads)], axis=1)
        return np.asarray(self.curve_s(flops, keys) * np.exp(self.rest.at(points)[0]))

    def curve_s(self, flops: Floats, keys: Floats) -> Floats:
        return np.asarray(flops * (1 + self.ramp_s / keys) / self.flops + self.floor_s)


def attention_flops(shape: Mapping[str, float], direction: str) -> float:
    """Return the FLOPs of a causal kernel over `shape`; backward does 2.5 times the forward's (arXiv 2307.08691)."""
    forward = 4.0 * shape["b"] * shape["a"] * shape["s"] * causal_keys(shape["S"]) * shape["d"]
    return forward * (ATTENTION_BACKWARD if direction == "backward" else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCurve:
    """A kernel that moves memory: ratio of measured to counted time, by the bytes it moves."""

    points: Floats  # log2 of bytes, ascending
    ratios: Floats  # log(measured / counted)
    error: float

    def ratio(self, nbytes: Floats) -> Floats:
        """Return the ratio of measured to counted time for a kernel with `nbytes` counted bytes."""
        at = np.log2(np.maximum(nbytes, 1.0))
        return np.asarray(np.exp(np.interp(at, self.points, self.ratios)))
