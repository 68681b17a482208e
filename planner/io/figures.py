"""Figures as text, with no more digits than are known, which a value's range decides.

All times of an answer have the unit and the last digit of its step, so that terms and their sum can be compared.
"""

from __future__ import annotations

from math import floor, log10

from simulator.config.estimate import Estimate, Interval
from topology.units import GIB, two_digits


def last_digit_s(value: Interval) -> float:
    """Return the value of the last shown digit of a time, in seconds: 0.1 for 7.25 s (6.29 to 8.98).

    At least two digits are shown for any range, since rounding to one would hide up to a third of the time.
    """
    half = (value.high - value.low) / 2 or abs(value.value) * 1e-3
    if half <= 0:
        return 1e-3
    known = floor(log10(half / 2.5))
    return 10.0 ** (min(known, floor(log10(value.value)) - 1) if value.value > 0 else known)


def seconds_text(value_s: float, last_s: float, *, signed: bool = False) -> str:
    """Return a time with its unit; `last_s` is the value of its last digit: `7.3 s`, `46 s`, `58 ms`."""
    scale, unit = _scale(last_s)
    return f"{_digits(value_s * scale, last_s * scale, signed=signed)} {unit}"


def interval_text(value: Interval) -> str:
    """Return a time and its 80% range: `7.3 s (6.3 to 9.0)`."""
    last_s = last_digit_s(value)
    scale, unit = _scale(last_s)
    middle, low, high = (_digits(end * scale, last_s * scale) for end in (value.value, value.low, value.high))
    return f"{middle} {unit} ({low} to {high})"


def _scale(last_s: float) -> tuple[float, str]:
    return (1.0, "s") if last_s >= 0.005 else (1e3, "ms") if last_s >= 5e-6 else (1e6, "us")


def _digits(value: float, last: float, *, signed: bool = False) -> str:
    places = max(0, -floor(log10(last) + 1e-9))
    rounded = round(value / last) * last + 0.0
    return f"{rounded:{'+' if signed else ''},.{places}f}"


def rate_text(estimate: Estimate) -> str:
    """Return tokens per second and GPU with two digits, since steps are known to 10 % at best."""
    return two_digits(estimate.tokens_per_s_per_gpu)


def gpus_text(count: int) -> str:
    """Return a number of GPUs as text."""
    return "1 GPU" if count == 1 else f"{count} GPUs"


def gib_text(nbytes: float) -> str:
    """Return bytes in GiB, whole from ten on, since predictions of memory are off by several per cent."""
    gib = nbytes / GIB
    return f"{gib:,.0f}" if abs(gib) >= 10 else f"{gib:.1f}"


def count_text(number: float) -> str:
    """Return a large number to two digits: `4.2M`, `33k`."""
    size, letter = next(((size, letter) for size, letter in ((1e6, "M"), (1e3, "k")) if number >= size), (1.0, ""))
    return f"{two_digits(number / size)}{letter}"


def change_text(part: float) -> str:
    """Return a relative change in whole per cent: `+8%`."""
    return f"{part:+.0%}" if abs(part) >= 0.005 else "0%"
