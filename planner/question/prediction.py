"""The best prediction of a plan: simulated if its program is short, else by the analytical model.

Both use the same description of passes (`simulator.passes`). Memory is replayed through the caching allocator. The
choice of method depends on the plan and its question only, so a plan has the same step and memory wherever it is shown:
in a list, alone, compared with another, or explained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from planner.question.question import Question
from simulator.analytical.estimates import Counted
from simulator.config.estimate import Estimate
from simulator.config.plan import Plan
from simulator.lowering.simulation import program_length, ring_hops
from simulator.memory.estimate import with_replay
from simulator.memory.plan_memory import PlanMemory

# Most instructions of a step that is simulated, and seconds of a core per instruction.
MOST_INSTRUCTIONS = 16_000
INSTRUCTION_S = 2.5e-5


class Method(StrEnum):
    """How a step was predicted."""

    SIMULATION = "simulation"
    ANALYTICAL = "analytical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The estimate of a plan, and the method used."""

    estimate: Estimate
    method: Method


def predict(
    question: Question,
    plan: Plan,
    *,
    held: PlanMemory | None = None,
    counted: Counted | None = None,
    progress: Callable[[str], None] | None = None,
) -> Prediction:
    """Return the prediction of a legal plan. Pass `held`, its replayed memory, and `counted`, its row of a table of
    estimates, if they are known. Raises as `Question.estimate` and `Question.simulate` do.
    """
    if simulated_length(question, plan):
        estimate = question.simulate(plan, links=False, counted=counted, progress=progress).estimate
        method = Method.SIMULATION
    else:
        estimate = (counted or Counted(question.estimate([plan]), 0)).estimate
        method = Method.ANALYTICAL
    return Prediction(estimate=with_replay(question, plan, estimate, held), method=method)


def simulated_length(question: Question, plan: Plan) -> float:
    """Return the approximate number of instructions to simulate a step; 0 if it is not simulated."""
    length = program_length(question.model, question.workload, plan)
    if length <= MOST_INSTRUCTIONS and plan.cp > 1:
        length = program_length(question.model, question.workload, plan, hops=ring_hops(question, plan))
    return length if length <= MOST_INSTRUCTIONS else 0.0
