"""What a search has found, and its account: how many plans were looked at, and the gap to the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.question.prediction import Method
from planner.search.finalists import Finalist, certainty
from planner.search.plan_space.branch_and_bound import Explored
from planner.search.plan_space.candidates import Nodes
from planner.search.result import OPTIMAL, SearchStats
from planner.search.stages.assignment import AssignedPipelines
from simulator.config.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`plans` to list; `may_fit` has the fastest plan of all and the fastest that probably fits, if they are not
    listed. `everything` searched all plans that may fit, `asked` the listed ones, for which stages were `assigned`.
    """

    plans: list[Plan]
    may_fit: list[Plan]
    everything: Explored
    asked: Explored
    assigned: AssignedPipelines


def search_stats(
    nodes: Nodes,
    found: Found,
    objective: str,
    finalists: Sequence[Finalist],
    *,
    seconds: float,
) -> SearchStats:
    """Return the account of the search, with the gap to the optimum."""
    memory, explored, everything = objective == "memory", found.asked, found.everything
    if not memory and found.assigned.left_s < explored.bound:  # pipelines with other stages that were not tried
        explored = replace(explored, complete=False, bound=found.assigned.left_s)
    level = certainty(finalists[0])
    listed = min(one.estimate.step_s.value for one in finalists if certainty(one) == level)
    status = OPTIMAL if explored.complete else "best found within the time limit"
    if not len(explored):  # only pipelines with other stages than the runtime's fit, and not all of them were tried
        status = "best of the pipelines tried"
        explored = replace(explored, complete=False, bound=0.0 if memory else explored.floor_s)
    values = explored.reserved_bytes if memory else explored.step_s
    value = float(values.min(initial=np.inf)) if len(values) else listed
    if not memory:  # the simplest plan of a tie may be its slowest
        value = max(value, finalists[0].estimate.step_s.value)
    gap = 0.0 if explored.complete else value / explored.bound - 1 if explored.bound > 0 else float("inf")
    slowest = everything.step_s.max(initial=0.0)
    costed = len(everything) + (0 if explored is everything else int((explored.step_s > slowest).sum()))
    beaten = everything.fitting - costed
    pruned = {**nodes.pruned, **({"slower at best than the plans listed": beaten} if beaten else {})}
    return SearchStats(
        candidates=everything.legal + sum(nodes.rejected.values()) + sum(nodes.pruned.values()),
        legal=everything.legal,
        fitting=everything.fitting,
        costed=costed,
        pruned=pruned,
        simulated=sum(finalist.method is Method.SIMULATION for finalist in finalists),
        seconds=seconds,
        status=status,
        objective=objective,
        bound_s=explored.floor_s if memory else min(explored.bound, listed),
        gap=gap,
        filled=found.assigned.solved,
        filled_gap=found.assigned.gap,
    )
