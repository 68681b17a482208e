"""What measurements change in a prediction: the seam between a profile and the cost of a plan.

A `Calibration` (made by `simulator.calibration_fit`) answers for kernels, packing, updates, contention, clocks and a
runtime's own costs. Everything that costs a plan asks it through the roofline and the context; without one every figure
is what the datasheet and published efficiencies say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from simulator.contention_fit import Beside
from simulator.kernel_samples import direction_of
from simulator.operator_fit import (
    AttentionCurve,
    Floats,
    MatmulCurve,
    MoveCurve,
    attention_flops,
)
from simulator.operators import Work, WorkKind
from simulator.roofline import DATASHEET, FITTED, MEASURED, Roofline
from simulator.runtime import Runtime
from simulator.runtime_library import RuntimeSpec, attention_kernel, runtime_spec
from topology.cluster import Cluster, GpuKind

# Host costs that only runtimes have whose operators go through Python one by one.
OF_DTENSORS = frozenset({"tp_layer_s", "selective_s"})
NOTHING = 1e-12  # what is left of an effect that is not counted: a rate stays a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """Which effects are counted; leaving one out shows what it is worth (tests/bench/calibration_tables.py).

    Without `operators` kernels take what the datasheet says; without `sustained` they run at the clocks of a GPU that
    has rested; the others are left out altogether.
    """

    operators: bool = True
    host: bool = True
    contention: bool = True
    packing: bool = True
    sustained: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeCosts:
    """What runs of one and two layers said of a runtime, eager or compiled; see simulator.runtime_fit.

    `busy` multiplies kernel times: inside a step clocks, caches and gaps are not those of a kernel alone; `layer_busy`
    those of layers once more, whose many short kernels have more of all three than a head's few. `host` are fields of HostSpec that replace the description's. `reserved` is what the allocator held over what was predicted.
    `borrowed`: of the runtime that the one in question is like.
    """

    busy: float = 1.0
    layer_busy: float = 1.0
    host: dict[str, float] = field(default_factory=dict)
    reserved: float = 1.0
    spread: float = 0.0  # of the runs around the fit
    runs: int = 0
    borrowed: bool = False


@dataclass(slots=True)
class Calibration:
    """Measured operators, and what follows from them, for one GPU model. `costs` is by (runtime, compiled)."""

    gpu: GpuKind
    exact: dict[tuple[Any, ...], float]
    matmuls: dict[str, MatmulCurve]
    attention: dict[tuple[str, int, str], AttentionCurve]
    moves: dict[tuple[str, str], MoveCurve]
    stream: MoveCurve | None
    packing: MoveCurve | None
    updates: dict[str, float]
    beside: dict[str, Beside]  # by collective
    burst: float = 1.0  # a large product's time after a rest over its time on a GPU at work
    costs: dict[tuple[str, bool], RuntimeCosts] = field(default_factory=dict)
    fit: Callable[[tuple[str, bool]], RuntimeCosts] | None = None
    effects: Effects = field(default_factory=Effects)
    _seen: dict[tuple[Any, ...], tuple[float, float]] = field(default_factory=dict)

    def runtime(self, name: str, *, compiled: bool) -> RuntimeCosts:
        """Return what is known of a runtime, fitted when it is first asked for; neutral where nobody ran it.

        One that was not run is taken to cost what the runtime costs that it is like, but for Python that it does without.
        """
        spec = runtime_spec(name)
        own = self._costs((spec.names[0], compiled))
        if own != RuntimeCosts() or not spec.like:
            return own
        found = self._costs((spec.like, compiled))
        kept = {k: v for k, v in found.host.items() if not (spec.host.plain_tensors and k in OF_DTENSORS)}
        return replace(found, host=kept, borrowed=True)

    def _costs(self, key: tuple[str, bool]) -> RuntimeCosts:
        if key not in self.costs and self.fit is not None:
            self.costs[key] = self.fit(key)
        return self.costs.get(key, RuntimeCosts())

    def seconds(
        self, work: Work, datasheet: Callable[[], Floats], *, dtype: str, runtime: str
    ) -> tuple[Floats, Floats]:
        """Return (seconds, source) of a kernel, one value a row; `datasheet` gives what the datasheet says of it."""
        found = None
        if self.effects.operators:
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

    def packing_factor(self, nbytes: Floats | float) -> Floats:
        """Return what FSDP's packing of modules of `nbytes` takes over what is counted for it."""
        if not self.effects.packing:
            return np.full(1, NOTHING)
        if self.packing is None:
            return np.ones(1)
        return self.packing.ratio(np.asarray(nbytes, dtype=np.float64))

    def update_factor(self, memory_bytes_per_s: float, param_dtype: str) -> float:
        """Return what clipping and updating take over what is counted for them (simulator.data_parallel)."""
        from simulator.data_parallel import ADAM_BYTES, CLIP_BYTES  # noqa: PLC0415 - it costs plans by rooflines

        seconds = self.updates.get(param_dtype)
        if seconds is None or not self.effects.operators:
            return 1.0
        return seconds * memory_bytes_per_s / (ADAM_BYTES + CLIP_BYTES)

    def clocks(self, duty: Floats, exponent: float) -> Floats:
        """Return kernel times over those of a GPU that is never idle, for the share of a step that it is busy.

        A power limit holds on average: what idle moments save, busy ones may draw, and arithmetic goes with the
        `exponent`-th power of what it draws (efficiency.toml), up to the clocks that a rested GPU reaches.
        """
        if not self.effects.sustained:
            return np.full(duty.shape, self.burst)
        return np.maximum(np.asarray(duty) ** exponent, self.burst)

    def contention(self, *ops: str) -> Beside | None:
        """Return what compute and collectives cost each other, or None where that was not measured.

        `ops` are the collectives in question; their mean, or that of all where none of them was measured.
        """
        if not self.effects.contention:
            return Beside()
        if not self.beside:
            return None
        chosen = [self.beside[op] for op in ops if op in self.beside] or list(self.beside.values())
        return Beside(
            compute=float(np.mean([one.compute for one in chosen])),
            collective=float(np.mean([one.collective for one in chosen])),
        )

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
        # A rank that sees a part of the keys, or a window of them, does less than the square of the sequence.
        whole = 2.0 * np.asarray(work.batch) * work.m * (np.asarray(work.n) + 1) * work.k
        share = np.asarray(work.flops) / (whole * (2.5 if work.backward else 1.0))

        def fitted(rows: Floats) -> Floats:
            out = np.empty(len(rows))
            for index, (heads, queries, keys, width, part) in enumerate(rows):
                curve = self._attention_curve(dtype, width, direction)
                flops = attention_flops({"b": 1, "a": heads, "s": queries, "S": keys, "d": width}, direction) * part
                # Who sees more keys than it has queries gets them a shard at a time: kernels are as long as a shard.
                one = [np.array([value]) for value in (flops, queries, min(queries, keys), heads)]
                out[index] = curve.seconds(one[0], one[1], one[2], one[3])[0] if curve is not None else np.nan
            return out

        return self._looked_up(
            ("attention", dtype, direction), (work.batch, work.m, work.n, work.k, np.round(share, 3)), fitted
        )

    def _looked_up(
        self, kind: tuple[str, ...], columns: tuple[Floats | float, ...], fitted: Callable[[Floats], Floats]
    ) -> tuple[Floats, Floats]:
        """Return (seconds, source) row by row: the measured shape, else what the curve says, computed once a shape."""
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
    """Return (shape of the columns together, distinct rows rounded to whole sizes, which row each is)."""
    arrays = np.broadcast_arrays(*(np.asarray(column, dtype=np.float64) for column in columns))
    stacked = np.round(np.stack([array.ravel() for array in arrays], axis=1), 3)
    rows, back = np.unique(stacked, axis=0, return_inverse=True)
    return arrays[0].shape or (1,), rows, back.reshape(-1)


def _spread(values: Floats, back: Any, shape: tuple[int, ...]) -> Floats:
    return np.asarray(values[back].reshape(shape), dtype=np.float64)


def calibrated_host(spec: RuntimeSpec, calibration: Calibration | None, *, compiled: bool) -> RuntimeSpec:
    """Return a runtime's description with the host costs that its single layers showed."""
    if calibration is None:
        return spec
    if not calibration.effects.host:
        numbers = [f.name for f in fields(spec.host) if f.name not in {"synchronizes", "plain_tensors", "selective_s"}]
        silent = dict.fromkeys(numbers, 0.0)
        return replace(spec, host=replace(spec.host, selective_s=None, **silent))  # type: ignore[arg-type]  # floats
    found = calibration.runtime(spec.names[0], compiled=compiled).host
    return replace(spec, host=replace(spec.host, **found)) if found else spec  # type: ignore[arg-type]  # floats all


def roofline_of(
    cluster: Cluster, runtime: Runtime, spec: RuntimeSpec, calibration: Calibration | None, *, windowed: float = 0.0
) -> Roofline:
    """Return kernel times for a runtime on a cluster's slowest GPU.

    `windowed`: the share of attention's arithmetic in layers with a sliding window (`plan_table.windowed_share`).
    """
    costs = RuntimeCosts()
    if calibration is not None and calibration.effects.sustained:
        costs = calibration.runtime(spec.names[0], compiled=runtime.compile)
    return Roofline(
        gpu=cluster.slowest_kind,
        dtype=runtime.compute_dtype,
        attention_kernel=attention_kernel(runtime, cluster.slowest_kind.architecture),
        window_kernel=spec.window_kernel,
        windowed=windowed,
        calibration=calibration,
        runtime=spec.measured_as,
        busy=costs.busy,
        layer_busy=costs.layer_busy,
    )


def without(calibration: Calibration, **effects: bool) -> Calibration:
    """Return the calibration with some effects switched off."""
    return replace(calibration, effects=replace(calibration.effects, **effects))
