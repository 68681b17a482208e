"""What a tensor-parallel product takes in each mode of the executor, from what its parts take alone; and which to choose.

The parts: the product of so many rows (cuBLAS), the collective at once (NCCL), a copy engine's push of a shard, a signal.
From these every mode follows by its own schedule, walked through piece by piece:

    nccl            collective and product, one after the other
    chunked         `PIECES` pieces of every shard by NCCL, each beside the product of another
    ring            W - 1 hops to the neighbour, each beside the product of the shard at hand
    copy_engine     pushes of whole shards, cuBLAS per shard; a reduce-scatter adds up in a pass at the end
    fused           one kernel, tiles in the order in which pieces arrive; a reduce-scatter adds in the last tiles
    torch_symm_mem  as copy_engine, from a copy in symmetric memory and with a barrier before every shard
    one_shot, two_shot   all-reduce of a small tensor in one or two exchanges
    multimem        one_shot in the switch: modelled only, the executor refuses it (NVLink multicast stays off)

`OverlapRates` are few and physical, and the same for all shapes; `fit_rates` finds them from measured times. Where the very
shape was measured, `choose` believes the measurement.

The idea of walking through arrivals is FlashOverlap's (EuroSys 2026: a bandwidth curve and waves of tiles); when
hiding is possible at all, ParallelKittens' K >= s·R/(2·B) (arXiv 2511.13940, section 3) falls out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

GATHER = "all_gather_matmul"
SCATTER = "matmul_reduce_scatter"
EXECUTED = ("nccl", "chunked", "ring", "copy_engine", "fused", "torch_symm_mem")
PIECES = 4  # of a shard in `chunked`, as the executor cuts it
FUSED_PIECES = 2  # of a shard that is pushed beside the fused kernel
# What the host issues in a call: always, and for every other rank. A launch, a copy, a flag, an event and a collective
# count one each; autograd and views are in the first number of the modes that need them.
HOST_CALLS = {
    "nccl": (4, 0),
    "chunked": (2 + 3 * PIECES, 0),
    "ring": (2, 5),
    "copy_engine": (9, 2),
    "fused": (9, 1),
    "torch_symm_mem": (9, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One product and its collective, each alone. `moved_bytes` is a rank's shard: what goes to each other rank."""

    ranks: int
    moved_bytes: float
    product_s: Callable[[float], float]
    """Seconds of the product of a fraction (0 to 1] of the rows, by the library."""
    collective_s: Callable[[float], float]
    """Seconds of NCCL's collective on a fraction of the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRates:
    """What the modes add, the same for every shape. Defaults: `SOURCE`."""

    copy_bytes_per_s: float = 385e9
    copy_latency_s: float = 8e-6
    signal_s: float = 6e-6
    """A flag raised by a copy and seen by a kernel that waits, or a barrier of all ranks."""
    hop_s: float = 25e-6
    """Launch of NCCL's send and receive of one hop."""
    hop_bytes_per_s: float = 250e9
    """Rate of such a hop, which all ranks make at once."""
    beside: float = 0.1
    """Seconds that the library's products lose for each second of copies beside them: memory and power are shared."""
    fused_beside: float = 0.35
    """The same for the fused kernel, which also waits for the copies and adds what they bring."""
    collective_beside: float = 0.6
    """The same for a collective of NCCL, which takes multiprocessors as well."""
    fused_ratio: float = 1.03
    """The fused kernel's product alone over the library's."""
    fused_tail_s: float = 10e-6
    """Launch of the fused kernel with its copies, and what its last wave leaves idle."""
    host_s: float = 24e-6
    """One call of the host. What is issued more slowly than it runs takes as long as issuing it."""
    sum_bytes_per_s: float = 3.6e12
    """Memory rate of passes that copy or add."""


SOURCE = "assumed, from 4 H200: push 391 GB/s, barrier 4.7 us; recipes on 8 H100: fused_beside 0.35"


def mode_s(mode: str, operation: str, parts: Parts, rates: OverlapRates) -> float:
    """Return the seconds of an operation (GATHER or SCATTER) in a mode.

    Raises ValueError for a mode or an operation that does not exist.
    """
    if operation not in {GATHER, SCATTER}:
        raise ValueError(f"there is no operation {operation}")
    if mode not in HOST_CALLS:
        raise ValueError(f"there is no overlap mode {mode}")
    if parts.ranks == 1:
        return parts.product_s(1.0)
    always, each = HOST_CALLS[mode]
    return max(_device_s(mode, operation, parts, rates), rates.host_s * (always + each * (parts.ranks - 1)))


def _device_s(mode: str, operation: str, parts: Parts, rates: OverlapRates) -> float:
    whole, ranks = parts.product_s(1.0), parts.ranks
    if mode == "nccl":
        return parts.collective_s(1.0) + whole
    if mode == "chunked":
        return _chunked_s(parts, rates)
    if mode == "ring":
        piece, hop = parts.product_s(1 / ranks), rates.hop_s + parts.moved_bytes / rates.hop_bytes_per_s
        beside = rates.collective_beside * min(hop, piece)
        return piece + (ranks - 1) * (max(piece, hop) + beside)
    if mode == "copy_engine":
        return _copy_engine_s(operation, parts, rates, waits_s=0.0)
    if mode == "torch_symm_mem":
        copied_in = 2 * parts.moved_bytes / rates.sum_bytes_per_s if operation == GATHER else 0.0
        return copied_in + _copy_engine_s(operation, parts, rates, waits_s=2 * rates.signal_s)
    return _fused_s(operation, parts, rates)


def _chunked_s(parts: Parts, rates: OverlapRates) -> float:
    """Pieces in a row; the first (or last) moves alone, and a product beside a collective is slower."""
    move, piece = parts.collective_s(1 / PIECES), parts.product_s(1 / PIECES)
    slowed = piece + rates.collective_beside * min(move, piece)
    return move + (PIECES - 1) * max(move, slowed) + piece


def _push_s(parts: Parts, rates: OverlapRates, fraction: float = 1.0) -> float:
    return rates.copy_latency_s + fraction * parts.moved_bytes / rates.copy_bytes_per_s


def _slowed_s(product_s: float, copied_s: float, beside: float) -> float:
    """Return a product's seconds with copies beside it for at most `copied_s`."""
    return product_s + beside * min(copied_s, product_s)


def _copy_engine_s(operation: str, parts: Parts, rates: OverlapRates, *, waits_s: float) -> float:
    ranks, push = parts.ranks, _push_s(parts, rates) + waits_s
    copied = (ranks - 1) * (push - rates.copy_latency_s)
    piece = _slowed_s(ranks * parts.product_s(1 / ranks), copied, rates.beside) / ranks
    if operation == GATHER:
        now = piece
        for number in range(1, ranks):
            now = max(now, number * push) + rates.signal_s + piece
        return now
    made, sent = 0.0, 0.0
    for _ in range(1, ranks):
        made += piece
        sent = max(made, sent) + push
    adding = (ranks + 1) * parts.moved_bytes / rates.sum_bytes_per_s
    return max(made + piece, sent) + rates.signal_s + adding


def _fused_s(operation: str, parts: Parts, rates: OverlapRates) -> float:
    ranks = parts.ranks
    pieces = (ranks - 1) * FUSED_PIECES
    push = _push_s(parts, rates, 1 / FUSED_PIECES)
    product = _slowed_s(
        rates.fused_ratio * parts.product_s(1.0), pieces * (push - rates.copy_latency_s), rates.fused_beside
    )
    own, piece = product / ranks, product / ranks / FUSED_PIECES
    if operation == GATHER:
        now = own
        for number in range(1, pieces + 1):
            now = max(now, rates.signal_s + number * push) + piece
        return now + rates.fused_tail_s
    made, sent, arrivals = 0.0, 0.0, []
    for _ in range(pieces):
        made += piece
        sent = max(made, sent) + push
        arrivals.append(sent + rates.signal_s)
    now = made
    for number in range(FUSED_PIECES):
        # The last of the other ranks to deliver this piece is the one that makes it last.
        now = max(now + piece, arrivals[pieces - FUSED_PIECES + number])
    return now + rates.fused_tail_s


def all_reduce_s(mode: str, nbytes: float, ranks: int, rates: OverlapRates) -> float:
    """Return seconds of a small all-reduce inside one NVLink domain: `one_shot`, `two_shot` or `multimem`."""
    if mode == "one_shot":
        return rates.signal_s + (ranks - 1) * nbytes / rates.copy_bytes_per_s
    if mode == "two_shot":
        return 2 * rates.signal_s + 2 * (ranks - 1) / ranks * nbytes / rates.copy_bytes_per_s
    if mode == "multimem":
        return rates.signal_s + nbytes / rates.copy_bytes_per_s
    raise ValueError(f"there is no all-reduce mode {mode}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The mode to run, what every executed mode takes, and whether that was `measured` or `modelled`."""

    mode: str
    seconds: tuple[tuple[str, float], ...]
    source: str


def choose(operation: str, parts: Parts, rates: OverlapRates, *, measured: Mapping[str, float] | None = None) -> Choice:
    """Return the fastest mode that the executor runs. Times of this very shape outrank the model, mode by mode."""
    known = measured or {}
    seconds = {mode: known.get(mode) or mode_s(mode, operation, parts, rates) for mode in EXECUTED}
    best = min(seconds, key=lambda mode: seconds[mode])
    return Choice(mode=best, seconds=tuple(seconds.items()), source="measured" if best in known else "modelled")


# --- calibration ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSample:
    """One measured time."""

    operation: str
    mode: str
    parts: Parts
    seconds: float


MEASURED_ALONE = frozenset({"copy_bytes_per_s", "sum_bytes_per_s"})
SPAN = 4.0  # beyond that a rate would no longer be what its name says


def mean_error(samples: Sequence[OverlapSample], rates: OverlapRates) -> float:
    """Return the mean of |predicted / measured - 1|."""
    errors = [abs(mode_s(s.mode, s.operation, s.parts, rates) / s.seconds - 1) for s in samples]
    return sum(errors) / len(errors)


def fit_rates(samples: Sequence[OverlapSample], start: OverlapRates | None = None) -> OverlapRates:
    """Return the rates with the least mean error, each within a factor of `SPAN` of where it starts.

    Rates that are measured alone (`MEASURED_ALONE`) stay. The error is piecewise smooth with kinks where a copy ceases to
    be hidden, so one rate after another is moved by shrinking steps, and again from where that ended. None belongs to a
    shape. Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("there is nothing to fit: no samples")
    best = first = start or OverlapRates()
    error = mean_error(samples, best)
    names = [field.name for field in fields(OverlapRates) if field.name not in MEASURED_ALONE]
    for _ in range(3):
        step = 2.0
        while step > 1.01:
            improved = False
            for name in names:
                for factor in (step, 1 / step):
                    value = getattr(best, name) * factor
                    if not 1 / SPAN <= value / getattr(first, name) <= SPAN:
                        continue
                    tried = replace(best, **{name: value})
                    if (found := mean_error(samples, tried)) < error:
                        best, error, improved = tried, found, True
            if not improved:
                step = step**0.5
    return best
