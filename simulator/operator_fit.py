"""Operator times from samples of one GPU: the very shape where it was measured, else a curve bent through the samples.

Each kind has a curve of physical form with constants fitted to the samples:

- matrix products: arithmetic at a rate that tiles, waves and the pipeline along k leave, never faster than memory, and a
  floor for starting. A library that spreads the last wave over all SMs (stream-k) wastes at most `1 - wave_floor` of it.
- attention: arithmetic at a rate that longer sequences and more heads fill, for each head width and direction.
- kernels that move memory: the bytes that the runtime's description counts over a bandwidth that grows with size.

What a curve leaves is smooth in the logarithms of the sizes, so neighbours correct it: a kernel-weighted mean of their
residuals, drawn to zero where there are few. Leaving each sample out in turn says how well shapes are predicted that
nobody measured; that error is the spread of every fitted value.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulator.roofline import SPLITS, TILES
from topology.samples import OperatorSample

Floats = NDArray[np.float64]

WIDTH = 0.7  # of the smoothing, in doublings of each size
PULL = 0.3  # samples' worth of evidence that a curve is right as it is
FEWEST = 3  # samples below which nothing is fitted

# Measured products show these, too, which matter where one is known to a few percent.
FITTED_TILES = (*TILES, (192.0, 128.0, 0.96), (128.0, 192.0, 0.96))


@dataclass(frozen=True, slots=True)
class Smooth:
    """Residuals of samples at points in the space of log sizes, smoothed. `error` is the leave-one-out mean."""

    points: Floats  # (samples, axes), in doublings
    residuals: Floats  # log(measured / curve)
    error: float

    def at(self, points: Floats) -> tuple[Floats, Floats]:
        """Return (log correction, how many samples' worth of evidence is near), one a row of `points`."""
        distance = ((points[:, None, :] - self.points[None, :, :]) ** 2).sum(axis=-1)
        weight = np.exp(-distance / (2 * WIDTH**2))
        near = weight.sum(axis=1)
        return np.asarray((weight @ self.residuals) / (near + PULL)), near


def smooth(points: Floats, residuals: Floats) -> Smooth:
    """Return the smoothing of `residuals` at `points`, and what it errs on each sample when that is left out."""
    if len(residuals) < FEWEST:
        return Smooth(points, residuals, float(np.mean(np.abs(residuals))) if len(residuals) else 0.0)
    return Smooth(points, residuals, float(np.mean(np.abs(np.expm1(left_out(points, residuals))))))


def left_out(points: Floats, residuals: Floats) -> Floats:
    """Return log(predicted / measured) of each sample from all the others."""
    distance = ((points[:, None, :] - points[None, :, :]) ** 2).sum(axis=-1)
    weight = np.exp(-distance / (2 * WIDTH**2))
    np.fill_diagonal(weight, 0.0)
    return np.asarray((weight @ residuals) / (weight.sum(axis=1) + PULL) - residuals)


# --- matrix products ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulCurve:
    """Constants of the products of one dtype; `rest` maps a direction (memory layout) to what the curve leaves."""

    flops: float  # arithmetic rate of a product that fills everything
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
        used = matmul_use(m, n, k, batch, sms=self.sms, ramp_k=self.ramp_k, wave_floor=self.wave_floor)
        arithmetic = 2.0 * batch * m * n * k / (self.flops * used)
        moved = batch * (m * k + k * n + m * n) * self.element_bytes
        return np.asarray(np.maximum(arithmetic, moved / self.bytes_per_s) + self.floor_s)


def matmul_use(
    m: Floats, n: Floats, k: Floats, batch: Floats, *, sms: float, ramp_k: float, wave_floor: float
) -> Floats:
    """Return the share of the arithmetic rate that the best choice of tile and split reaches."""
    best = np.zeros_like(m)
    for rows, columns, rate in FITTED_TILES:
        across = np.ceil(m / rows) * np.ceil(n / columns) * batch
        used = (m * n * batch) / (across * rows * columns)
        for pieces, cost in SPLITS:
            waves = across * pieces / sms
            filled = np.maximum(waves / np.ceil(waves), np.where(waves > 1, wave_floor, 0.0))
            depth = k / pieces
            best = np.maximum(best, used * filled * rate * cost * depth / (depth + ramp_k))
    return best


def fit_matmul(
    samples: Sequence[OperatorSample], *, sms: float, bytes_per_s: float, element_bytes: float
) -> MatmulCurve | None:
    """Return the curve through the products of one dtype, or None where there are too few."""
    if len(samples) < FEWEST:
        return None
    m, n, k, batch = (np.array([float(s.shape.get(axis, 1)) for s in samples]) for axis in ("m", "n", "k", "batch"))
    seconds = np.array([s.seconds for s in samples])
    best: tuple[float, MatmulCurve] | None = None
    grid = itertools.product((50.0, 100.0, 160.0, 250.0, 400.0), (0.0, 0.85, 0.9, 0.95), (1e-6, 2e-6, 3e-6, 5e-6))
    for ramp_k, wave_floor, floor_s in grid:
        used = matmul_use(m, n, k, batch, sms=sms, ramp_k=ramp_k, wave_floor=wave_floor)
        bound = 2.0 * batch * m * n * k / used
        rate = float(np.median(bound / np.maximum(seconds - floor_s, 0.2 * seconds)))
        curve = MatmulCurve(
            flops=rate,
            ramp_k=ramp_k,
            wave_floor=wave_floor,
            floor_s=floor_s,
            sms=sms,
            bytes_per_s=bytes_per_s,
            element_bytes=element_bytes,
        )
        error = float(np.mean(np.abs(np.log(seconds / curve.curve_s(m, n, k, batch)))))
        if best is None or error < best[0]:
            best = error, curve
    if best is None:
        return None
    curve = best[1]
    residuals = np.log(seconds / curve.curve_s(m, n, k, batch))
    points = np.stack([np.log2(m * batch), np.log2(n), np.log2(k)], axis=1)
    rest = {}
    for direction in dict.fromkeys(s.direction for s in samples):
        mine = np.array([s.direction == direction for s in samples])
        rest[direction] = smooth(points[mine], residuals[mine])
    return MatmulCurve(
        flops=curve.flops,
        ramp_k=curve.ramp_k,
        wave_floor=curve.wave_floor,
        floor_s=curve.floor_s,
        sms=sms,
        bytes_per_s=bytes_per_s,
        element_bytes=element_bytes,
        rest=rest,
    )


# --- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """One head width and direction: a rate, half reached at `ramp` blocks of queries times heads."""

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
    forward = 4.0 * shape["b"] * shape["a"] * shape["s"] * (shape["S"] + 1) / 2 * shape["d"]
    return forward * (2.5 if direction == "backward" else 1.0)


def fit_attention(samples: Sequence[OperatorSample]) -> AttentionCurve | None:
    """Return the curve through the samples of one head width, dtype and direction, or None where there are too few."""
    if len(samples) < FEWEST:
        return None
    flops = np.array([attention_flops(s.shape, s.direction) for s in samples])
    queries, keys = (np.array([float(s.shape[axis]) for s in samples]) for axis in ("s", "S"))
    heads = np.array([float(s.shape["b"] * s.shape["a"]) for s in samples])
    seconds = np.array([s.seconds for s in samples])
    best: tuple[float, float, float, float] | None = None
    for ramp_s, floor_s in itertools.product((0.0, 100.0, 200.0, 400.0, 700.0, 1200.0), (2e-6, 5e-6, 10e-6, 20e-6)):
        rate = float(np.median(flops * (1 + ramp_s / keys) / np.maximum(seconds - floor_s, 0.2 * seconds)))
        error = float(np.mean(np.abs(np.log(seconds / (flops * (1 + ramp_s / keys) / rate + floor_s)))))
        if best is None or error < best[0]:
            best = error, rate, ramp_s, floor_s
    if best is None:
        return None
    _, rate, ramp_s, floor_s = best
    residuals = np.log(seconds / (flops * (1 + ramp_s / keys) / rate + floor_s))
    points = np.stack([np.log2(queries), np.log2(keys), np.log2(heads)], axis=1)
    return AttentionCurve(flops=rate, ramp_s=ramp_s, floor_s=floor_s, rest=smooth(points, residuals))


# --- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCurve:
    """A kernel that moves memory: measured over counted time, against the size of what is moved."""

    points: Floats  # log2 of bytes, ascending
    ratios: Floats  # log(measured / counted)
    error: float

    def ratio(self, nbytes: Floats) -> Floats:
        """Return measured over counted time for a kernel that counts `nbytes`."""
        at = np.log2(np.maximum(nbytes, 1.0))
        return np.asarray(np.exp(np.interp(at, self.points, self.ratios)))


def fit_move(nbytes: Iterable[float], counted_s: Iterable[float], measured_s: Iterable[float]) -> MoveCurve | None:
    """Return the curve of one kernel from what was counted and what was measured, or None without samples.

    Samples of one size class (a doubling) are one point, their median: shapes of equal bytes differ by strides.
    """
    classes: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for size, counted, measured in zip(nbytes, counted_s, measured_s, strict=True):
        if counted > 0 and measured > 0 and size > 0:
            classes[round(float(np.log2(size)))].append((float(np.log2(size)), float(np.log(measured / counted))))
    if not classes:
        return None
    groups = [classes[key] for key in sorted(classes)]
    points = np.array([np.mean([at for at, _ in group]) for group in groups])
    ratios = np.array([np.median([ratio for _, ratio in group]) for group in groups])
    errors = [abs(np.expm1(ratio - middle)) for group, middle in zip(groups, ratios, strict=True) for _, ratio in group]
    if len(points) > 2:  # ends cannot be left out: nothing is known beyond them
        inner = [
            abs(np.expm1(np.interp(points[i], np.delete(points, i), np.delete(ratios, i)) - ratios[i]))
            for i in range(1, len(points) - 1)
        ]
        errors += inner
    return MoveCurve(points=points, ratios=ratios, error=float(np.mean(errors)))


def by_key(samples: Iterable[OperatorSample], *parts: str) -> dict[tuple[Hashable, ...], list[OperatorSample]]:
    """Group valid samples by some of their fields."""
    found: dict[tuple[Hashable, ...], list[OperatorSample]] = defaultdict(list)
    for sample in samples:
        if not sample.invalid:
            found[tuple(getattr(sample, part) for part in parts)].append(sample)
    return found
