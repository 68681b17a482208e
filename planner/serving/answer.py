"""The answer about one deployment: whether it is legal, what clients would see, and where the time goes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.serving.question.question import ServingQuestion
from planner.serving.stated import problems_of, unused_settings
from simulator.collectives.communicator import Fabric
from simulator.collectives.cost import CollectiveModel
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of
from simulator.serving.estimate import ServingEstimate, estimate_serving
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.server import move_seconds
from topology.errors import Infeasible
from topology.rates.groups import GroupShape

# Parts of the account besides those of a step.
BETWEEN, WAITING, OUTSIDE, READING, MOVING = "prompts_between", "waiting", "outside", "reading", "moving"
# Ranks of one node, with NVLink between all of them where there are more than two, that vLLM 0.33's own all-reduce
# (vllm/distributed/device_communicators/custom_all_reduce.py) and SGLang's, which is the same, run on. Two GPUs on PCIe
# are costed as with NCCL.
WORLD_SIZES = (2, 4, 6, 8)
PROGRAMS = ("vllm", "sglang")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Seconds by part. A mean step of one engine's batch continues `sequences` answers with `context` tokens each.

    `token_s` adds up to the mean time per token: the parts of such a step, and the time that other requests' prompts
    add. `first_s` adds up to the mean time to the first token: outside the GPUs, waiting, reading the prompt, and
    moving its cache. `reading_s` has the parts of reading.
    """

    sequences: float
    context: float
    token_s: dict[str, float]
    first_s: dict[str, float]
    reading_s: dict[str, float]


def serving_account(question: ServingQuestion, deployment: Deployment, estimate: ServingEstimate) -> Account:
    """Return the account of an estimate."""
    model, cluster, traffic = question.model, question.cluster, question.traffic
    seen, pool = estimate.latency, deployment.pool
    writing = seen.requests_per_s * max(0.0, seen.e2e_s.mean - seen.ttft_s.mean)
    sequences = max(1.0, writing / (pool.engines * pool.pp))
    context = traffic.prompt.mean + traffic.output.mean / 2
    decode = ForwardPass(model, cluster, deployment, pool)
    token = decode.parts(prompt_tokens=0, pairs=0.0, sequences=sequences, keys=sequences * context)
    if traffic.output.mean > 1:
        token[BETWEEN] = seen.tpot_s.mean - sum(token.values())

    reader = decode if deployment.prefill is None else ForwardPass(model, cluster, deployment, deployment.prefill)
    cached = int(traffic.prompt.mean * traffic.cached_prompt)
    tokens = max(1, traffic.prompt.mean - cached)
    reading = reader.parts(prompt_tokens=tokens, pairs=tokens * (cached + (tokens + 1) / 2), sequences=0, keys=0.0)
    outside = engine_of(deployment.engine).outside_s(traffic.prompt.mean)
    first = {OUTSIDE: outside, READING: sum(reading.values())}
    if deployment.prefill is not None and BETWEEN in token:
        first[MOVING] = move_seconds(model, cluster, deployment)(traffic.prompt.mean)
    first[WAITING] = seen.ttft_s.mean - sum(first.values())
    return Account(sequences=sequences, context=context, token_s=token, first_s=first, reading_s=reading)


def nccl_because(question: ServingQuestion, pool: Pool) -> str:
    """Return why an engine uses NCCL for all-reduces, with the time of one for a token; empty if it does not."""
    if pool.tp == 1 or engine_of(question.engine).program not in PROGRAMS:
        return ""
    node = question.cluster.gpus_per_node
    shape = GroupShape(ranks=pool.tp, ranks_per_node=min(pool.tp, node))
    if not question.custom_all_reduce:
        reason = "the engine is set so"
    elif pool.tp > node:
        reason = f"{pool.tp} ranks are on several nodes"
    elif pool.tp not in WORLD_SIZES:
        reason = f"it is written for {', '.join(map(str, WORLD_SIZES))} ranks, not {pool.tp}"
    elif CollectiveModel(question.cluster).communicator(shape).fabric is Fabric.PCIE:
        reason = "NVLink does not connect all of its GPUs"
    else:
        return ""
    costs = ForwardPass(question.model, question.cluster, question.deployment(pool), pool)
    seconds = costs.reduced_s(1) / costs.reductions()
    return (
        f"custom all-reduce is off, as {reason}: NCCL's takes {1e6 * seconds:.0f} us for one token,"
        f" {costs.reductions()} times a step"
    )


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
