"""Compare a stated time of a configuration with the prediction: below, inside or above the range, and the likely
causes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from planner.configs.formats.configuration import Configuration
from planner.explain.plan_answer import PlanAnswer
from simulator.config.estimate import Estimate
from topology.errors import UserError

MOST_CAUSES = 3
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s|min)?")
_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}
MOVED = "exposed_communication"


class Side(StrEnum):
    BELOW = "below"
    INSIDE = "inside"
    ABOVE = "above"


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A stated and a predicted step. `error` is predicted over stated, less one; `causes` are sorted by likelihood.

    A step inside the interval needs no cause.
    """

    step_s: float
    side: Side
    error: float
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedRate:
    """The step time that a source states, in seconds or as tokens per second of all GPUs."""

    step_s: float | None = None
    tokens_per_s: float | None = None

    def seconds(self, tokens: float) -> float:
        """Return the seconds of a step with this number of tokens."""
        return self.step_s if self.step_s is not None else tokens / (self.tokens_per_s or 1.0)


def stated_rate(measured: str | None, tokens_per_s: float | None) -> StatedRate | None:
    """Return what a source states as a time (`9.2s`, `850ms`) or a rate; None without either.

    Raises UserError for both, and for a text that is no time.
    """
    if measured is None:
        return None if tokens_per_s is None else StatedRate(tokens_per_s=tokens_per_s)
    if tokens_per_s is not None:
        raise UserError("--measured and --tokens-per-s say the same", remedy="leave out one of them")
    return StatedRate(step_s=seconds_in(measured, "--measured"))


def seconds_in(text: str, flag: str) -> float:
    """Return the seconds that a flag says, `9.2s` or `850ms`. Raises UserError for anything else."""
    found = _TIME.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise UserError(f"{flag} {text[:40]!r} is no time", remedy="a number and a unit: 9.2s, 850ms")
    return float(found[1]) * _UNITS[found[2] or "s"]


def against(found: PlanAnswer, configuration: Configuration, stated: StatedRate) -> Against | None:
    """Return a stated step compared with the predicted one; None where there is no prediction."""
    estimate = found.estimate
    if estimate is None:
        return None
    workload = found.case.question.workload
    step_s = stated.seconds(workload.seq_len * workload.global_batch_size)
    side = Side.BELOW if step_s < estimate.step_s.low else Side.ABOVE if step_s > estimate.step_s.high else Side.INSIDE
    error = estimate.step_s.value / step_s - 1
    if side is Side.INSIDE:
        return Against(step_s=step_s, side=side, error=error)
    causes = _slower(found, estimate, step_s) if side is Side.ABOVE else _faster(found, estimate, step_s)
    unknown = (
        [f"fields that are not understood: {', '.join(configuration.unknown[:4])}"] if configuration.unknown else []
    )
    return Against(step_s=step_s, side=side, error=error, causes=(*unknown, *causes)[:MOST_CAUSES])


def _slower(found: PlanAnswer, estimate: Estimate, step_s: float) -> Iterator[str]:
    """Yield what could make a step as long as stated, depending on the sources of the prediction."""
    excess = step_s - estimate.step_s.value
    parts = estimate.breakdown_s
    moved, products = parts.get(MOVED, 0.0), parts.get("compute", 0.0)
    assumed = [line for line in found.case.assumed if "cluster" in line or _of_count(line)]
    for line in found.case.assumed:
        if "reduced while backward" in line or "gathered while forward" in line:
            yield f"it was assumed that {line}"
    if estimate.memory.fit_probability < 1.0 and not estimate.memory.fits:
        yield "memory does not fit as predicted: the run may have had smaller batches, or retries of the allocator"
    if moved > 0.05 * estimate.step_s.value:
        yield (
            f"links: exposed communication of {moved:.2g} s would have to take {(moved + excess) / moved:.1f} times as"
            " long"
        )
    if products > 0:
        yield f"products at {products / (products + excess):.0%} of the predicted rate, such as of GPUs at lower clocks"
    if assumed:
        yield f"another machine than was assumed: {assumed[0]}"
    yield "what is not part of a step: loading data, checkpoints, validation"


def _of_count(line: str) -> bool:
    """Return whether an assumption is about the number of GPUs."""
    return "GPUs" in line and not line.startswith("ranges of steps")


def _faster(found: PlanAnswer, estimate: Estimate, step_s: float) -> Iterator[str]:
    """Yield what could make a step as short as stated."""
    for line in found.case.assumed:
        if "sequence length" in line or "batch" in line or _of_count(line):
            yield f"less work or more GPUs than was assumed: {line}"
    rate = estimate.mfu * estimate.step_s.value / step_s
    if rate > 1:
        yield f"it would be {rate:.0%} of the GPU's peak: other tokens, GPUs or a larger model are counted"
    recomputed = estimate.breakdown_s.get("recompute", 0.0)
    if recomputed > 0:
        yield f"less recomputation than the file says: it is {recomputed:.2g} s of the step"
    yield f"faster kernels than those of {found.case.question.runtime.name} as described: MFU would be {rate:.0%}"
