"""What a plan is predicted to cost, with how sure we are and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from topology.cluster import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value and the range it is expected in (80% of cases), with where it came from."""

    value: float
    low: float
    high: float
    source: Source


class Fit(StrEnum):
    """Whether memory is enough, given how far predictions of it are off: the 80% range against what there is."""

    YES = "yes"  # the whole range fits
    LIKELY = "likely"  # the value does, the upper end of the range does not
    UNLIKELY = "unlikely"  # the value does not, the lower end does
    NO = "no"  # nothing of the range does


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Peak memory of the worst rank. `peak_bytes` is what is allocated; `reserved_bytes` what the allocator holds.

    `fits` compares values; `fit` also the range that reserved memory is expected in (80% of cases), which is as wide,
    relative, as that of the allocated peak. `headroom_bytes` are left of the capacity, negative where bytes are missing.
    """

    peak_bytes: Interval
    reserved_bytes: float
    by_category: dict[str, float]  # bytes at the peak of the worst rank
    worst_rank: int
    capacity_bytes: float  # what a rank can use
    fits: bool
    by_stage: tuple[dict[str, float], ...] = ()  # bytes by category, one entry per pipeline rank
    reserved_by_stage: tuple[float, ...] = ()  # what the allocator holds, one entry per pipeline rank
    # Derived, with defaults only so that documents of before can be read.
    reserved_low_bytes: float = field(init=False, default=0.0)
    reserved_high_bytes: float = field(init=False, default=0.0)
    headroom_bytes: float = field(init=False, default=0.0)
    fit: Fit = field(init=False, default=Fit.NO)

    def __post_init__(self) -> None:
        peak, reserved, capacity = self.peak_bytes, self.reserved_bytes, self.capacity_bytes
        low, high = (reserved * end / peak.value if peak.value else reserved for end in (peak.low, peak.high))
        fit = (
            (Fit.YES if high <= capacity else Fit.LIKELY) if self.fits else Fit.UNLIKELY if low <= capacity else Fit.NO
        )
        derived = {"reserved_low_bytes": low, "reserved_high_bytes": high, "headroom_bytes": capacity - reserved}
        for name, value in {**derived, "fit": fit}.items():
            object.__setattr__(self, name, value)

    @property
    def verdict(self) -> str:
        used = f"{self.reserved_bytes / self.capacity_bytes:.0%} of memory"
        return {
            Fit.YES: "fits",
            Fit.LIKELY: f"likely fits, but tight ({used})",
            Fit.UNLIKELY: f"unlikely to fit ({used})",
            Fit.NO: "does not fit",
        }[self.fit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One training step, predicted. `breakdown_s` adds up to `step_s.value`.

    `mfu` counts model FLOPs only (no recompute) against `peak_flops`, the dense datasheet rate of `compute_dtype`;
    `tflops_per_gpu` is the same numerator in 1e12 FLOP/s.
    """

    step_s: Interval
    tokens_per_s_per_gpu: float
    mfu: float
    tflops_per_gpu: float
    peak_flops: float
    memory: MemoryEstimate
    breakdown_s: dict[str, float]
    exposed_by_axis_s: dict[str, float] = field(default_factory=dict)  # parts of breakdown_s['exposed_communication']
    sources: dict[str, float] = field(default_factory=dict)  # share of the step by what it rests on; adds up to 1
    assumed: tuple[str, ...] = field(default=())
