"""What a plan takes by the best that the program knows: simulated where its program is short, else by the analytical
model.

Both read one description of a pass (`simulator.passes`). Memory is the caching allocator's, replayed. Which of the two
follows from the plan and its question alone. So a plan has one step and one memory wherever it is shown: in a list, by
itself, compared with another, or explained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from planner.question.question import Question
from simulator.config.estimate import Estimate
from simulator.config.plan import Plan
from simulator.lowering.simulation import program_length
from simulator.memory.estimate import with_replay
from simulator.memory.plan_memory import PlanMemory

# Instructions up to which a step is simulated, and about what one takes of a core.
MOST_INSTRUCTIONS = 16_000
INSTRUCTION_S = 2.5e-5


class Method(StrEnum):
    """How a step was predicted."""

    SIMULATION = "simulation"
    ANALYTICAL = "analytical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The estimate of a plan, and how it was made."""

    estimate: Estimate
    method: Method


def predict(
    question: Question,
    plan: Plan,
    *,
    held: PlanMemory | None = None,
    counted: Estimate | None = None,
    progress: Callable[[str], None] | None = None,
) -> Prediction:
    """Return what a legal plan takes; `held` is its memory where that has been replayed, `counted` its estimate by the
    analytical model where there is one. Raises as `Question.estimate` and `Question.simulate` do.
    """
    if simulated_length(question, plan):
        estimate, method = question.simulate(plan, progress=progress).estimate, Method.SIMULATION
    else:
        estimate, method = counted or question.estimate([plan]).estimate(0), Method.ANALYTICAL
    return Prediction(estimate=with_replay(question, plan, estimate, held), method=method)


def simulated_length(question: Question, plan: Plan) -> float:
    """Return roughly how many instructions simulating a step takes; 0 where it is not simulated."""
    length = program_length(question.model, question.workload, plan)
    return length if length <= MOST_INSTRUCTIONS else 0.0
