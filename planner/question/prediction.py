"""What a plan takes by the best that the program knows: simulated where its program is short, else by the closed form.

Memory is the caching allocator's, replayed. Which of the two, and in what detail, follows from the plan and its question alone. So a plan has one step and one memory
wherever it is shown: in a list, by itself, beside another, or explained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from planner.question.question import Question
from simulator.config.estimate import Estimate
from simulator.config.plan import Plan
from simulator.lowering.block_code import Detail
from simulator.lowering.simulation import program_length
from simulator.memory.estimate import with_replay

# Instructions up to which a step is simulated: layer by layer a quarter of a second, by whole stages two (one core).
BY_LAYER, BY_STAGE = 16_000, 60_000


class Method(StrEnum):
    """How a step was predicted."""

    SIMULATION = "simulation"
    CLOSED_FORM = "closed form"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The estimate of a plan, and how it was made."""

    estimate: Estimate
    method: Method


def predict(question: Question, plan: Plan, *, progress: Callable[[str], None] | None = None) -> Prediction:
    """Return what a legal plan takes. Raises as `Question.estimate` and `Question.simulate` do."""
    detail = detail_of(question, plan)
    if detail is None:
        estimate, method = question.estimate([plan]).estimate(0), Method.CLOSED_FORM
    else:
        estimate, method = question.simulate(plan, detail=detail, progress=progress).estimate, Method.SIMULATION
    return Prediction(estimate=with_replay(question, plan, estimate), method=method)


def simulated_length(question: Question, plan: Plan) -> float:
    """Return roughly how many instructions simulating a step takes; 0 where it is not simulated."""
    detail = detail_of(question, plan)
    return 0.0 if detail is None else program_length(question.model, question.workload, plan, detail)


def detail_of(question: Question, plan: Plan) -> Detail | None:
    """Return the finest detail in which the program of a step is short enough; None where none is.

    With state in host memory whole stages will not do: the host adds up gradients layer by layer, and waits for each.
    """
    details = ((Detail.LAYER, BY_LAYER), (Detail.STAGE, BY_STAGE))
    for detail, limit in details if plan.offload == "none" else details[:1]:
        if program_length(question.model, question.workload, plan, detail) <= limit:
            return detail
    return None
