"""Times of a tensor-parallel product and its collective in each overlap mode of the executor, from the times of their
parts alone.

    nccl            collective and product, one after the other
    chunked         `SLICES` slices of every shard by NCCL, each alongside one batched product of another slice
    copy_engine     pushes of whole shards, the library's product per shard; a reduce-scatter adds up in a pass at the
                    end, or, for large shards, during its products: partial sums travel round the ring in halves
    fused           one kernel, tiles in the order in which pieces arrive; a reduce-scatter adds in the last tiles

All are pipelines of two stages, moving and multiplying, with equal steps. In such a pipeline the slower stage decides,
so each formula is the largest of two or three sums. Parts are numbers or columns of a plan table: the analytical model
and the simulation share every line here. Times of device and host are separate, and the longer decides; for small
shapes that is the host.

`OverlapRates` has few rates, physical and the same for all shapes; `simulator.fitting.overlap_fit` fits them to
measured times.

The idea of following arrivals is FlashOverlap's (EuroSys 2026: a bandwidth curve and waves of tiles); when hiding is
possible at all, ParallelKittens' K >= s·R/(2·B) (arXiv 2511.13940, section 3) falls out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from simulator.collectives.pushed import COPY_SLOWDOWN
from simulator.config.overlap_sites import MODES, USERBUFFERS, executor_name

Value = Any  # a float, or a column (numpy array) of them

GATHER = "all_gather_matmul"
SCATTER = "matmul_reduce_scatter"
OPERATIONS = (GATHER, SCATTER)
EXECUTED = tuple(executor_name(mode) for mode in MODES)
# How the executor divides its work; executor.overlap imports these.
SLICES = 4  # slices of a shard in `chunked`
LARGE_BYTES = 2**24  # larger shards are pushed in two pieces: the second launch costs less than it hides
BAND_ROWS = 1024  # rows that the fused scatter finishes before it pushes them: eight tiles of 128
MOST_BANDS = 8
TILE_ROWS, TILE_COLUMNS = 128, (256, 128)  # of the fused kernels
# Time of a large tile over that of two small ones: it loads three quarters of the bytes. Measured, two H200:
# 1427 and 1528 us at 16384 x 3584 x 8192 (examples/validation/overlap_2xH200.md).
LARGE_OVER_SMALL = 0.93
# The host's work for one call, in units of a call of torch (a launch, a copy, an event or a collective from Python): a
# constant, and an amount for every other rank. Our own pushes call the driver and count a third. Counted in
# executor/overlap, checked with the smallest products on two H200, where a call in a row takes 82, 108, 67 and 74 us in
# turn for copy_engine and fused (examples/validation/overlap_2xH200.json); `host_s` is the time of one.
HOST_CALLS = {
    (GATHER, "nccl"): (4, 0),
    (SCATTER, "nccl"): (4, 0),
    (GATHER, "chunked"): (1 + 3 * SLICES, 0),
    (SCATTER, "chunked"): (2 + 3 * SLICES, 0),
    (GATHER, "copy_engine"): (2.5, 1),
    (SCATTER, "copy_engine"): (3, 1.5),
    (GATHER, "fused"): (2, 0.4),
    (SCATTER, "fused"): (2.2, 0.6),
    (GATHER, USERBUFFERS): (2, 0.4),  # launches and copies are issued from C++, as our pushes are
    (SCATTER, USERBUFFERS): (2, 0.4),
}
# chunked has many NCCL calls: those for every further product of an operation (queries, keys and values; gate and up),
# of which each slice is multiplied by every matrix, 0.6 as torch.mm and a slice of its result take 15 us where a call
# takes 24; and the host's time within a layer over that in a row of its own kind, on a CPU 1.6 and on two H200 1.5
# (tests/bench/host_cost.py; examples/profiles/hosts.md). Other modes take no more there.
FURTHER_CALLS = {"chunked": 0.6 * SLICES}
IN_LAYERS = {"chunked": 1.6}
REGATHER_CALLS = {"chunked": (2, 0), "nccl": (2, 0)}  # others as below
REGATHER_PUSHED = (1.5, 0.7)
# Largest bytes of W + 1 shards that copy_engine adds up at the end; it relays larger ones. On two H200 the two ways
# were equally fast at 3 x 67 MB, the relay slower at 3 x 34 MB (249 and 189 us at 8192 x 4096 x 1024;
# examples/validation/overlap_2xH200.md).
LARGEST_ADDED_BYTES = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One operation's product and collective, each alone; numbers or columns. A shard is what a rank sends to each
    other rank.

    Several products may share a gather, or add up before a scatter: times are of all of them together, `first_s` is
    that of the first (0: there is only one). `queued_s` is how long the moving stream is still busy when the operation
    begins.
    """

    ranks: Value
    shard_bytes: Value
    shard_rows: Value
    product_s: Value
    """All rows at once, by the library."""
    shard_product_s: Value
    """The rows of one shard."""
    streamed_product_s: Value = 0.0
    """The rows of one shard while those of others are multiplied on further streams; 0: no mode asks for it."""
    slice_product_s: Value
    """The rows of one slice of every shard, as one batched product of `ranks` matrices."""
    collective_s: Value
    slice_collective_s: Value
    """The collective on the bytes of a slice."""
    copy_s: Value
    """One shard by a copy engine at its full rate."""
    stream_s: Value
    """Reading or writing a shard once in memory."""
    products: Value = 1
    first_s: Value = 0.0
    rounds: Value = 1.0
    """Whole rounds of the fused kernel's tiles over those that its work would fill; see `rounds_of`."""
    queued_s: Value = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRates:
    """What the modes add to their parts, the same for every shape. Ratios are relative to the parts, so that they apply
    to other machines. Defaults: fitted to two and four H200 (`examples/profiles/h200x4.json`), assumed elsewhere.

    `issue` has measured factors, by `operation mode`, on the host's seconds that `HOST_CALLS` gives.
    """

    copy_latency_s: float = 1.7e-5
    """Seconds of a push beyond bytes over rate: the engine's start and the flag behind it."""
    signal_s: float = 6e-6
    """Seconds until a waiting stream or kernel sees a flag, or for a barrier of all ranks."""
    cold: float = 1.04
    """Factor of a product that follows a collective, over one that follows a product: caches and clocks differ."""
    gap_s: float = 8.5e-6
    """Seconds to change from NCCL's stream to the product's and back."""
    step_gap_s: float = 1.3e-5
    """The same for each of many steps, in which collectives and products wait for each other kernel by kernel."""
    product_slowdown: float = COPY_SLOWDOWN
    """Seconds that the library's products lose for each second of concurrent copies: memory and power are shared."""
    fused_product_slowdown: float = 0.02
    """The same for the fused kernel."""
    late_product_slowdown: float = 1.0
    """The same for an NCCL collective that started first and holds its SMs."""
    early_product_slowdown: float = 0.42
    """The same where the product started first: the collective gets the SMs that its tiles leave."""
    collective_slowdown: float = 0.49
    """Seconds that such a collective loses for each second of a concurrent product."""
    fused_ratio: float = 0.96
    """Time of the fused kernel's product alone over the library's, both in whole rounds of tiles."""
    fused_rounds: float = 0.98
    """By how much less the library's product loses in its last round, as a share of what the fused kernel leaves idle:
    it has more tile shapes.
    """
    fused_tail_s: float = 1.1e-5
    """Seconds to launch the fused kernel with its copies, and idle time in its last wave."""
    fused_sums: float = 1.3
    """How often the fused scatter's last tiles read what arrived, at memory rate: too few tiles to hide their loads."""
    host_s: float = 2.4e-5
    """Seconds of one call of the host. An operation issued more slowly than it runs takes as long as issuing it."""
    issue: Mapping[str, float] = field(default_factory=dict)


def mode_s(mode: str, operation: str, parts: Parts, rates: OverlapRates) -> Value:
    """Return the seconds of an operation (GATHER or SCATTER) in a mode, in a series of calls: the longer of device and
    host.

    Raises ValueError for a mode or an operation that does not exist.
    """
    issued_s = issue_s(mode, operation, parts.ranks, rates, products=parts.products)
    return np.maximum(device_s(mode, operation, parts, rates), issued_s)


def issue_s(
    mode: str, operation: str, ranks: Value, rates: OverlapRates, *, products: Value = 1, regathers: bool = False
) -> Value:
    """Return the host's seconds to issue an operation of so many products; `regathers`: with a gather issued before it.

    Raises ValueError as `mode_s` does.
    """
    _known(mode, operation)
    always, each = HOST_CALLS[operation, mode]
    further = np.maximum(products - 1, 0) * FURTHER_CALLS.get(mode, 0.0)
    seconds = rates.issue.get(f"{operation} {mode}", 1.0) * rates.host_s * (always + each * (ranks - 1) + further)
    if regathers:
        always, each = REGATHER_CALLS.get(mode, REGATHER_PUSHED)
        seconds = seconds + rates.host_s * (always + each * (ranks - 1))
    return seconds


def device_s(mode: str, operation: str, parts: Parts, rates: OverlapRates) -> Value:
    """Return the device seconds of an operation in a mode. Raises ValueError as `mode_s` does."""
    _known(mode, operation)
    if mode == "nccl":
        together = parts.queued_s + parts.collective_s + rates.cold * parts.product_s + rates.gap_s
    elif mode == "chunked":
        together = _chunked_s(operation, parts, rates)
    elif mode == "copy_engine":
        together = _copy_engine_s(operation, parts, rates)
    elif mode == USERBUFFERS:
        together = _copy_engine_s(operation, replace(parts, shard_product_s=parts.streamed_product_s), rates)
    else:
        together = _fused_s(operation, parts, rates)
    return np.where(parts.ranks > 1, together, parts.product_s)


def _rounds(rows: Value, columns: Value, processors: float) -> tuple[Value, Value]:
    """Return the number of rounds that an output takes in large tiles and in small ones."""
    high = np.ceil(rows / TILE_ROWS)
    large, small = (np.ceil(high * np.ceil(columns / width) / processors) for width in TILE_COLUMNS)
    return large, small


def takes_large_tiles(rows: Value, columns: Value, processors: float) -> Value:
    """Return whether an output takes less time in whole rounds of large tiles than of small ones."""
    large, small = _rounds(rows, columns, processors)
    return 2 * LARGE_OVER_SMALL * large <= small


def rounds_of(rows: Value, columns: Value, processors: float) -> Value:
    """Return the rounds over all SMs that the fused kernel takes for an output, over those that its area would fill.

    Large tiles, or small ones of half the width where those need less.
    """
    large, small = _rounds(rows, columns, processors)
    taken = np.where(takes_large_tiles(rows, columns, processors), large, small / (2 * LARGE_OVER_SMALL))
    return taken * processors / (rows / TILE_ROWS * columns / TILE_COLUMNS[0])


def relayed(ranks: Value, shard_bytes: Value) -> Value:
    """Return whether the executor's copy_engine scatter relays partial sums instead of adding them up at the end."""
    return (ranks + 1) * shard_bytes >= LARGEST_ADDED_BYTES


def push_s(parts: Parts, rates: OverlapRates, pieces: Value = 1) -> Value:
    """Return the seconds to push one of `pieces` of a shard by copy engine and raise its flag."""
    return rates.copy_latency_s + parts.copy_s / pieces


def _known(mode: str, operation: str) -> None:
    if operation not in OPERATIONS:
        raise ValueError(f"there is no operation {operation}")
    if mode not in (*EXECUTED, USERBUFFERS):
        raise ValueError(f"there is no overlap mode {mode}")


def _piped_s(first: Value, then: Value, steps: Value, ready: Value = 0.0) -> Value:
    """Return the end of `steps` steps through two stages, the second of which is busy until `ready`."""
    return np.maximum(np.maximum(first, ready) + steps * then, steps * first + then)


def _chunked_s(operation: str, parts: Parts, rates: OverlapRates) -> Value:
    """NCCL and the product slow each other down while both run."""
    move, piece = parts.slice_collective_s, parts.slice_product_s
    both = np.minimum(move, piece)
    slowdown = rates.late_product_slowdown if operation == GATHER else rates.early_product_slowdown
    slow_move, slow_piece = move + rates.collective_slowdown * both, piece + slowdown * both
    # The first (or last) slice moves while nothing is multiplied, and the last (or first) is multiplied while nothing
    # moves.
    alone = (slow_move - move) + (slow_piece - piece)
    gaps = SLICES * rates.step_gap_s
    if operation == GATHER:
        return _piped_s(slow_move, slow_piece, SLICES) - alone + gaps
    return _piped_s(slow_piece, slow_move, SLICES, parts.queued_s) - alone + gaps


def _copy_engine_s(operation: str, parts: Parts, rates: OverlapRates) -> Value:
    others, push = parts.ranks - 1, push_s(parts, rates)
    copied = np.minimum(others * parts.copy_s, parts.ranks * parts.shard_product_s)
    piece = parts.shard_product_s + rates.product_slowdown * copied / parts.ranks
    if operation == GATHER:
        # Each shard is multiplied when its flag is seen; the rank's own shard first.
        waited = np.maximum(push + others * piece, others * push + piece)
        return np.maximum(parts.ranks * piece, waited) + others * rates.signal_s
    sent = _piped_s(piece, push, others, parts.queued_s)
    at_the_end = np.maximum(parts.ranks * piece, sent) + rates.signal_s + (parts.ranks + 1) * parts.stream_s
    # A half is added to what has arrived, and is received and sent while the other half is computed.
    half, leave = (piece + parts.stream_s) / 2, push_s(parts, rates, 2)
    step = np.maximum(2 * half, np.maximum(half + leave + rates.signal_s, 2 * leave))
    round_about = np.maximum(half, parts.queued_s) + half + others * step
    return np.where(relayed(parts.ranks, parts.shard_bytes), round_about, at_the_end)


def _fused_s(operation: str, parts: Parts, rates: OverlapRates) -> Value:
    """With several products, a gather is fused with the first and the others find everything in place; a scatter is
    fused with one only.
    """
    if operation == SCATTER:
        bands = np.clip(np.ceil(parts.shard_rows / BAND_ROWS), 1, MOST_BANDS)
        fused = _fused_product_s(parts, parts.product_s, bands, rates, scatter=True)
        fused = fused + rates.fused_sums * (parts.ranks + 1) * parts.stream_s
        return np.where(parts.products > 1, _copy_engine_s(operation, parts, rates), fused)
    first = np.where(parts.products > 1, parts.first_s, parts.product_s)
    pieces = np.where(parts.shard_bytes >= LARGE_BYTES, 2, 1)
    return _fused_product_s(parts, first, pieces, rates, scatter=False) + parts.product_s - first


def _fused_product_s(parts: Parts, product_s: Value, pieces: Value, rates: OverlapRates, *, scatter: bool) -> Value:
    """Return the seconds of one product whose tiles wait for (or release) `pieces` of every other rank's shard."""
    steps, push = (parts.ranks - 1) * pieces, push_s(parts, rates, pieces)
    alone = rates.fused_ratio * product_s * np.maximum(rates.fused_rounds * parts.rounds, 1.0)
    slowed = alone + rates.fused_product_slowdown * np.minimum((parts.ranks - 1) * parts.copy_s, alone)
    piece = slowed / (parts.ranks * pieces)
    moving = _piped_s(piece, push, steps, parts.queued_s) if scatter else _piped_s(push, piece, steps)
    return np.maximum(slowed, moving + rates.signal_s) + rates.fused_tail_s
