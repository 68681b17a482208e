"""The predicted cost of a plan, with ranges and sources."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import erf, exp, inf, log, sqrt

from topology.cluster import Source

SURE = 0.95  # probability from which a plan is said to fit
RATHER_SURE = 0.7  # from which a plan is listed if it is faster than all that surely fit
EVEN = 0.5  # with the memory that is predicted, without retries
SLIGHT = 0.2  # below it a faster plan is not mentioned
LEVELS = (SURE, RATHER_SURE, EVEN, SLIGHT)  # a plan of a higher level comes before faster ones of lower levels
# Standard deviations from the middle of a normal distribution to the ends of its 80 % range, and to the values with the
# probability of each level below them.
NORMAL_80 = 1.2816
_NORMAL_AT = {SURE: 1.6449, RATHER_SURE: 0.5244, EVEN: 0.0, SLIGHT: -0.8416}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value, the range that holds it in 80 % of cases, and its source."""

    value: float
    low: float
    high: float
    source: Source

    def at(self, value: float) -> Interval:
        """Return `value` with this interval's relative range and source."""
        scale = value / self.value if self.value else 1.0
        return replace(self, value=value, low=self.low * scale, high=self.high * scale)


class Fit(StrEnum):
    """Whether memory is enough: classes of the probability that it is, given the errors of predicted memory."""

    YES = "yes"  # at least SURE
    LIKELY = "likely"  # the predicted value fits, but may be too low
    UNLIKELY = "unlikely"  # the predicted value does not fit, but may be too high
    NO = "no"  # probability below 1 - SURE


def fit_probability(needed: float, low: float, high: float, capacity: float) -> float:
    """Return the probability that a need predicted as `needed` bytes, with the 80 % range `low` to `high`, is at most
    `capacity`.

    Errors are taken as log-normal on either side of the value, as `simulator.calibration.intervals` learns them.
    """
    if needed <= 0 or capacity <= 0:
        return 1.0 if needed <= capacity else 0.0
    spread = log(high / needed) if capacity >= needed else log(needed / low) if low > 0 else inf
    if spread <= 0:
        return 1.0 if needed <= capacity else 0.0
    return 0.5 * (1 + erf(log(capacity / needed) / (spread / NORMAL_80) / sqrt(2)))


def sure_bytes(capacity: float, factors: tuple[float, float], probability: float = SURE) -> float:
    """Return the largest prediction in bytes for which a plan fits `capacity` with a `probability` of LEVELS.

    `factors` times a prediction are the ends of its 80% range.
    """
    spread = log(factors[1]) if probability >= EVEN else -log(factors[0])
    return capacity * exp(-spread * _NORMAL_AT[probability] / NORMAL_80)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Peak memory of the worst rank. `peak_bytes` is allocated memory, `reserved_bytes` what the allocator took from
    the GPU.

    `fits` compares the predicted values; `fit` also uses the 80 % range of reserved memory, which has the same relative
    width as that of the allocated peak. NCCL uses `communicator_bytes` of the capacity once its groups communicate. An
    allocator that needs more than the rest returns cached memory and retries, `retries_per_step` times; such a plan may
    run but never surely fits. `headroom_bytes` is what allocator and NCCL leave free, negative where bytes are missing.
    `fragmentation` is the share of reserved memory that was not allocated at the peak. `host_bytes` is the most host
    memory that a rank's offloaded state takes; the node has `host_capacity_bytes` per GPU, where known. `paged_bytes`
    of optimizer state move between GPU and host as memory allows, which takes `paging_s` of a step.
    """

    peak_bytes: Interval
    reserved_bytes: float
    by_category: dict[str, float]  # bytes at the peak of the fullest rank
    worst_rank: int
    capacity_bytes: float  # bytes of the GPU that a rank can use
    fits: bool
    by_stage: tuple[dict[str, float], ...] = ()  # bytes by category, one entry per pipeline rank
    host_bytes: float = 0.0
    host_capacity_bytes: float | None = None
    paged_bytes: float = 0.0
    paging_s: float = 0.0
    reserved_by_stage: tuple[float, ...] = ()  # reserved bytes, one entry per pipeline rank
    communicator_bytes: float = 0.0
    retries_per_step: int = 0
    fragmentation: float = 0.0
    # Derived from the above; the defaults only serve documents of earlier versions.
    reserved_low_bytes: float = field(init=False, default=0.0)
    reserved_high_bytes: float = field(init=False, default=0.0)
    headroom_bytes: float = field(init=False, default=0.0)
    fit: Fit = field(init=False, default=Fit.NO)

    def __post_init__(self) -> None:
        peak, reserved, capacity = self.peak_bytes, self.reserved_bytes, self.capacity_bytes
        low, high = (reserved * end / peak.value if peak.value else reserved for end in (peak.low, peak.high))
        left = capacity - self.communicator_bytes
        likely = fit_probability(reserved, low, high, left)
        fit = (
            (Fit.YES if likely >= SURE else Fit.LIKELY) if self.fits else Fit.UNLIKELY if likely > 1 - SURE else Fit.NO
        )
        if self.fills_host:
            fit = Fit.NO
        derived = {"reserved_low_bytes": low, "reserved_high_bytes": high, "headroom_bytes": left - reserved}
        for name, value in {**derived, "fit": fit}.items():
            object.__setattr__(self, name, value)

    @property
    def fit_probability(self) -> float:
        """The probability that the plan fits, without retries."""
        if self.fills_host:
            return 0.0
        left = self.capacity_bytes - self.communicator_bytes
        return fit_probability(self.reserved_bytes, self.reserved_low_bytes, self.reserved_high_bytes, left)

    @property
    def reserved_factors(self) -> tuple[float, float]:
        """The ends of the 80 % range of reserved memory over its value."""
        return self.reserved_low_bytes / self.reserved_bytes, self.reserved_high_bytes / self.reserved_bytes

    @property
    def fills_host(self) -> bool:
        """Whether the host lacks memory."""
        return self.host_capacity_bytes is not None and self.host_bytes > self.host_capacity_bytes

    @property
    def verdict(self) -> str:
        if self.fit is Fit.YES:
            return "fits"
        if self.fit is Fit.NO:
            return "does not fit in host memory" if self.fills_host else "does not fit"
        often = "once" if self.retries_per_step == 1 else f"{self.retries_per_step} times"
        retries = f", allocations retried {often} a step" if self.retries_per_step else ""
        return f"{chance(self.fit_probability)} likely to fit{retries}"


def chance(probability: float) -> str:
    """Return a probability that is neither 0 nor 1 rounded to 5 %, the precision to which it is known."""
    return f"{min(90, max(5, 5 * round(20 * probability)))}%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One training step, predicted. `breakdown_s` adds up to `step_s.value`.

    Rates follow from the step and from a GPU's work in it, `tokens_per_gpu` and `model_flops_per_gpu` (without
    recomputation): `mfu` is relative to `peak_flops`, the dense datasheet rate of `compute_dtype`, `tflops_per_gpu` in
    1e12 FLOP/s.
    """

    step_s: Interval
    tokens_per_gpu: float = 0.0  # documents may have rates in the place of these two
    model_flops_per_gpu: float = 0.0
    tokens_per_s_per_gpu: float = field(init=False, default=0.0)
    mfu: float = field(init=False, default=0.0)
    tflops_per_gpu: float = field(init=False, default=0.0)
    peak_flops: float
    memory: MemoryEstimate
    breakdown_s: dict[str, float]
    exposed_by_axis_s: dict[str, float] = field(default_factory=dict)  # parts of breakdown_s['exposed_communication']
    sources: dict[str, float] = field(default_factory=dict)  # share of the step by source; adds up to 1
    assumed: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        step = self.step_s.value
        tokens = self.tokens_per_gpu or self.tokens_per_s_per_gpu * step
        flops = self.model_flops_per_gpu or self.tflops_per_gpu * 1e12 * step
        derived = {"tokens_per_gpu": tokens, "model_flops_per_gpu": flops}
        if step > 0 and self.peak_flops > 0:
            rates = {"tokens_per_s_per_gpu": tokens / step, "tflops_per_gpu": flops / step / 1e12}
            derived |= {**rates, "mfu": flops / step / self.peak_flops}
        for name, value in derived.items():
            object.__setattr__(self, name, value)
