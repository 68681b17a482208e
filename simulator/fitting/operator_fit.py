"""The curves of `simulator.calibration.operator_curves` through samples of one GPU.

A curve is corrected by the residuals of neighbouring samples: their kernel-weighted mean, shrunk to zero where there
are few. Leave-one-out errors show how well unmeasured shapes are predicted; they are the spread of every fitted value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import scipy  # submodules are imported when first used: without samples nothing is fitted
from numpy.typing import NDArray

from simulator.calibration.operator_curves import (
    PRIOR_SAMPLES,
    SMOOTHING_DOUBLINGS,
    AttentionCurve,
    MatmulCurve,
    MoveCurve,
    Smooth,
    attention_flops,
)
from topology.profile.samples import OperatorSample

Floats = NDArray[np.float64]

FEWEST = 3  # samples below which nothing is fitted
OUTLIER = 0.02  # relative error beyond which a sample is treated as an outlier


def smooth(points: Floats, residuals: Floats) -> Smooth:
    """Return the smoothed `residuals` at `points`, with their mean leave-one-out error."""
    if len(residuals) < FEWEST:
        return Smooth(points, residuals, float(np.mean(np.abs(residuals))) if len(residuals) else 0.0)
    return Smooth(points, residuals, float(np.mean(np.abs(np.expm1(left_out(points, residuals))))))


def left_out(points: Floats, residuals: Floats) -> Floats:
    """Return log(predicted / measured) of each sample, predicted from all others."""
    distance = ((points[:, None, :] - points[None, :, :]) ** 2).sum(axis=-1)
    weight = np.exp(-distance / (2 * SMOOTHING_DOUBLINGS**2))
    np.fill_diagonal(weight, 0.0)
    return np.asarray((weight @ residuals) / (weight.sum(axis=1) + PRIOR_SAMPLES) - residuals)


NOTHING_LEFT = Smooth(np.empty((0, 3)), np.empty(0), 0.0)


def robust_fit(
    residuals: Callable[[Floats], Floats], *, start: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> Floats:
    """Return the constants within `low` and `high` that minimise `residuals` (relative errors).

    Errors beyond `OUTLIER` count linearly instead of squared, so that a few outliers do not bend a curve.
    """
    found = scipy.optimize.least_squares(
        residuals, start, bounds=(low, high), x_scale=np.subtract(high, low), loss="soft_l1", f_scale=OUTLIER
    )
    return np.asarray(found.x)


# --- matrix products ------------------------------------------------------------------------------------------------


def fit_matmul(
    samples: Sequence[OperatorSample], *, sms: float, bytes_per_s: float, element_bytes: float
) -> MatmulCurve | None:
    """Return the curve through the products of one dtype, or None where there are too few."""
    if len(samples) < FEWEST:
        return None
    m, n, k, batch = (np.array([float(s.shape.get(axis, 1)) for s in samples]) for axis in ("m", "n", "k", "batch"))
    seconds = np.array([s.seconds for s in samples])

    def curve_of(log_flops: float, ramp_k: float, wave_floor: float, floor_us: float) -> MatmulCurve:
        return MatmulCurve(
            flops=float(np.exp(log_flops)),
            ramp_k=float(ramp_k),
            wave_floor=float(wave_floor),
            floor_s=float(floor_us) * 1e-6,
            sms=sms,
            bytes_per_s=bytes_per_s,
            element_bytes=element_bytes,
        )

    fastest = float(np.log(np.max(2.0 * batch * m * n * k / seconds)))
    curve = curve_of(
        *robust_fit(
            lambda x: np.log(curve_of(*x).curve_s(m, n, k, batch) / seconds),
            start=(fastest, 160.0, 0.9, 3.0),
            low=(fastest - 2.0, 20.0, 0.0, 0.5),
            high=(fastest + 2.0, 800.0, 0.98, 10.0),
        )
    )
    residuals = np.log(seconds / curve.curve_s(m, n, k, batch))
    points = np.stack([np.log2(m * batch), np.log2(n), np.log2(k)], axis=1)
    rest = {}
    for direction in dict.fromkeys(s.direction for s in samples):
        mine = np.array([s.direction == direction for s in samples])
        rest[direction] = smooth(points[mine], residuals[mine])
    return replace(curve, rest=rest)


# --- attention ------------------------------------------------------------------------------------------------------


def fit_attention(samples: Sequence[OperatorSample]) -> AttentionCurve | None:
    """Return the curve through the samples of one head width, dtype and direction, or None where there are too few."""
    if len(samples) < FEWEST:
        return None
    flops = np.array([attention_flops(s.shape, s.direction) for s in samples])
    queries, keys = (np.array([float(s.shape[axis]) for s in samples]) for axis in ("s", "S"))
    heads = np.array([float(s.shape["b"] * s.shape["a"]) for s in samples])
    seconds = np.array([s.seconds for s in samples])

    def curve_of(log_flops: float, ramp_s: float, floor_us: float) -> AttentionCurve:
        return AttentionCurve(
            flops=float(np.exp(log_flops)), ramp_s=float(ramp_s), floor_s=float(floor_us) * 1e-6, rest=NOTHING_LEFT
        )

    fastest = float(np.log(np.max(flops / seconds)))
    curve = curve_of(
        *robust_fit(
            lambda x: np.log(curve_of(*x).curve_s(flops, keys) / seconds),
            start=(fastest, 200.0, 5.0),
            low=(fastest - 2.0, 0.0, 0.5),
            high=(fastest + 2.0, 2500.0, 80.0),
        )
    )
    residuals = np.log(seconds / curve.curve_s(flops, keys))
    points = np.stack([np.log2(queries), np.log2(keys), np.log2(heads)], axis=1)
    return replace(curve, rest=smooth(points, residuals))


# --- memory ---------------------------------------------------------------------------------------------------------


def fit_move(nbytes: Iterable[float], counted_s: Iterable[float], measured_s: Iterable[float]) -> MoveCurve | None:
    """Return the curve of one kernel from what was counted and what was measured, or None without samples.

    Samples within a doubling of size are reduced to their median, since shapes with equal bytes differ by strides.
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
    if len(points) > 2:  # the first and last points cannot be left out, since the curve does not extend beyond them
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
