"""Fitted constants by GPU generation; collective_curves.py says what each means and where the tables are from.

Printed by `python -m tests.bench.fit_collectives TABLES` (microseconds, and microseconds per MB), written here in
seconds. `assumed` lists the entries that no table determines, with the reasoning.
"""

from __future__ import annotations

from simulator.collectives.curves import ByteCost, Curve, Generation, PeerCurve
from topology.units import MIB

US = 1e-6
PER_MB = 1e-12  # us per MB = seconds per 1e12 bytes


def _bytes(
    all_reduce: tuple[float, float], gather: tuple[float, float], scatter: tuple[float, float]
) -> dict[str, ByteCost]:
    """Return byte costs from (sent, buffer) pairs in us per MB. A broadcast forwards like an all-gather."""
    pairs = {"all_reduce": all_reduce, "all_gather": gather, "reduce_scatter": scatter, "broadcast": gather}
    return {op: ByteCost(sent_s=sent * PER_MB, buffer_s=buffer * PER_MB) for op, (sent, buffer) in pairs.items()}


def _curve(
    latency: tuple[float, float, float, float],
    byte_costs: dict[str, ByteCost],
    *,
    sharpness: float = 1.0,
    fill: tuple[float, float] = (0.0, 8.0),
    int8: float = 0.0,
) -> Curve:
    """Return a curve from (base, step, reducing step, second CTA) in us and fill in (us, MiB)."""
    base, step, reduce_step, second = latency
    return Curve(
        base_s=base * US,
        step_s=step * US,
        reduce_step_s=reduce_step * US,
        second_s=second * US,
        bytes=byte_costs,
        sharpness=sharpness,
        fill_s=fill[0] * US,
        fill_bytes=fill[1] * MIB,
        int8_factor=int8,
    )


AMPERE = Generation(
    name="NVLink 3",
    tables="A100-SXM4-80GB, 2, 4 and 8 GPUs, NCCL 2.27.3",
    link_bytes_per_s=300e9,
    nccl_bytes_per_s=240e9,
    fitted_ranks=8,
    spread=0.10,
    curves={
        "ring/LL": _curve(
            (7.27, 1.09, 1.19, 4.2), _bytes((1.45, 17.87), (0.97, 11.51), (0.05, 10.16)), sharpness=1.45, int8=0.13
        ),
        "ring/LL128": _curve((20.5, 0.37, 0.62, 0.0), _bytes((3.52, 5.21), (3.28, 3.12), (3.72, 3.46))),
        "ring/Simple": _curve(
            (22.8, 5.91, 7.01, 0.0), _bytes((3.41, 1.67), (2.30, 2.16), (3.07, 1.28)), fill=(25.2, 32.0), int8=0.18
        ),
    },
    peer=PeerCurve(
        base_s=9.68 * US,
        doubling_s=1.22 * US,
        ll_bytes_per_s=5.4e9,
        simple_base_s=11.5 * US,
        sharpness=1.0,
        fill_s=30.3 * US,
        fill_bytes=4 * MIB,
        sent_s=3.71 * PER_MB,
        buffer_s=1.13 * PER_MB,
        channel_bytes_per_s=13.85e9,  # A100 x8 sendrecv, 128 MiB on 8 channels: 110.8 GB/s
        pair_bytes_per_s=195e9,  # the same table at 1 GiB
    ),
)

HOPPER = Generation(
    name="NVLink 4",
    tables="H200 SXM, 2, 4 and 8 GPUs, NCCL 2.29.2",
    link_bytes_per_s=450e9,
    nccl_bytes_per_s=370.8e9,
    fitted_ranks=8,
    spread=0.10,
    curves={
        "ring/LL": _curve(
            (3.86, 1.08, 1.06, 1.56), _bytes((1.02, 8.73), (3.08, 4.79), (0.05, 5.33)), sharpness=1.39, int8=0.19
        ),
        "ring/LL128": _curve((15.0, 0.81, 0.66, 0.0), _bytes((2.60, 1.01), (1.44, 1.51), (1.44, 1.60))),
        "ring/Simple": _curve(
            (13.0, 4.74, 5.83, 0.0),
            _bytes((2.14, 1.05), (1.74, 1.00), (1.40, 1.25)),
            sharpness=2.71,
            fill=(44.8, 21.6),
            int8=0.10,
        ),
        # One group size (8), so latency and work cannot be split by n: all work is counted on the buffer.
        "nvls/Simple": _curve(
            (18.5, 0.0, 0.0, 0.0), _bytes((0.0, 3.57), (0.0, 3.57), (0.0, 3.57)), sharpness=4.0, fill=(89.6, 7.3)
        ),
    },
    peer=PeerCurve(
        base_s=5.21 * US,
        doubling_s=1.2 * US,
        ll_bytes_per_s=6.7e9,
        simple_base_s=10.8 * US,
        sharpness=1.73,
        fill_s=56.8 * US,
        fill_bytes=32 * MIB,
        sent_s=3.0 * PER_MB,
        buffer_s=0.02 * PER_MB,
        channel_bytes_per_s=23e9,  # two H200, send/recv of 1 GiB on 16 channels: 370 GB/s, not yet limited by them
        pair_bytes_per_s=372e9,  # the same
    ),
)

BLACKWELL = Generation(
    name="NVLink 5",
    tables="GB200, 2 and 4 GPUs of one tray, NCCL 2.29.2; NVLS and send/recv from 8 x B200",
    link_bytes_per_s=900e9,
    nccl_bytes_per_s=721.8e9,
    fitted_ranks=4,
    spread=0.10,
    curves={
        "ring/LL": _curve(
            (7.64, 1.37, 1.36, 1.42), _bytes((1.47, 4.49), (0.10, 4.49), (0.24, 3.98)), sharpness=1.51, int8=0.09
        ),
        "ring/LL128": _curve((18.0, 0.8, 0.7, 0.0), _bytes((1.16, 1.07), (0.85, 0.90), (0.49, 1.20))),
        "ring/Simple": _curve(
            (9.8, 11.3, 12.0, 0.0),
            _bytes((0.97, 0.89), (0.71, 0.75), (0.41, 1.00)),
            sharpness=2.6,
            fill=(21.4, 15.2),
            int8=0.15,
        ),
        # 8 x B200, each call waited for (AWS P6-B200): 25 us of host time taken off before reading these four.
        "nvls/Simple": _curve((40.0, 0.0, 0.0, 0.0), _bytes((0.0, 2.34), (0.0, 2.34), (0.0, 2.34)), fill=(45.0, 8.0)),
    },
    peer=PeerCurve(
        base_s=8.85 * US,
        doubling_s=0.88 * US,
        ll_bytes_per_s=6.6e9,
        simple_base_s=15.3 * US,
        sharpness=1.6,
        fill_s=36.7 * US,
        fill_bytes=32 * MIB,
        sent_s=1.0 * PER_MB,
        buffer_s=0.42 * PER_MB,  # with `sent` 673 GB/s at 8 GPUs (Vultr's peak); below that the channels are the limit
        channel_bytes_per_s=21.8e9,  # 8 x B200 sendrecv, 1 to 64 MiB on 4 channels: 84.7 GB/s; GB200 all-to-all 22.2
        pair_bytes_per_s=663e9,  # the same table at 16 GiB
    ),
    assumed=(
        "LL128 on Blackwell: GB200 tables never run it; latency between Ampere's and Hopper's, bytes 1.2 x Simple",
    ),
)

# NVLink 1 and 2 are costed with NVLink 3's kernels under their own link ceiling, NVLink 6 with NVLink 5's at the ratio
# of the link rates. Nothing published covers them here, so their interval is twice as wide.
BY_CAPABILITY = ((100, BLACKWELL), (90, HOPPER), (0, AMPERE))


def generation_for(compute_capability: int) -> Generation:
    return next(generation for floor, generation in BY_CAPABILITY if compute_capability >= floor)
