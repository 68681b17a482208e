"""Where the time per token and the time to the first token go: parts that add up to the predicted times."""

from __future__ import annotations

from dataclasses import dataclass

from planner.serving.question.question import ServingQuestion
from simulator.serving.deployment import Deployment
from simulator.serving.engine import engine_of
from simulator.serving.estimate import ServingEstimate
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.server import move_seconds

# Parts of the account besides those of a step.
BETWEEN, WAITING, OUTSIDE, READING, MOVING = "prompts_between", "waiting", "outside", "reading", "moving"


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
