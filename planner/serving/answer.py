"""The answer about one deployment: whether it is legal, what clients would see, and where the time goes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.serving.account import Account, serving_account
from planner.serving.custom_reduce import nccl_because
from planner.serving.question.question import ServingQuestion
from planner.serving.stated import problems_of, unused_settings
from simulator.serving.deployment import Deployment
from simulator.serving.estimate import ServingEstimate, estimate_serving
from topology.errors import Infeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingAnswer:
    """`problems` say why it is not legal; then there is no estimate and no account."""

    question: ServingQuestion
    deployment: Deployment
    problems: tuple[str, ...]
    assumed: tuple[str, ...]
    estimate: ServingEstimate | None
    account: Account | None

    @property
    def meets(self) -> bool:
        """Whether the targets hold on average."""
        return self.estimate is not None and meets(self.question, self.estimate)


def meets(question: ServingQuestion, estimate: ServingEstimate) -> bool:
    """Return whether the question's targets hold on average, and go on to."""
    if (question.ttft_s or question.tpot_s) and not estimate.latency.keeps_up:
        return False
    first = not question.ttft_s or estimate.ttft_s.value <= question.ttft_s
    return first and (not question.tpot_s or estimate.tpot_s.value <= question.tpot_s)


def estimate_of(
    question: ServingQuestion, deployment: Deployment, *, judged: bool = False, until_s: float = math.inf
) -> ServingEstimate:
    """Return what clients of a deployment would see; if only `judged` by the targets, too little where one is missed.

    Raises Infeasible if a request does not fit, OutOfTime at `until_s` of `time.monotonic`.
    """
    return estimate_serving(
        question.model,
        question.cluster,
        deployment,
        question.traffic,
        ttft_s=question.ttft_s,
        tpot_s=question.tpot_s,
        judged=judged,
        until_s=until_s,
    )


def answer_deployment(
    question: ServingQuestion, deployment: Deployment, assumed: tuple[str, ...] = ()
) -> ServingAnswer:
    """Return the answer about one deployment, legal or not."""
    problems = problems_of(question, deployment)
    reason = "" if problems else nccl_because(question, deployment.pool)
    assumed += ((reason,) if reason else ()) + unused_settings(deployment)
    estimate = None
    if not problems:
        try:
            estimate = estimate_of(question, deployment)
        except Infeasible as problem:
            problems = (str(problem).splitlines()[0],)
    return ServingAnswer(
        question=question,
        deployment=deployment,
        problems=problems,
        assumed=(*question.assumed, *assumed),
        estimate=estimate,
        account=None if estimate is None else serving_account(question, deployment, estimate),
    )
