"""What a plan is predicted to cost, with how sure we are and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from topology.cluster import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value and the range it is expected in (80% of cases), with where it came from."""

    value: float
    low: float
    high: float
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Peak memory of the worst rank. `peak_bytes` is what is allocated; `reserved_bytes` what the allocator holds."""

    peak_bytes: Interval
    reserved_bytes: float
    by_category: dict[str, float]  # bytes at the peak of the worst rank
    worst_rank: int
    capacity_bytes: float  # what a rank can use
    fits: bool
    by_stage: tuple[dict[str, float], ...] = ()  # bytes by category, one entry per pipeline rank
    reserved_by_stage: tuple[float, ...] = ()  # what the allocator holds, one entry per pipeline rank

    @property
    def verdict(self) -> str:
        if not self.fits:
            return "does not fit"
        headroom = 1 - self.reserved_bytes / self.capacity_bytes
        return "fits but tight (<5% headroom)" if headroom < 0.05 else "fits"


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
