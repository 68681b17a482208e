"""The candidates of a tuning: every legal plan that could be the best, with its predicted time and memory.

Branch and bound (`planner.search.plan_space`) removes plans that cannot be among the fastest few hundred; the others
are costed as in the simulation. Plans whose predicted memory slightly exceeds the available memory stay candidates,
since predictions of memory are as uncertain as those of time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.question.question import Question
from planner.search.plan_space.branch_and_bound import BestFirst, Explored
from planner.search.plan_space.candidates import enumerate_nodes, plan_of
from planner.search.plan_space.screened import Screened, grids_of
from simulator.analytical.estimates import estimate_plans
from simulator.bounds.screening import Screening
from simulator.calibration.intervals import replayed_memory_factors
from simulator.columns.plan_columns import concatenate
from simulator.config.estimate import Estimate
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.memory.estimate import with_replay
from topology import codec
from topology.errors import Infeasible

FASTEST = 160  # plans that are costed by the analytical model
GRIDS = 40  # and the fastest plan for each of this many sets of degrees, in case a whole family of plans fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan under a runtime, and its predictions before any trial."""

    plan: Plan
    runtime: Runtime
    estimate: Estimate

    @property
    def key(self) -> str:
        """The key of a plan in the state of a tuning."""
        return codec.fingerprint((self.plan, self.runtime))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """`plans`, fastest predicted first; `legal` is the number of all legal plans."""

    plans: tuple[Candidate, ...]
    legal: int

    def __len__(self) -> int:
        return len(self.plans)

    def row(self, key: str) -> int | None:
        """Return the index of a plan; None if it is not a candidate."""
        return next((row for row, one in enumerate(self.plans) if one.key == key), None)


def candidates_of(
    question: Question,
    *,
    fastest: int = FASTEST,
    progress: Callable[[str], None] | None = None,
) -> Candidates:
    """Return the plans that could be the best. Raises Infeasible (exit 3) if no plan is legal or none may fit."""
    nodes = enumerate_nodes(question)
    if not len(nodes):
        why = ", ".join(f"{name} {count}" for name, count in list(nodes.rejected.items())[:4])
        raise Infeasible(
            f"no plan for {question.count} GPUs is legal in {question.framework.title}",
            why=f"rejected: {why}" if why else "",
            remedy="planner suggest with the same flags says what to change",
        )
    # The prediction of memory may be too high by as much as its range states.
    screening = Screening(question, share=1 / replayed_memory_factors()[0])
    screened = Screened(screening, nodes, question.framework.recomputes, progress=progress)
    best, apart = (
        BestFirst(screening, screened, keep=keep, one_per_grid=one_per_grid, progress=progress).run()
        for keep, one_per_grid in ((fastest, False), (GRIDS, True))
    )
    if not len(best):
        raise Infeasible(
            f"no plan of {question.model.name} fits {question.count} GPUs of {question.cluster.name}",
            remedy="planner suggest with the same flags says what is missing, and how many GPUs would do",
        )
    columns = concatenate([best.columns.take(_fastest(best)[:fastest]), apart.columns.take(_fastest_of_grids(apart))])
    plans = list(dict.fromkeys(plan_of(columns, row, question.cluster) for row in range(len(columns))))
    table = estimate_plans(question, plans)
    return in_order(
        [
            Candidate(plan=plan, runtime=question.runtime, estimate=with_replay(question, plan, table.estimate(i)))
            for i, plan in enumerate(plans)
        ],
        legal=best.legal,
    )


def _fastest(found: Explored) -> NDArray[np.intp]:
    """Return rows, fastest first."""
    return np.argsort(found.step_s, kind="stable")


def _fastest_of_grids(found: Explored) -> NDArray[np.intp]:
    """Return the fastest row of each set of degrees, fastest first."""
    order = _fastest(found)
    _, first = np.unique(grids_of(found.columns)[order], return_index=True)
    return order[np.sort(first)][:GRIDS]


def in_order(plans: Sequence[Candidate], *, legal: int) -> Candidates:
    """Return candidates sorted by predicted time, fastest first."""
    known = [one for one in plans if math.isfinite(one.estimate.step_s.value)]
    return Candidates(plans=tuple(sorted(known, key=lambda one: one.estimate.step_s.value)), legal=legal)
