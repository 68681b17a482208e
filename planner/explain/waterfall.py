"""The waterfall from the GPU's datasheet peak to the achieved step, and the difference of two plans, term by term.

Pure functions of an `Estimate`: the same rows feed the text of `planner explain`, its JSON and the explorer.

    fall = waterfall(estimate)            # fall.peak_s + sum(t.seconds for t in fall.terms) == fall.step_s
    memory = memory_rows(estimate)        # one row per pipeline stage and category
    terms = difference(estimate, other)   # seconds and bytes, largest first
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.config.estimate import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of the waterfall: its seconds, its share of the step, and its meaning in words.

    `part` is the part of `Estimate.breakdown_s` that it belongs to.
    """

    name: str
    part: str
    seconds: float
    share: float
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """A step as the time of the model's FLOPs at the GPU's dense peak rate (`peak_s`) plus all losses.

    `peak_s` and the terms add up to `step_s`; `peak_s / step_s` is the MFU. `peak_flops` is the denominator: the dense
    datasheet rate of the compute type, per GPU.
    """

    step_s: float
    peak_s: float
    peak_flops: float
    terms: tuple[Term, ...]

    @property
    def top_loss(self) -> Term:
        """The term with the most seconds."""
        return max(self.terms, key=lambda term: term.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Bytes of one category on each rank of one pipeline stage, at its memory peak."""

    stage: int
    category: str
    nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One term of two estimates. `delta` is the second minus the first, in `unit` (s or bytes)."""

    name: str
    first: float
    second: float
    unit: str

    @property
    def delta(self) -> float:
        return self.second - self.first


EXPOSED = "exposed_communication"
_AXES = {
    "tp": "tensor-parallel collectives",
    "cp": "keys and values passed between context-parallel ranks",
    "ep": "tokens sent to experts and back",
    "pp": "activations sent between pipeline stages",
    "dp": "parameters gathered and gradients reduced over data-parallel ranks",
}
_PARTS = {
    "recompute": "activations computed again in the backward pass",
    "copies": "packing and unpacking of sharded parameters and gradients",
    "contention": "compute slowed by collectives that run at the same time",
    "bubble": "waiting for the pipeline to fill and drain",
    "host": "kernels launched later than the device could start them",
    "allocator": "freeing and allocating memory anew when it is nearly full, weighted by its probability",
    "optimizer": "gradient clipping and the update of the weights",
}


def waterfall(estimate: Estimate) -> Waterfall:
    """Return where the step's time goes, starting from the GPU's peak; terms of 0 s are left out.

    Compute inefficiency is what kernels take beyond their model FLOPs at peak: partly filled tiles, memory-bound
    kernels, clocks reduced by the power limit. Exposed communication is split by the mesh axis it runs along.
    """
    step = estimate.step_s.value
    parts = dict(estimate.breakdown_s)
    peak = estimate.mfu * step
    slower = parts.pop("compute", 0.0) - peak
    rows = [("compute", "compute inefficiency", slower, "kernels slower than the peak of the GPU")]
    exposed = parts.pop(EXPOSED, 0.0)
    rows += [(EXPOSED, *row) for row in _by_axis(exposed, estimate.exposed_by_axis_s)]
    rows += [(part, part, seconds, _PARTS.get(part, part.replace("_", " "))) for part, seconds in parts.items()]
    return Waterfall(
        step_s=step,
        peak_s=peak,
        peak_flops=estimate.peak_flops,
        terms=tuple(
            Term(part=part, name=name, seconds=seconds, share=seconds / step if step else 0.0, meaning=meaning)
            for part, name, seconds, meaning in rows
            if seconds
        ),
    )


def _by_axis(exposed: float, by_axis: dict[str, float]) -> list[tuple[str, float, str]]:
    """Split `exposed` seconds in the proportions of `by_axis`, the seconds by mesh axis."""
    known = sum(by_axis.values())
    if not known:
        return [("exposed communication", exposed, "collectives that nothing hides")]
    scale = exposed / known
    return [
        (f"exposed {axis.upper()} communication", seconds * scale, _AXES.get(axis, f"collectives along {axis}"))
        for axis, seconds in sorted(by_axis.items(), key=lambda item: (-item[1], item[0]))
    ]


def memory_rows(estimate: Estimate) -> tuple[MemoryRow, ...]:
    """Return bytes by pipeline stage and category, in the order of the stages."""
    stages = estimate.memory.by_stage or (estimate.memory.by_category,)
    return tuple(
        MemoryRow(stage=stage, category=category, nbytes=nbytes)
        for stage, categories in enumerate(stages)
        for category, nbytes in categories.items()
    )


def difference(first: Estimate, second: Estimate) -> tuple[Difference, ...]:
    """Return all terms of both estimates: seconds by term, then bytes by category, largest difference first in each.

    The differences in seconds add up to the difference of the steps.
    """
    seconds = _pairs(_terms(first), _terms(second), "s")
    memory = _pairs(first.memory.by_category, second.memory.by_category, "bytes")
    return (*seconds, *memory)


def _terms(estimate: Estimate) -> dict[str, float]:
    fall = waterfall(estimate)
    return {"model FLOPs at peak": fall.peak_s} | {term.name: term.seconds for term in fall.terms}


def _pairs(first: dict[str, float], second: dict[str, float], unit: str) -> list[Difference]:
    rows = [
        Difference(name=name, first=first.get(name, 0.0), second=second.get(name, 0.0), unit=unit)
        for name in dict.fromkeys([*first, *second])
    ]
    return sorted(rows, key=lambda row: (-abs(row.delta), row.name))
