"""The last round: plans that the closed form cannot tell apart are simulated, and the simulation orders them.

Estimates stay those of the closed form, which is what `planner validate` holds against measurements; the simulation
adds what the closed form has no formula for: uneven stages that stall each other, contention, hosts that fall behind.
How many plans are simulated follows from the length of their programs, never from a clock: the same question has the
same answer on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from simulator.estimate import Estimate
from simulator.lowering.block_code import Detail
from simulator.plan import Plan
from simulator.screening import Screening
from simulator.simulation import choose_detail, program_length, simulate_plan

# Instructions of all finalists together: a few seconds of simulation on one core.
BUDGET = 250_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    plan: Plan
    estimate: Estimate
    simulated_s: float | None = None


def simulated_order(
    screening: Screening,
    finalists: Sequence[Finalist],
    *,
    within: float,
    progress: Callable[[str], None] | None = None,
) -> list[Finalist]:
    """Return `finalists` with those that are `within` of the first simulated, and ordered by what came out.

    All are simulated in one detail, the coarsest that any of them needs, since details differ by more than plans do.
    The others follow in the order they had. A single candidate for the first place is not simulated: there is nothing
    to order.
    """
    limit = finalists[0].estimate.step_s.value * (1 + within)
    close = [finalist for finalist in finalists if finalist.estimate.step_s.value <= limit]
    model, workload = screening.model, screening.workload
    detail = Detail.STAGE
    if all(choose_detail(model, workload, finalist.plan) is Detail.LAYER for finalist in close):
        detail = Detail.LAYER
    chosen, spent = 0, 0.0
    for finalist in close:
        spent += program_length(model, workload, finalist.plan, detail)
        if chosen >= 2 and spent > BUDGET:
            break
        chosen += 1
    if chosen < 2:
        return list(finalists)
    simulated = []
    for number, finalist in enumerate(finalists[:chosen], start=1):
        if progress:
            progress(f"simulating plan {number} of {chosen}")
        run = simulate_plan(
            model,
            screening.cluster,
            workload,
            finalist.plan,
            screening.runtime,
            detail=detail,
            profile=screening.profile,
            spans=False,
        )
        simulated.append(replace(finalist, simulated_s=run.estimate.step_s.value))
    ordered = sorted(simulated, key=lambda finalist: finalist.simulated_s or 0.0)  # stable: ties keep their order
    return [*ordered, *finalists[chosen:]]
