"""How far a question is from the steps that were measured, and how much wider that makes the range of its step.

`intervals.json` was learned from runs of some GPUs and runtimes on up to some number of GPUs, which it names. Elsewhere
a prediction is less sure: each thing that was never measured multiplies the logarithm of the range's ends. The factor
of another vendor was fitted when its GPUs borrowed the kernels of another: three steps of torchtitan on 8 MI300X took
1.3 to 1.6 times as long as predicted (pytorch/ao, torchtitan benchmarks), where the upper end of the range was 1.14.
With kernels of their own they take 1.14 to 1.26 times as long; no other point has checked the factor, so it stays. The
other factors are assumed; that of 16-bit products on Blackwell is what its published hosts differ by (1.31, `burst` in
efficiency.toml), over the upper end of the range.
"""

from __future__ import annotations

from math import log2

from simulator.calibration.intervals import interval_table
from simulator.config.runtime import Runtime
from topology.cluster import Cluster

OTHER_VENDORS = {"CDNA": "AMD", "Xe": "Intel"}  # by the prefix of their architectures' names

HOSTS_DIFFER = ("Blackwell", "Blackwell Ultra")  # in 16-bit products

VENDOR, GENERATION, RUNTIME, DOUBLING = 4.0, 2.0, 1.5, 0.1


def distance(cluster: Cluster, runtime: Runtime, gpus: int) -> tuple[float, tuple[str, ...]]:
    """Return the factor of a range's width relative to measured steps, and the names of what was never measured."""
    kind, known = cluster.slowest_kind, interval_table().measured_on
    vendor = next((name for start, name in OTHER_VENDORS.items() if kind.architecture.startswith(start)), "")
    parts: list[tuple[float, str]] = []
    if vendor:
        parts.append((VENDOR, f"GPUs of {vendor}"))
    elif kind.architecture not in known.architectures:
        parts.append((GENERATION, f"{kind.architecture} GPUs"))
    elif kind.architecture in HOSTS_DIFFER and not runtime.low:
        parts.append((GENERATION, f"16-bit products on {kind.architecture} GPUs, in which published hosts differ,"))
    if runtime.name not in known.runtimes:
        parts.append((RUNTIME, f"steps of {runtime.name}"))
    if gpus > known.gpus:
        parts.append((1 + DOUBLING * log2(gpus / known.gpus), f"more than {known.gpus:,} GPUs"))
    width = 1.0
    for factor, _ in parts:
        width *= factor
    return width, tuple(name for _, name in parts)


def distance_text(cluster: Cluster, runtime: Runtime, gpus: int) -> tuple[str, ...]:
    """Return the sentence that states what makes a range wider; empty where such steps were measured."""
    width, names = distance(cluster, runtime, gpus)
    if not names:
        return ()
    return (f"ranges of steps {width:.2g} times as wide, as those of {' and '.join(names)} were never measured here",)
