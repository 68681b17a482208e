"""Units and how they are shown: memory in GiB, link rates in decimal GB/s, times in s, ms or us."""

from __future__ import annotations

MIB, GIB = 2**20, 2**30


def in_gib(nbytes: float, places: int = 1) -> str:
    """Return bytes with their unit: `79.6 GiB`."""
    return f"{nbytes / GIB:.{places}f} GiB"


def in_mib(nbytes: float) -> str:
    """Return bytes in whole MiB: `256 MiB`."""
    return f"{nbytes / MIB:.0f} MiB"


def in_seconds(value_s: float) -> str:
    """Return a duration with three significant digits, in s, ms or us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value_s) >= size:
            return f"{value_s / size:.3g} {unit}"
    return "0 s" if value_s == 0 else f"{value_s / 1e-6:.2g} us"


def in_gb_per_s(bytes_per_s: float | None) -> str:
    """Return a link rate, whole from 100 GB/s on: `450 GB/s`, `47.1 GB/s`, `unknown`."""
    if not bytes_per_s:
        return "unknown"
    gigabytes = bytes_per_s / 1e9
    return f"{gigabytes:.0f} GB/s" if gigabytes >= 100 else f"{gigabytes:.3g} GB/s"


def two_digits(value: float) -> str:
    """Return a number to two significant digits: `9,100`, `8.0`, `0.30`."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 else f"{rounded:#.2g}"
