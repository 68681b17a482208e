"""The law a collective's time follows, and its constants by GPU generation.

One law serves every algorithm and protocol of NCCL. For n ranks that each send `s` of the buffer's B bytes in `steps`
dependent steps,

    T = (L^p + W^p)^(1/p) + F * B / (B + Bf)
    L = base + step * steps + second * B / (B + 4 KiB * n)
    W = max(B * (sent * s + buffer), B * s / (ceiling * link rate))

- L is latency: launching the kernel, and one flag exchange a step. `second` is what a second CTA costs: up to about
  4 KiB a rank NCCL runs one, above it several, and the last of them ends later.
- W is work. `sent` is seconds for each byte pushed over the link, `buffer` for each byte of the user's buffer that the
  same CTAs copy locally (first step in, last step out). With both terms, times at n = 2 and 4 predict those at 8. A bus
  bandwidth alone does not, because two ranks copy as much locally as they send. No fabric carries more than `ceiling`
  of its nominal rate.
- p is how much of the latency hides behind the work: 1 adds them, larger values overlap them.
- F is pipeline fill: chunks grow with the message until they reach the protocol's buffer, and the last one drains
  alone.

Constants are fitted (tests/bench/fit_collectives.py) on public nccl-tests tables, never on one machine's file, row or
model: NVLink 3 on A100, NVLink 4 on H200, NVLink 5 on GB200, sizes 512 B to 512 MiB
(github.com/ai-dynamo/aiconfigurator @095f58a5), with NVLS on Blackwell from AWS P6-B200
(github.com/stas00/ml-engineering @744d01e1). Mean error on those tables is 3 to 5 %; how it holds elsewhere is in
examples/validation/collectives.md. Times are seconds, rates seconds per byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology.units import MIB

Floats = NDArray[np.float64]

# A ring reaches 367 of 450 GB/s on H200 (16 GiB, stas00), 235 of 300 on A100: protocol headers and credits keep
# NVLink below about 82 % of nominal (NVIDIA/nccl-tests#212 says the same of H100: 370 of 450 is expected).
LINK_CEILING = 0.82
# Bytes per rank at which half of the latency of a second thread block has been added. Source: assumed.
SECOND_CTA_BYTES = 4096.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteCost:
    """Seconds for each byte sent over the link, and for each byte of the buffer copied by the kernel."""

    sent_s: float
    buffer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One protocol of one algorithm on one GPU generation."""

    base_s: float
    step_s: float
    reduce_step_s: float  # the same for an all-reduce, whose first half also reduces
    bytes: dict[str, ByteCost]
    second_s: float = 0.0
    sharpness: float = 1.0
    fill_s: float = 0.0
    fill_bytes: float = 1.0
    int8_factor: float = 0.0  # extra share of the copy cost when a reduction works on 1-byte integers


def curve_time_s(
    curve: Curve,
    op: str,
    size: Floats,
    *,
    ranks: int,
    steps: float,
    share: float,
    link_bytes_per_s: float = float("inf"),
    int8: bool = False,
    fill_scale: float = 1.0,
) -> Floats:
    """Return seconds for buffers of `size` bytes (float array) when each rank sends `share` of the buffer."""
    cost = curve.bytes[op]
    buffer = cost.buffer_s * (1 + curve.int8_factor if int8 and op != "all_gather" else 1)
    step = curve.reduce_step_s if op == "all_reduce" else curve.step_s
    latency = curve.base_s + step * steps + curve.second_s * size / (size + SECOND_CTA_BYTES * ranks)
    work = size * max(cost.sent_s * share + buffer, share / (LINK_CEILING * link_bytes_per_s))
    p = curve.sharpness
    joined = (latency**p + work**p) ** (1 / p) if p != 1 else latency + work
    fill = fill_scale * curve.fill_s * size / (size + fill_scale * curve.fill_bytes)
    return np.asarray(joined + fill, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCurve:
    """NCCL's point-to-point kernels: send/recv, and all-to-all built of them.

    A message to one peer uses LL on few channels while small, then Simple on `channels` channels; each channel takes
    up to 16 MiB before NCCL doubles their number, which makes a staircase (B200 sends 64 MiB and 512 MiB in the same
    0.8 ms). `channel_bytes_per_s` is what one CTA moves.
    """

    base_s: float
    doubling_s: float  # added for each doubling of the group
    ll_bytes_per_s: float  # one LL channel
    simple_base_s: float
    sharpness: float
    fill_s: float
    fill_bytes: float
    sent_s: float
    buffer_s: float
    channel_bytes_per_s: float
    pair_bytes_per_s: float  # to one peer at a time over all channels: the ceiling of send/recv


P2P_CHANNELS = 32  # of a communicator
P2P_CHANNEL_BYTES = 16 * MIB  # 32 chunks of 512 KiB: beyond that NCCL doubles the channels
P2P_LL_CHANNEL_BYTES = 128 * 2**10  # send/recv leaves LL above this much a channel (B200 table: dip at 1 MiB on 4)
LL_STEP_BYTES = 16 * 1024  # LL uses one channel more for each such piece of a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """All constants of one NVLink generation."""

    name: str
    curves: dict[str, Curve]  # "ring/LL", "ring/LL128", "ring/Simple", "nvls/Simple"
    peer: PeerCurve
    spread: float  # half-width of the 80 % interval, relative, on groups like those fitted
    tables: str
    link_bytes_per_s: float  # one GPU's link rate on the fitted machines
    nccl_bytes_per_s: float  # the rate that NCCL counts for it: links x speed of its topo.h
    fitted_ranks: int  # largest group in the tables
    assumed: tuple[str, ...] = ()
    fitted: Generation | None = None  # the generation from which this one is extrapolated to faster links


def peer_channels(ranks: int, message: Floats) -> Floats:
    """Return channels NCCL gives one message of `message` bytes: its share of 32, doubled until none exceeds 16 MiB."""
    fair = max(1, P2P_CHANNELS // (1 << (ranks - 1).bit_length()))
    doublings = np.ceil(np.log2(np.maximum(message / (fair * P2P_CHANNEL_BYTES), 1.0)))
    return np.asarray(np.minimum(fair * 2.0**doublings, P2P_CHANNELS), dtype=np.float64)


def _channel_bytes(ranks: int, message: Floats) -> Floats:
    """Return the bytes that decide a message's time on its channels; they never decrease with its size.

    When a channel would exceed 16 MiB, the number of channels doubles and each has 8 MiB. A table of eight B200 shows
    no shorter time there (`HGX B200 x8`: 792, 799 and 808 us for 64, 128 and 256 MiB), so a larger one takes no less
    than 16 MiB do.
    """
    full = np.minimum(message / max(1, P2P_CHANNELS // (1 << (ranks - 1).bit_length())), P2P_CHANNEL_BYTES)
    return np.maximum(message / peer_channels(ranks, message), full)


def all_to_all_time_s(curve: PeerCurve, size: Floats, *, ranks: int, link_bytes_per_s: float = float("inf")) -> Floats:
    """Return seconds for every rank to send `size / ranks` bytes to every rank, itself included."""
    message = size / ranks
    start = curve.doubling_s * float(np.log2(ranks))
    share = (ranks - 1) / ranks
    per_byte = max(curve.sent_s * share + curve.buffer_s, share / (LINK_CEILING * link_bytes_per_s))
    work = np.maximum(size * per_byte, _channel_bytes(ranks, message) / curve.channel_bytes_per_s)
    p = curve.sharpness
    bulk = ((curve.simple_base_s + start) ** p + work**p) ** (1 / p) + curve.fill_s * size / (size + curve.fill_bytes)
    small = curve.base_s + start + message / curve.ll_bytes_per_s
    return np.asarray(np.minimum(small, bulk), dtype=np.float64)


def send_recv_time_s(curve: PeerCurve, size: Floats, *, ranks: int, link_bytes_per_s: float = float("inf")) -> Floats:
    """Return seconds for every rank to send `size` bytes to one neighbour and receive as much (a ring shift).

    NCCL itself is not monotone: LL runs up to 128 KiB a channel although Simple would already be faster, and gets a
    channel more for every 16 KiB (`HGX B200 x8`: 35 us at 512 KiB, 27 at 1 MiB). This is its monotone bound.
    """
    channels = peer_channels(ranks, size)
    on_one = np.maximum(np.minimum(size, LL_STEP_BYTES), size / channels)
    small = curve.base_s + curve.doubling_s + np.minimum(on_one, P2P_LL_CHANNEL_BYTES) / curve.ll_bytes_per_s
    pair = min(curve.pair_bytes_per_s, LINK_CEILING * link_bytes_per_s)
    work = np.maximum(_channel_bytes(ranks, size) / curve.channel_bytes_per_s, size / pair)
    p = curve.sharpness
    bulk = ((curve.simple_base_s + curve.doubling_s) ** p + work**p) ** (1 / p)
    low_latency = size <= channels * P2P_LL_CHANNEL_BYTES
    return np.asarray(np.where(low_latency, small, np.maximum(small, bulk)), dtype=np.float64)
