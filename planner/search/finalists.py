"""The last round: simulate the plans that are too close for the closed form, and order them by the simulation.

Estimates stay those of the closed form, which `planner validate` compares with measurements. The simulation adds what
the closed form has no formula for: uneven stages that stall each other, contention, late hosts, allocator
fragmentation. Plans that do not fit in the simulation are listed after those that do. How many plans are simulated
depends on the length of their programs and not on a clock, so that the same question has the same answer on any
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from simulator.closed_form.screening import Screening
from simulator.config.estimate import Estimate
from simulator.config.plan import Plan
from simulator.lowering.block_code import Detail
from simulator.lowering.simulation import program_length, simulate_plan

# Instructions of all simulated programs together: about a second of simulation on one core.
MAX_INSTRUCTIONS = 24_000
# Instructions above which a program is not simulated in a search, even as one of two: about five seconds.
MAX_PROGRAM_LENGTH = 150_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A plan with its estimate and, if it was simulated, the simulated step and memory."""

    plan: Plan
    estimate: Estimate
    simulated_s: float | None = None
    simulated_bytes: float | None = None  # reserved on the worst rank

    def fits_simulated(self) -> bool:
        """Return whether it fits in the simulation; True if it was not simulated."""
        return self.simulated_bytes is None or self.simulated_bytes <= self.estimate.memory.capacity_bytes


def _report(progress: Callable[[str], None], turn: str, line: str) -> None:
    progress(f"{turn}: {line}")


def order_by_simulation(
    screening: Screening,
    finalists: Sequence[Finalist],
    *,
    within: float,
    progress: Callable[[str], None] | None = None,
) -> list[Finalist]:
    """Return `finalists`, with those that are `within` of the first (relative) simulated and ordered by the result.

    All are simulated with the same detail, since details differ by more than plans do: layer by layer if at least two
    are within the budget, otherwise by whole stages. The others follow in their order. If fewer than two can be
    simulated, nothing is.
    """
    limit = finalists[0].estimate.step_s.value * (1 + within)
    close = [finalist for finalist in finalists if finalist.estimate.step_s.value <= limit]
    model, workload = screening.scenario.model, screening.scenario.workload

    def affordable(detail: Detail) -> int:
        """Return how many of the first plans are within the budget; by whole stages at least two, unless too long."""
        spent, count = 0.0, 0
        for finalist in close:
            length = program_length(model, workload, finalist.plan, detail)
            spent += length
            if spent > MAX_INSTRUCTIONS and not (detail is Detail.STAGE and count < 2 and length <= MAX_PROGRAM_LENGTH):
                break
            count += 1
        return count

    detail, chosen = Detail.LAYER, affordable(Detail.LAYER)
    if chosen < 2:
        detail, chosen = Detail.STAGE, affordable(Detail.STAGE)
    if chosen < 2:
        return list(finalists)
    simulated = []
    for number, finalist in enumerate(finalists[:chosen], start=1):
        turn = f"simulating plan {number} of {chosen}"
        run = simulate_plan(
            screening.scenario,
            finalist.plan,
            detail=detail,
            spans=False,
            progress=None if progress is None else partial(_report, progress, turn),
        )
        simulated.append(
            replace(
                finalist,
                simulated_s=run.estimate.step_s.value,
                simulated_bytes=run.estimate.memory.reserved_bytes,
            )
        )
    # A stable sort: ties keep their order.
    ordered = sorted(simulated, key=lambda finalist: (not finalist.fits_simulated(), finalist.simulated_s or 0.0))
    return [*ordered, *finalists[chosen:]]
