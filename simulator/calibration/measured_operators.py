"""Measured times of operators on one GPU model: of the same shape where it was measured, else from a curve through
others.

They are kernels that run alone: products, attention, kernels that move memory, FSDP's packing and optimizer updates. A
roofline asks it first and falls back on the datasheet (`simulator.kernels.roofline.MeasuredKernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simulator.calibration.kernel_samples import direction_of
from simulator.calibration.operator_curves import AttentionCurve, Floats, MatmulCurve, MoveCurve, attention_flops
from simulator.kernels.operators import ATTENTION_BACKWARD, Work, WorkKind
from simulator.kernels.roofline import DATASHEET, FITTED, MEASURED, REDUCE_PACK, Packing


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOperators:
    """`exact` maps a product or an attention to seconds (`simulator.fitting.step_samples.exact_key`); curves are by
    dtype, by (dtype, head width, direction) and by (runtime, operator). `stream` is a plain copy, `packing` FSDP's
    copies by kernel over the bytes counted for them, `update_rates` bytes per second that clipping and updating reach,
    by parameter dtype.
    """

    exact: dict[tuple[Any, ...], float] = field(default_factory=dict)
    matmuls: dict[str, MatmulCurve] = field(default_factory=dict)
    attention: dict[tuple[str, int, str], AttentionCurve] = field(default_factory=dict)
    moves: dict[tuple[str, str], MoveCurve] = field(default_factory=dict)
    stream: MoveCurve | None = None
    packing: dict[str, MoveCurve] = field(default_factory=dict)
    update_rates: dict[str, float] = field(default_factory=dict)
    _seen: dict[tuple[Any, ...], tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    def seconds(
        self, work: Work, datasheet: Callable[[], Floats], *, dtype: str, runtime: str
    ) -> tuple[Floats, Floats]:
        """Return (seconds, source) of a kernel, one value a row; `datasheet` returns its seconds from the datasheet."""
        found = None
        if work.kind is WorkKind.MATMUL:
            found = self._matmul(work, dtype)
        elif work.kind is WorkKind.ATTENTION:
            found = self._attention(work, dtype)
        else:
            return self._move(work, datasheet(), runtime)
        if found is None:
            plain = datasheet()
            return plain, np.full(plain.shape, DATASHEET)
        return found

    def packing_factor(self, packing: Packing, usual: Floats | float) -> Floats:
        """Return the measured time of one of FSDP's copies over its counted time; `usual` where not measured. Gradients
        are measured as they are packed in a wider type.
        """
        curve = self.packing.get(packing.kernel)
        if curve is None:
            return np.atleast_1d(usual)
        found = curve.ratio(np.asarray(packing.module_bytes, dtype=np.float64))
        alike = np.asarray(packing.kernel != REDUCE_PACK) | (np.asarray(packing.widened_bytes) > 0)
        return np.where(alike, found, usual)

    def update_bytes_per_s(self, param_dtype: str) -> float | None:
        """Return the bytes/s of clipping and updating, in terms of the bytes counted for them; None where not
        measured.
        """
        return self.update_rates.get(param_dtype)

    def _matmul(self, work: Work, dtype: str) -> tuple[Floats, Floats] | None:
        curve = self.matmuls.get(dtype)
        if curve is None:
            return None
        direction = direction_of(work)
        direction = direction if direction in {"dgrad", "wgrad"} else "forward"

        def fitted(rows: Floats) -> Floats:
            return curve.seconds(rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 0], direction)

        return self._looked_up(("matmul", dtype, direction), (work.batch, work.m, work.n, work.k), fitted)

    def _attention(self, work: Work, dtype: str) -> tuple[Floats, Floats] | None:
        direction = "backward" if work.backward else "forward"
        if self._attention_curve(dtype, 128.0, direction) is None:
            return None
        # A rank that sees part of the keys, or a window of them, computes less than the full square of the sequence.
        whole = 2.0 * np.asarray(work.batch) * work.m * (np.asarray(work.n) + 1) * work.k
        share = np.asarray(work.flops) / (whole * (ATTENTION_BACKWARD if work.backward else 1.0))

        def fitted(rows: Floats) -> Floats:
            out = np.empty(len(rows))
            for index, (heads, queries, keys, width, part) in enumerate(rows):
                curve = self._attention_curve(dtype, width, direction)
                flops = attention_flops({"b": 1, "a": heads, "s": queries, "S": keys, "d": width}, direction) * part
                # A rank with more keys than queries gets the keys one shard at a time, so each kernel is as long as a
                # shard.
                one = [np.array([value]) for value in (flops, queries, min(queries, keys), heads)]
                out[index] = curve.seconds(one[0], one[1], one[2], one[3])[0] if curve is not None else np.nan
            return out

        return self._looked_up(
            ("attention", dtype, direction), (work.batch, work.m, work.n, work.k, np.round(share, 3)), fitted
        )

    def _looked_up(
        self, kind: tuple[str, ...], columns: tuple[Floats | float, ...], fitted: Callable[[Floats], Floats]
    ) -> tuple[Floats, Floats]:
        """Return (seconds, source) row by row, from the measured shape or else from the curve; each shape is computed
        once.
        """
        shape, rows, back = _unique(*columns)
        keys = [(*kind, *row) for row in rows.tolist()]
        new = [index for index, key in enumerate(keys) if key not in self._seen]
        if new:
            for index, seconds in zip(new, fitted(rows[new]).tolist(), strict=True):
                known = self.exact.get(keys[index])
                self._seen[keys[index]] = (seconds, FITTED) if known is None else (known, MEASURED)
        table = np.array([self._seen[key] for key in keys], dtype=np.float64)
        return _spread(table[:, 0], back, shape), _spread(table[:, 1], back, shape)

    def _attention_curve(self, dtype: str, width: float, direction: str) -> AttentionCurve | None:
        found = {d: c for (t, d, way), c in self.attention.items() if t == dtype and way == direction}
        nearest = min(found, key=lambda d: abs(d - width), default=None)
        return None if nearest is None else found[nearest]

    def _move(self, work: Work, datasheet: Floats, runtime: str) -> tuple[Floats, Floats]:
        curve = self.moves.get((runtime, work.name))
        size = np.broadcast_to(np.asarray(work.bytes, dtype=np.float64), datasheet.shape)
        if curve is not None:
            return datasheet * curve.ratio(size), np.full(datasheet.shape, FITTED)
        if self.stream is not None and not work.scattered:
            return datasheet * self.stream.ratio(size), np.full(datasheet.shape, FITTED)
        return datasheet, np.full(datasheet.shape, DATASHEET)


def _unique(*columns: Floats | float) -> tuple[tuple[int, ...], Floats, Any]:
    """Return (broadcast shape of the columns, distinct rows, index of each entry's row); values are rounded to three
    decimals.
    """
    arrays = np.broadcast_arrays(*(np.asarray(column, dtype=np.float64) for column in columns))
    stacked = np.round(np.stack([array.ravel() for array in arrays], axis=1), 3)
    rows, back = np.unique(stacked, axis=0, return_inverse=True)
    return arrays[0].shape or (1,), rows, back.reshape(-1)


def _spread(values: Floats, back: Any, shape: tuple[int, ...]) -> Floats:
    return np.asarray(values[back].reshape(shape), dtype=np.float64)
