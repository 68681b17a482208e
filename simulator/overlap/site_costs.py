"""Costs of a plan's sites with an overlap mode of the executor: each collective with the products that it is paired
with.

Forward and backward alike: the products of a gather are those that read what it gathers, the products of a scatter
those whose results add up to what it scatters; weight gradients are not part of a pair, as in
executor/overlap/autograd.py. Backward the executor gathers a site's tokens again for the weight gradients, on the same
stream and before it scatters.

`SiteRates` prices a pair; `simulator.passes.pairing` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np

from simulator.collectives.group_times import GroupTimes
from simulator.config.overlap_sites import EXECUTOR_NAMES, MODES, USERBUFFERS
from simulator.kernels.operators import Work
from simulator.kernels.roofline import Roofline
from simulator.overlap.modes import (
    GATHER,
    IN_LAYERS,
    SCATTER,
    SLICES,
    OverlapRates,
    Parts,
    Value,
    device_s,
    issue_s,
    rounds_of,
)
from topology.units import GIB

OWN_MODES = tuple(mode for mode in MODES if mode not in EXECUTOR_NAMES)  # modes of our executor
SITE_MODES = (*OWN_MODES, USERBUFFERS)  # mode words of plans that pair a site's products with its collective
PUSHED_MODES = ("copy_engine", "fused", USERBUFFERS)  # modes with buffers that peers write to
OPERATION = {"all_gather": GATHER, "reduce_scatter": SCATTER}
LARGE_COPY_BYTES = GIB  # size for a copy engine's rate: large enough to hide latency

# Key of a measured time: operation, mode, ranks, rows of tokens, total bytes moved, weight elements, products.
Shape = tuple[str, str, int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRates:
    """The rates of the modes, measured device seconds by shape, and their source."""

    rates: OverlapRates = field(default_factory=OverlapRates)
    measured: Mapping[Shape, float] = field(default_factory=dict)
    source: str = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The products of one pair, numbers or columns: seconds of all rows, of a shard and of a slice, the host's
    launches, and sizes.

    `streamed_s` is the time of one shard when several run on `STREAMS` streams at once.

    `first_s` is the first product's time on all rows, `first_columns` its width; `elements` counts weight elements;
    `count` 0 means no product. `weight_s` is the time of weight gradients, which belong to the pair in `userbuffers`
    only.
    """

    seconds: Value = 0.0
    shard_s: Value = 0.0
    streamed_s: Value = 0.0
    slice_s: Value = 0.0
    issued_s: Value = 0.0
    first_s: Value = 0.0
    count: Value = 0.0
    rows: Value = 0.0
    elements: Value = 0.0
    first_columns: Value = 0.0
    weight_s: Value = 0.0

    def merged(self, other: Products) -> Products:
        """Return these products followed by others."""
        return Products(
            seconds=self.seconds + other.seconds,
            shard_s=self.shard_s + other.shard_s,
            streamed_s=self.streamed_s + other.streamed_s,
            slice_s=self.slice_s + other.slice_s,
            issued_s=self.issued_s + other.issued_s,
            first_s=np.where(self.count == 0, other.first_s, self.first_s),
            count=self.count + other.count,
            rows=np.maximum(self.rows, other.rows),
            elements=self.elements + other.elements,
            first_columns=np.where(self.count == 0, other.first_columns, self.first_columns),
            weight_s=self.weight_s + other.weight_s,
        )

    def only(self, rows: Value) -> Products:
        """Return the products in `rows`, and none elsewhere."""
        return Products(**{name: np.where(rows, getattr(self, name), 0.0) for name in Products.__dataclass_fields__})


def product_of(work: Work, seconds: Value, issued_s: Value, ranks: Value, roofline: Roofline) -> Products:
    """Return a product with the times of its pieces. A piece takes at least its share of the whole, since clocks are
    those of the whole.
    """
    shard = replace(work, flops=work.flops / ranks, bytes=_bytes(work, work.m / ranks), m=work.m / ranks)
    at_once = np.minimum(ranks, STREAMS)
    several = replace(shard, flops=at_once * shard.flops, bytes=at_once * shard.bytes, batch=at_once * work.batch)
    rows = work.m / ranks / SLICES
    cut = replace(work, flops=work.flops / SLICES, bytes=ranks * _bytes(work, rows), m=rows, batch=work.batch * ranks)
    return Products(
        seconds=seconds,
        shard_s=np.maximum(roofline.seconds(shard), seconds / ranks),
        streamed_s=np.maximum(roofline.seconds(several) / at_once, seconds / ranks),
        slice_s=np.maximum(roofline.seconds(cut), seconds / SLICES),
        issued_s=issued_s,
        first_s=seconds,
        count=1.0,
        rows=work.m,
        elements=work.n * work.k,
        first_columns=work.n,
    )


def _bytes(work: Work, rows: Value) -> Value:
    """Return the bytes that a product of `rows` rows reads and writes."""
    per = work.bytes / (work.m * work.k + work.k * work.n + work.m * work.n)
    return per * (rows * work.k + work.k * work.n + rows * work.n)


def parts_of(
    op: str, products: Products, whole_s: Value, nbytes: Value, groups: GroupTimes, roofline: Roofline, ranks: Value
) -> Parts:
    """Return the parts of a collective (`op`, `nbytes` in total, over tensor-parallel ranks) and its products."""
    shard = nbytes / ranks
    return Parts(
        ranks=ranks,
        shard_bytes=shard,
        shard_rows=products.rows / ranks,
        product_s=products.seconds,
        shard_product_s=products.shard_s,
        streamed_product_s=products.streamed_s,
        slice_product_s=products.slice_s,
        collective_s=whole_s,
        slice_collective_s=groups.time_s(op, "tp", nbytes / SLICES),
        copy_s=shard * copy_s_per_byte(groups),
        stream_s=shard / roofline.memory_bytes_per_s,
        products=products.count,
        first_s=products.first_s,
        rounds=rounds_of(
            np.maximum(products.rows, 1.0), np.maximum(products.first_columns, 1.0), roofline.gpu.sm_count
        ),
    )


def copy_s_per_byte(groups: GroupTimes) -> Value:
    """Return the seconds per byte of a copy to a peer; by NCCL where no copy engine reaches it over NVLink."""
    pushed_s = groups.time_s("send_recv", "tp_pair", LARGE_COPY_BYTES, algorithm="copy_engine")
    copied_s = np.where(np.isfinite(pushed_s), pushed_s, groups.time_s("send_recv", "tp_pair", LARGE_COPY_BYTES))
    return np.asarray(copied_s / LARGE_COPY_BYTES)


def pair_s(mode: str, op: str, parts: Parts, products: Products, *, regathers: bool, site: SiteRates) -> Value:
    """Return the device seconds of a pair, never less than its products alone. A measured shape has its measured time.

    `regathers`: with a gather before it on the moving stream, as for a backward scatter, whose time was not measured.
    """
    operation = OPERATION[op]
    if regathers:
        queued = parts.collective_s
        if mode == USERBUFFERS:
            return bulk_s(parts, products.weight_s, site.rates)
        if mode in PUSHED_MODES:
            queued = (parts.ranks - 1) * (site.rates.copy_latency_s + parts.copy_s)
        return np.maximum(device_s(mode, operation, replace(parts, queued_s=queued), site.rates), parts.product_s)
    seconds = device_s(mode, operation, parts, site.rates)
    own = (parts.ranks, products.rows, parts.shard_bytes * parts.ranks, products.elements, products.count)
    for (of, by, *sizes), measured_s in site.measured.items():
        if (of, by) == (operation, mode):
            same = reduce(np.logical_and, (np.equal(mine, theirs) for mine, theirs in zip(own, sizes, strict=True)))
            seconds = np.where(same, measured_s, seconds)
    return np.maximum(seconds, parts.product_s)


def pair_issue_s(mode: str, op: str, parts: Parts, *, regathers: bool, site: SiteRates) -> Value:
    """Return the host's seconds for a pair; they replace those of its collective and its products."""
    operation, products = OPERATION[op], parts.products
    issued_s = issue_s(mode, operation, parts.ranks, site.rates, products=products, regathers=regathers)
    return IN_LAYERS.get(mode, 1.0) * issued_s


# Transformer Engine's userbuffers: tensor-parallel traffic hidden behind products, as Megatron-Core runs it
# (--tp-comm-overlap).
#
# Forward, and for the gradients that come into a row-parallel layer, shards travel round a ring and products are
# divided into one piece per shard: the pipeline of `copy_engine` (`simulator.overlap.modes`). The backward pass of a
# column-parallel layer works in bulk: tokens are gathered again for the weight gradient while the input gradient is
# computed, and that gradient is scattered while the weight gradient is computed. Nothing is divided there.
#
# Source: transformer_engine/pytorch/module/base.py (initialize_ub: methods `ring_exchange` and `bulk` by name of
# product), and NVIDIA's own settings (megatron.bridge.training.comm_overlap: RingExchangeOverlapCfg for qkv_fprop,
# fc1_fprop, proj_dgrad, fc2_dgrad; BulkOverlapCfg for qkv_dgrad, qkv_wgrad, fc1_dgrad, fc1_wgrad). On Hopper proj_fprop
# and fc2_fprop are set to four slices on a few SMs instead of a ring; both hide all but the last piece, and have one
# formula here.


# Pieces are multiplied on this many streams in turn, so that a few small ones together fill the GPU
# (transformer_engine/common/include/transformer_engine/comm_gemm_overlap.h: NVTE_COMM_OVERLAP_MAX_STREAMS).
STREAMS = 3


def bulk_s(parts: Parts, weight_s: Value, rates: OverlapRates) -> Value:
    """Return the seconds of a backward pair without its weight gradients (`weight_s`): the gather runs with the input
    gradient, the scatter with the weight gradient.

    The few SMs that move bytes, and the memory traffic, slow a product down as copies do.
    """
    moving = parts.collective_s + rates.signal_s
    exposed = np.maximum(moving - parts.product_s, 0.0) + np.maximum(moving - weight_s, 0.0)
    hidden = np.minimum(moving, parts.product_s) + np.minimum(moving, weight_s)
    return parts.product_s + exposed + rates.product_slowdown * hidden
