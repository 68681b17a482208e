"""The last round: plans that the closed form cannot tell apart are simulated, and the simulation orders them.

Estimates stay those of the closed form, which is what `planner validate` holds against measurements; the simulation
adds what the closed form has no formula for: uneven stages that stall each other, contention, hosts that fall behind,
an allocator that fragments. A plan that does not fit there comes after those that do, quicker or not.
How many plans are simulated follows from the length of their programs, never from a clock: the same question has the
same answer on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from simulator.estimate import Estimate
from simulator.lowering.block_code import Detail
from simulator.plan import Plan
from simulator.screening import Screening
from simulator.simulation import program_length, simulate_plan

# Instructions that all finalists' programs may have together: about a second of simulation on one core.
BUDGET = 24_000
# Of a program that is too long to be simulated in a search, even as one of two: about five seconds.
MOST = 150_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    plan: Plan
    estimate: Estimate
    simulated_s: float | None = None
    simulated_bytes: float | None = None  # reserved on the worst rank

    def fits_simulated(self) -> bool:
        """Whether it fits where it was simulated; what was not simulated is taken at the closed form's word."""
        return self.simulated_bytes is None or self.simulated_bytes <= self.estimate.memory.capacity_bytes


def _say(progress: Callable[[str], None], turn: str, line: str) -> None:
    progress(f"{turn}: {line}")


def simulated_order(
    screening: Screening,
    finalists: Sequence[Finalist],
    *,
    within: float,
    progress: Callable[[str], None] | None = None,
) -> list[Finalist]:
    """Return `finalists` with those that are `within` of the first simulated, and ordered by what came out.

    All are simulated in one detail, since details differ by more than plans do: layer by layer where at least two come
    within the budget, else in whole stages. The others follow in the order they had. Where fewer than two can be
    simulated there is nothing to order.
    """
    limit = finalists[0].estimate.step_s.value * (1 + within)
    close = [finalist for finalist in finalists if finalist.estimate.step_s.value <= limit]
    model, workload = screening.model, screening.workload

    def affordable(detail: Detail) -> int:
        """How many of the first come within the budget; with whole stages at least two, unless they are too long."""
        spent, count = 0.0, 0
        for finalist in close:
            length = program_length(model, workload, finalist.plan, detail)
            spent += length
            if spent > BUDGET and not (detail is Detail.STAGE and count < 2 and length <= MOST):
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
            model,
            screening.cluster,
            workload,
            finalist.plan,
            screening.runtime,
            detail=detail,
            profile=screening.profile,
            spans=False,
            progress=None if progress is None else partial(_say, progress, turn),
        )
        simulated.append(
            replace(
                finalist,
                simulated_s=run.estimate.step_s.value,
                simulated_bytes=run.estimate.memory.reserved_bytes,
            )
        )
    # Stable: ties keep their order.
    ordered = sorted(simulated, key=lambda finalist: (not finalist.fits_simulated(), finalist.simulated_s or 0.0))
    return [*ordered, *finalists[chosen:]]
