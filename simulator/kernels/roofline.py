"""The time of a kernel on a GPU, from its datasheet: the longer of arithmetic and memory traffic, with known
inefficiencies.

Matmuls lose time to partial tiles (edges), the partial last wave, and filling and draining the pipeline along k. All
other kernels take bytes over bandwidth. No kernel takes less than a few microseconds. All functions take plan-table
columns and return seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats
from simulator.config.runtime import DTYPE_BYTES, TF32
from simulator.kernels.efficiency import efficiency
from simulator.kernels.low_precision import Recipe, has_no_bfloat16, low_peak_flops
from simulator.kernels.operators import Work, WorkKind
from topology.cluster import GpuKind

# Thread-block tiles a library chooses from: rows, columns, and the arithmetic rate relative to the largest. A tile
# reads 1/rows + 1/columns operands for each output. The rate falls by a tenth for each 1/256 more than the largest tile
# reads. Source: 343 products of one H200 (examples/profiles/h200x4.json), described within 2.8 % with any loss from
# 0.05 to 0.15.
TILE_LOSS = 0.1
TILES = tuple(
    (rows, columns, 1.0 - TILE_LOSS * (256.0 / rows + 256.0 / columns - 3.0))
    for rows, columns in (
        (128.0, 256.0),
        (256.0, 128.0),
        (128.0, 128.0),
        (64.0, 256.0),
        (256.0, 64.0),
        (64.0, 128.0),
        (128.0, 64.0),
        (64.0, 64.0),
    )
)
# Without tensor cores an operand is reused more often before it is loaded again. Source: assumed.
SIMT_TILES = ((256.0, 128.0, 1.0), (128.0, 256.0, 1.0), (128.0, 128.0, 1.0), (64.0, 256.0, 0.95), (64.0, 64.0, 0.85))
SIMT_RAMP_K = 32.0  # elements along k: four loads of eight elements each are in flight before the first product
# A product with few tiles can be split along k and the partial results added; each halving costs 7 %. Source: the same
# products, which 4 to 7 % describe equally well.
SPLITS = ((1.0, 1.0), (2.0, 0.93), (4.0, 0.86))
# Queries times heads in the benchmarks behind the attention curves: 16k tokens with 16 heads of 128 (arXiv 2307.08691,
# section 4.1; 2407.08608, section 4.1). The curves include the partial last wave of such a grid.
FULL_GRID = 262144.0
# A kernel for the products of all experts divides the rows of each expert into tiles of this many rows (two of 128 in a
# cluster). A router's rows end anywhere within a tile, so half a tile is wasted for each expert. Source: torch's
# grouped_mm on H100, 5 shapes of 8 to 128 experts with 256 to 4096 rows each (examples/validation/grouped_products.md).
GROUPED_TILE = 256.0
# Fast tensor-core kernels load 16-bit operands 16 bytes at a time (NVIDIA Deep Learning Performance Guide, matrix
# multiplication, "Tensor Core Requirements"), so every matrix of a batch must be aligned to 16 bytes; with a head width
# of 150 they are not. The rate of the kernels that run instead, over that of large products. Source: fitted to nine
# runs on A100 with a head width of 150, whose errors are then like those of other runs of their source; so are those of
# two runs with a width of 108, which were not fitted (examples/validation/published.md, BigScience). Others assumed
# alike.
ALIGNED = 8.0
UNALIGNED = 0.045
# Clipping and updating one parameter: the bytes counted for it in float32, which move at the memory's listed rate, and
# the seconds of one SM for its arithmetic, which add to them. Source: `multi_tensor_apply` in steps, the middle of 136
# runs on H200 in float32 and of 69 in 16 bits, 11.4 and 7.3 ps, and of some on H100, 15.0 and 9.0 ps; this gives 11.4,
# 7.3, 15.0 and 9.1 (examples/validation/fresh.jsonl, draws 1 to 33). Other GPUs assumed alike.
UPDATE_BYTES = 40.0
UPDATE_SM_S = 4.1e-10
# Kernels of FSDP's copies, as they are measured: shards cast and packed for a gather, parameters unpacked from it,
# gradients packed for a reduction.
PACKING = GATHER_PACK, GATHER_UNPACK, REDUCE_PACK = "gather_pack", "gather_unpack", "reduce_pack"
# Sources of a kernel's time, best first.
MEASURED, FITTED, DATASHEET = 0.0, 1.0, 2.0


def matmul_utilization(
    tiles: Sequence[tuple[float, float, float]],
    m: Floats | float,
    n: Floats | float,
    k: Floats | float,
    batch: Floats | float,
    *,
    sms: float,
    ramp_k: float,
    wave_floor: float = 0.0,
) -> Floats:
    """Return the share of the arithmetic rate that the best of `tiles` reaches, split along k or not.

    Partial tiles waste arithmetic, the last wave leaves SMs idle (at most 1 - `wave_floor` of several waves), and a
    tile reaches half the rate at k = `ramp_k`.
    """
    # All tiles in one array operation: with few products a loop over them takes most of the time. With many products,
    # including the splits as well would be three times slower, since the arrays exceed the cache.
    ones = (1,) * np.broadcast(m, n, k, batch).ndim
    rows, columns, rate = np.array(tiles).T.reshape(3, -1, *ones)
    across = np.ceil(m / rows) * np.ceil(n / columns) * batch
    used = (m * n * batch) / (across * rows * columns)
    best: Floats = np.zeros(1)
    for pieces, cost in SPLITS:
        waves = across * pieces / sms
        filled = waves / np.ceil(waves)
        if wave_floor:
            filled = np.maximum(filled, np.where(waves > 1, wave_floor, 0.0))
        depth = k / pieces
        best = np.maximum(best, used * filled * rate * cost * depth / (depth + ramp_k))
    return np.atleast_1d(best.max(axis=0))


def unaligned(work: Work) -> NDArray[np.bool_]:
    """Return whether the matrices of a batch are not aligned to 16 bytes, since their width is no multiple of 8
    elements.

    The matrices of experts are aligned, since each begins with a whole row.
    """
    ends = (np.asarray(work.k) % ALIGNED > 0) | (np.asarray(work.n) % ALIGNED > 0)
    return np.asarray((np.asarray(work.batch) > 1) & (np.asarray(work.grouped_rows) == 0) & ends)


def grouped_tile_factor(work: Work) -> Floats | float:
    """Return the time of grouped products over that of as many products of one size; 1 for all other work."""
    if not np.any(work.grouped_rows):
        return 1.0
    return np.asarray(1.0 + GROUPED_TILE / 2 / np.maximum(work.grouped_rows, GROUPED_TILE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """One of FSDP's copies of a module of `module_bytes` as products read it. `widened_bytes` are moved for each
    element that is cast to a wider type, one at a time; 0 where none is.
    """

    kernel: str
    module_bytes: Floats | float
    widened_bytes: Floats | float = 0.0


class MeasuredKernels(Protocol):
    """The interface of measurements, whose times a roofline prefers to the datasheet's."""

    def seconds(
        self, work: Work, datasheet: Callable[[], Floats], *, dtype: str, runtime: str
    ) -> tuple[Floats, Floats]:
        """Return (seconds, source) of a kernel, one value a row; `datasheet` returns its seconds from the datasheet."""
        ...

    def packing_factor(self, packing: Packing, usual: Floats | float) -> Floats:
        """Return the time of one of FSDP's copies over its counted time; `usual` where not measured."""
        ...

    def update_bytes_per_s(self, param_dtype: str) -> float | None:
        """Return the bytes/s of clipping and updating, in terms of the bytes counted for them; None where not
        measured.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Kernel times on one GPU model with one compute dtype and one attention kernel."""

    gpu: GpuKind
    dtype: str = "bfloat16"
    attention_kernel: str = "cudnn"
    window_kernel: str = ""  # kernel of layers with a sliding window, if it is another one
    windowed: float = 0.0  # share of attention's arithmetic in such layers
    measured: MeasuredKernels | None = None
    runtime: str = ""  # first name of the description that the operators are from
    low: Recipe | None = None  # recipe of products in a low type
    tf32: bool = False  # products round float32 operands to TF32
    kernel_factor: float = 1.0  # factor of kernel times inside a step, from runs of single layers
    layer_factor: float = 1.0  # further factor for kernels of layers, from runs with a second layer

    @property
    def peak_flops(self) -> float:
        """Dense datasheet rate of the compute dtype; products in float32 run without tensor cores, torch's default."""
        for dtype in (self.dtype, "bfloat16", "float16"):
            if self.gpu.peak_flops.get(dtype):
                return self.gpu.peak_flops[dtype]
        return max(self.gpu.peak_flops.values())

    @property
    def products_peak_flops(self) -> float:
        """Dense datasheet rate of the type that products compute in."""
        if self.low is not None:
            return low_peak_flops(self.gpu, self.low.dtype)
        return self.peak_flops if self.simt or not self.tf32 else self.gpu.peak_flops["tfloat32"]

    @property
    def low_rate(self) -> float:
        """The arithmetic rate of large products in the low type over that of 16 bits."""
        if self.low is None:
            return 1.0
        known = efficiency(self.gpu.architecture)
        burst = known.float4 if self.low.dtype == "float4" else known.float8
        relative = self.low.relative_rate(self.gpu.architecture)
        rate = burst * relative * self.products_peak_flops / (known.burst * self.peak_flops)
        found = self.gpu.achieved_flops.get(self.low.dtype, np.inf) * relative / self.sustained_flops
        return max(min(rate, found), 1.0)

    @property
    def sustained_flops(self) -> float:
        """The rate that a large matmul sustains in training: the peak reduced by power and heat, see
        efficiency.toml.
        """
        known = efficiency(self.gpu.architecture)
        if self.simt:
            return self.peak_flops * known.simt * known.sustained
        sustained = known.burst * known.sustained * self.power_supplied
        # TF32 reaches the 16-bit share of its peak: one such number takes as much power as two of 16 bits.
        return self.products_peak_flops * sustained if self.tf32 else self.peak_flops * sustained

    @property
    def simt(self) -> bool:
        """Whether products run without tensor cores: float32, which torch does not round to TF32 by default, or on
        GPUs that do not have it.
        """
        return self.dtype == "float32" and not (self.tf32 and self.gpu.peak_flops.get("tfloat32"))

    @property
    def power_supplied(self) -> float:
        """The sustained share of the peak over the reference GPU's share: lower with less power per rate; higher with
        more power, up to the largest product that a search found on this GPU, where one has been made.
        """
        known, found = efficiency(self.gpu.architecture), self.gpu.achieved_flops.get(self._half)
        return min(self._power, found / (known.burst * self._half_flops) if found else 1.0)

    @property
    def _half(self) -> str:
        """The 16-bit type of the tensor cores."""
        return "float16" if has_no_bfloat16(self.gpu) else "bfloat16"

    @property
    def _half_flops(self) -> float:
        return self.gpu.peak_flops.get(self._half, self.peak_flops)

    @property
    def rested(self) -> float:
        """The time of a product in a step whose other kernels leave it power, over its time among products alone."""
        return min(efficiency(self.gpu.architecture).rested * max(self.power_supplied, 1.0), 1.0)

    @property
    def _power(self) -> float:
        """The speed of tensor cores if only power limited it, over that of the reference GPU."""
        known = efficiency(self.gpu.architecture)
        watts = self.gpu.power_w or known.reference_w
        supply = (watts / self._half_flops) / (known.reference_w / known.reference_flops)
        return float(supply**known.power_exponent)

    @property
    def memory_bytes_per_s(self) -> float:
        return self.gpu.memory_bytes_per_s * efficiency(self.gpu.architecture).hbm

    @property
    def listed_bytes_per_s(self) -> float:
        """The rate of kernels that go through many tensors at once."""
        return self.memory_bytes_per_s * efficiency(self.gpu.architecture).updated

    @property
    def in_layers(self) -> Roofline:
        """The roofline for kernels of layers."""
        return (
            self
            if np.all(self.layer_factor == 1.0)
            else replace(self, kernel_factor=self.kernel_factor * self.layer_factor, layer_factor=1.0)
        )

    def seconds(self, work: Work) -> Floats:
        """Return the time of a compute kernel, from measurements where there are any; collectives are timed
        elsewhere.
        """
        return self.seconds_and_source(work)[0]

    def seconds_and_source(self, work: Work) -> tuple[Floats, Floats]:
        """Return (seconds, source) of a compute kernel; sources are MEASURED, FITTED, DATASHEET."""
        # Only products of equal size are measured and fitted, so grouped products have the source datasheet.
        own = self.in_one_kernel(work)
        if self.measured is None or work.low or own:
            factor = self.kernel_factor if self.measured is None or own else 1.0
            datasheet = np.atleast_1d(self._datasheet(work)) * factor
            waste = 1.0 if own else grouped_tile_factor(work)
            return datasheet * self._window_factor(work) * waste, np.full(datasheet.shape, DATASHEET)
        seconds, source = self.measured.seconds(
            work, lambda: np.atleast_1d(self._datasheet(work)), dtype=self._dtype_of(work), runtime=self.runtime
        )
        if np.any(work.grouped_rows):
            return seconds * self.kernel_factor * grouped_tile_factor(work), np.full(seconds.shape, DATASHEET)
        return seconds * self.kernel_factor * self._window_factor(work), source

    def in_one_kernel(self, work: Work) -> bool:
        """Return whether a kernel that is described multiplies all experts, with 16-bit operands."""
        described = efficiency(self.gpu.architecture).grouped is not None
        return bool(described and work.one_kernel and not work.low and np.any(work.grouped_rows))

    def _dtype_of(self, work: Work) -> str:
        """Return the type in which a kernel was measured."""
        return TF32 if self.tf32 and work.kind is WorkKind.MATMUL else self.dtype

    def packing_bytes_per_s(self, packing: Packing) -> Floats:
        """Return the bytes/s of one of FSDP's copies, in terms of the bytes counted for it."""
        known, rate = efficiency(self.gpu.architecture), self.memory_bytes_per_s
        usual: Floats | float = rate / self.listed_bytes_per_s
        if np.any(packing.widened_bytes):
            one_by_one = known.unit_s["packed"] * rate / self.gpu.sm_count
            usual = np.maximum(usual, one_by_one / np.where(packing.widened_bytes, packing.widened_bytes, np.inf))
        factor = self.measured.packing_factor(packing, usual) if self.measured is not None else usual
        return np.asarray(rate / (factor * self.kernel_factor))

    def update_bytes_per_s(self, param_dtype: str) -> float:
        """Return the bytes/s at which gradients are clipped and parameters of a type updated, in terms of the bytes
        counted.
        """
        rate = self.measured.update_bytes_per_s(param_dtype) if self.measured is not None else None
        if rate is not None:
            return rate
        moved = UPDATE_BYTES * DTYPE_BYTES[param_dtype] / DTYPE_BYTES["float32"]
        return UPDATE_BYTES / (moved / self.gpu.memory_bytes_per_s + UPDATE_SM_S / self.gpu.sm_count)

    def _datasheet(self, work: Work) -> Floats:
        if work.kind is WorkKind.MATMUL:
            return self._matmul(work)
        if work.kind is WorkKind.ATTENTION:
            return self._attention(work)
        known = efficiency(self.gpu.architecture)
        rate = self.memory_bytes_per_s * (known.scattered if work.scattered else 1.0)
        counted = sum((count * known.unit_s[kind] for kind, count in work.units.items()), 0.0) / self.gpu.sm_count
        return np.asarray(np.maximum(work.bytes / rate, counted) + known.kernel_s * work.launches)

    def _matmul(self, work: Work) -> Floats:
        known = efficiency(self.gpu.architecture)
        tiles, ramp_k = (SIMT_TILES, SIMT_RAMP_K) if self.simt else ((*TILES, *known.tiles), known.ramp_k)
        faster = self.low_rate if work.low else 1.0
        # Filling the pipeline takes the same time, in which a narrower type covers more of k.
        ramp_k = ramp_k * faster
        best = matmul_utilization(tiles, work.m, work.n, work.k, work.batch, sms=self.gpu.sm_count, ramp_k=ramp_k)
        if not self.simt:
            best = np.where(unaligned(work), np.minimum(best, UNALIGNED), best)
        arithmetic = work.flops / (self.sustained_flops * faster * best)
        if known.grouped is not None and self.in_one_kernel(work):
            arithmetic = arithmetic * known.grouped.factor(work)
        rate = self.memory_bytes_per_s
        # What is stored is read when the sums of a tile are complete, and written alongside the next tile.
        added = np.asarray(work.added_bytes) / rate
        return np.maximum(arithmetic, work.bytes / rate + added) + known.accumulated * added + known.kernel_s

    def _window_factor(self, work: Work) -> Floats | float:
        """Return the time of attention over its time if all layers used `attention_kernel`; layers with windows may
        have another.
        """
        if work.kind is not WorkKind.ATTENTION or not self.windowed or not self.window_kernel:
            return 1.0
        slower = self._attention_fraction(work, self.attention_kernel) / self._attention_fraction(
            work, self.window_kernel
        )
        return np.asarray(1.0 + self.windowed * (slower - 1.0))

    def _attention_fraction(self, work: Work, kernel: str) -> Floats:
        """Return the fraction of the peak that an attention kernel reaches on a full grid.

        Of keys that come from several ranks a kernel sees those of one: of W ranks' work 1/W is causal over a W-th of
        the sequence, and takes 1 + W `ramp_s` / n of what it would without a ramp; the others have no diagonal, and
        take 1 + `ramp_s` / n like a causal kernel over the whole.
        """
        curves = efficiency(self.gpu.architecture).attention
        curve = curves.get(kernel) or curves["flash2"]
        fraction = curve.backward if work.backward else curve.forward
        ramp_s = (curve.ramp_backward_s or curve.ramp_s) if work.backward else curve.ramp_s
        keys = np.asarray(work.n) / (2.0 - 1.0 / np.asarray(work.parts))
        return np.asarray(fraction * curve.of_width(work.k) * keys / (keys + ramp_s))

    def _attention(self, work: Work) -> Floats:
        known = efficiency(self.gpu.architecture)
        curve = known.attention.get(self.attention_kernel) or known.attention["flash2"]
        reached = self._attention_fraction(work, self.attention_kernel)
        if not work.backward:
            # The time of all tiles on all SMs, plus the longest tile on one SM: twice the mean, since causal tiles grow
            # up to the whole row.
            tail = 2 * curve.rows * self.gpu.sm_count
            reached = reached * np.minimum((1 + tail / FULL_GRID) / (1 + tail / (work.batch * work.m)), 1.0)
        arithmetic = work.flops / (self.peak_flops * self.power_supplied * reached)
        return np.maximum(arithmetic, work.bytes / self.memory_bytes_per_s) + known.kernel_s * work.launches
