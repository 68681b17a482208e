"""Figures of requests that keep coming. At a rate, the first, which find an idle server, and the last, after which no
more come, are left out, and so many are simulated that as many are in progress at the end as at the beginning. Clients
of a closed loop are somewhere in their answers at the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from simulator.config.model import Model
from simulator.serving.batch import Answer
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.kv_cache import cache_capacity
from simulator.serving.latency import Latency, latency
from simulator.serving.server import Served
from simulator.serving.traffic import Traffic
from topology.cluster import Cluster

LEAST = 200  # requests that figures are of, at least; bursts need more by the square of their variation
BEFORE, AFTER = 1.5, 0.5  # requests left out at the beginning and at the end, in multiples of those in progress
FIRST, MOST = 320, 1 << 13  # requests of the first simulation and of the longest
# Growth of the requests in progress, as a share of those that come meanwhile, from which a server is behind: chance
# makes less of it over as many requests as are counted.
GROWS = 0.05
# Requests by the most that can be answered, from which a server is behind without longer simulations: simulations
# answer up to 1.05 times `most_answered` (tests/simulator/serving/test_steady.py). So many requests show the rate.
SURELY_BEHIND, SHOWN = 1.06, 1 << 11
HALVINGS = 6  # of a full batch: a host that takes long for each answer is sooner done with fewer


@dataclass(frozen=True, slots=True)
class Window:
    """The requests of a simulation that count. `needed`: how many to simulate so that they are steady."""

    answers: tuple[Answer, ...]
    needed: int
    grows: bool


def steady_latency(
    traffic: Traffic,
    simulated: Callable[[int], Served],
    most_per_s: float,
    *,
    ttft_s: float = 0.0,
    tpot_s: float = 0.0,
    judged: bool = False,
) -> Latency:
    """Return the figures of an open loop; `simulated` runs so many of its requests.

    `most_per_s` is the number of requests that can be answered a second. Where fewer are answered than come, figures
    are those of the requests simulated: each further one waits longer. Targets are seconds; 0 is none. If figures are
    only `judged` by them, no more is simulated where the first requests miss one, since later ones wait longer.
    """
    rate = traffic.request_rate
    hopeless = rate > SURELY_BEHIND * most_per_s
    least = min(MOST // 2, LEAST * max(1, round(traffic.shape**2)))
    count = SHOWN if hopeless and not judged else max(FIRST, least)
    while True:
        served = simulated(count)
        window = _window(served.answers, rate, least)
        kept = Served(answers=window.answers, seconds=served.seconds, busy=served.busy, preempted=served.preempted)
        found = latency(kept, ttft_s=ttft_s, tpot_s=tpot_s)
        if hopeless or count >= MOST or (count >= window.needed and not window.grows):
            break
        if judged and (0 < ttft_s < found.ttft_s.mean or 0 < tpot_s < found.tpot_s.mean):
            break
        count = min(MOST, max(2 * count, window.needed))
    if hopeless or window.grows:
        answered = count / served.seconds
        return replace(
            found,
            output_tokens_per_s=answered * traffic.output.usual,
            requests_per_s=answered,
            keeps_up=False,
        )
    return replace(found, output_tokens_per_s=rate * traffic.output.usual, requests_per_s=rate)


def loop_latency(served: Served, clients: int, *, ttft_s: float = 0.0, tpot_s: float = 0.0) -> Latency:
    """Return the figures of a closed loop that had begun before: of its requests but the first and the last of each
    client. The rate is that of Little's law.
    """
    came = sorted(served.answers, key=lambda answer: answer.arrival_s)
    found = latency(replace(served, answers=tuple(came[clients:-clients])), ttft_s=ttft_s, tpot_s=tpot_s)
    rate = clients / found.e2e_s.mean
    tokens = fmean(answer.tokens for answer in came[clients:-clients])
    return replace(found, requests_per_s=rate, output_tokens_per_s=rate * tokens)


def _window(answers: Sequence[Answer], rate: float, least: int) -> Window:
    """Return the requests that count, at least so many if enough came, of those that came at `rate` a second."""
    came = sorted(answers, key=lambda answer: answer.arrival_s)
    count = len(came)
    seconds = float(np.mean([answer.done_s - answer.arrival_s for answer in came[count // 2 :]]))
    within = rate * seconds  # requests in progress at a time (Little's law)
    before, after = min(count // 2, math.ceil(BEFORE * within)), min(count // 4, math.ceil(AFTER * within))
    kept = came[before : count - after]
    done = np.sort([answer.done_s for answer in came])
    ends = [kept[0].arrival_s, kept[-1].arrival_s]
    left = np.searchsorted(done, ends, side="right")
    growth = (len(kept) - 1) - int(left[1] - left[0])
    needed = math.ceil((BEFORE + AFTER) * within + least)
    return Window(answers=tuple(kept), needed=needed, grows=growth > GROWS * len(kept))


def most_answered(model: Model, cluster: Cluster, deployment: Deployment, traffic: Traffic) -> float:
    """Return how many requests a second a deployment can answer at most, with the best size of batches all the
    time.
    """
    writing = _pool_answers(model, cluster, deployment, deployment.pool, traffic, reads=deployment.prefill is None)
    if deployment.prefill is None:
        return writing
    reading = _pool_answers(model, cluster, deployment, deployment.prefill, traffic, writes=False)
    return min(writing, reading)


def _pool_answers(
    model: Model,
    cluster: Cluster,
    deployment: Deployment,
    pool: Pool,
    traffic: Traffic,
    *,
    reads: bool = True,
    writes: bool = True,
) -> float:
    """Return the requests a second that a pool answers; the inverse of one's seconds, of its prompt and of its share of
    steps.
    """
    costs = ForwardPass(model, cluster, deployment, pool)
    prompt, output = traffic.prompt.usual, traffic.output.usual
    cached = int(prompt * traffic.cached_prompt)
    fresh = max(1, prompt - cached)

    def step(sequences: int, prompts: int) -> float:
        pairs = prompts * fresh * (cached + (fresh + 1) / 2)
        keys = sequences * (prompt + output / 2)
        tokens = prompts * fresh
        return costs.seconds(prompt_tokens=tokens, pairs=pairs, sequences=sequences, keys=keys, readers=prompts)

    many = max(1, costs.max_batched_tokens * pool.dp_attention // fresh)
    reading = step(0, many) / many if reads else 0.0
    room = cache_capacity(model, cluster, deployment, pool, length=traffic.usual).tokens // pool.pp
    full = min(costs.max_sequences * pool.dp_attention // pool.pp, int(room / (prompt + output / 2)))

    def each(sequences: int) -> float:
        """Return the seconds of a batch for each of its answers."""
        alone = step(sequences, 0)
        if not reads or not costs.engine.mixes:
            return output * alone / sequences + reading
        prompts = max(1, round(sequences / output))
        added = (step(sequences, prompts) - alone) / prompts  # less than `reading` where the host takes longer
        return output * alone / sequences + added

    seconds = min(each(max(1, full >> halved)) for halved in range(HALVINGS + 1)) if writes else reading
    return pool.engines * pool.pp / seconds
