"""Run requests through a deployment on SimPy: engines that step, clients that wait, caches that move between pools.

Between two events that change it, a batch of answers takes many similar steps; they are costed together, with their
mean context.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import simpy

from simulator.collectives.cost import CollectiveModel
from simulator.config.model import Model
from simulator.serving.batch import Answer, Batch, Step
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.kv_cache import cache_capacity
from simulator.serving.request_bytes import cache_bytes_per_token
from simulator.serving.traffic import Request, Traffic
from topology.cluster import Cluster
from topology.errors import Infeasible
from topology.rates.groups import GroupShape

Sink = Callable[[list[Answer]], None]


@dataclass(slots=True)
class Scheduler:
    """The process of one engine, which steps while there is work."""

    env: simpy.Environment
    costs: ForwardPass
    batch: Batch
    deliver: Sink
    wake: simpy.Event = field(init=False)
    busy_s: float = 0.0
    read_s: float = -math.inf  # when a step last read prompts
    idle: bool = False

    def __post_init__(self) -> None:
        self.wake = self.env.event()
        self.env.process(self._run())

    def add(self, answer: Answer) -> None:
        """Queue a request; if it can start, it ends the stretch of steps under way."""
        answer.queued_s = self.env.now
        self.batch.add(answer)
        if not self.wake.triggered and (self.idle or self.batch.admits_next()):
            self.wake.succeed()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env, batch = self.env, self.batch
        while True:
            if batch.idle:
                self.idle, self.wake = True, env.event()
                yield self.wake
                self.idle = False
                batch.seen_s = math.inf
            step = batch.next_step()
            begin = env.now
            if step.prompt_tokens:
                yield env.timeout(self._reading_s(step))
                self._saw(begin)
                self.read_s = env.now
                left = batch.finish_step(step, env.now)
            else:
                steps = yield from self._go_on()
                left = batch.write(steps, env.now)
            self.busy_s += env.now - begin
            if left:
                self.deliver(left)

    def _saw(self, began_s: float) -> None:
        """Record when the last step began: an engine that runs ahead builds the next step from requests that were there
        then.
        """
        if self.costs.engine.runs_ahead:
            self.batch.seen_s = began_s

    def _reading_s(self, step: Step) -> float:
        return self.costs.seconds(
            prompt_tokens=step.prompt_tokens,
            pairs=step.pairs,
            sequences=step.sequences,
            keys=step.keys,
            readers=len(step.readers),
            resumes=step.resumes,
            rested_s=self.env.now - self.read_s,
        )

    def _go_on(self) -> Generator[simpy.Event, Any, int]:
        """Continue answers until one ends or, at the end of a step, a request can start; return the number of steps."""
        env, begin, batch = self.env, self.env.now, self.batch
        ahead = int(self.costs.engine.runs_ahead)
        steps = batch.steps_to_next_end()
        if batch.admits_next():  # it arrived after this step was put together, so it joins the next
            steps = 1
        took = self._writing_s(steps)
        self.wake = env.event()
        yield env.timeout(took) | self.wake
        if env.now < begin + took:
            steps = min(steps, int((env.now - begin) / (took / steps)) + 1 + ahead)
            yield env.timeout(max(0.0, begin + self._writing_s(steps) - env.now))
        self._saw(env.now - (env.now - begin) / steps)
        return steps

    def _writing_s(self, steps: int) -> float:
        sequences = self.batch.writing
        middle = self.batch.keys + sequences * (steps - 1) / 2
        return steps * self.costs.seconds(prompt_tokens=0, pairs=0.0, sequences=sequences, keys=middle)


class EnginePool:
    """The engines of a pool. A request goes to the first engine with the least load, or to each in turn (`in_turn`).

    A heap has each engine's present load; outdated entries are dropped when they come first, so that a request need not
    look at thousands of engines.
    """

    def __init__(self, *, in_turn: bool = False) -> None:
        self.schedulers: list[Scheduler] = []
        self._turn = count() if in_turn else None
        self._loads: list[tuple[int, int]] = []  # heap: (load, place in `schedulers`)

    def start(self, env: simpy.Environment, costs: ForwardPass, batch: Batch, deliver: Sink) -> None:
        """Add an engine with an empty batch."""
        place = len(self.schedulers)
        self.schedulers.append(Scheduler(env, costs, batch, partial(self._left, place, deliver)))
        self._loads.append((0, place))

    def add(self, answer: Answer) -> None:
        """Queue a request at the engine with the least load, or at the next one if they take turns."""
        if self._turn is not None:
            self.schedulers[next(self._turn) % len(self.schedulers)].add(answer)
            return
        while self._loads[0][0] != self.schedulers[self._loads[0][1]].batch.load:
            heapq.heappop(self._loads)
        load, place = self._loads[0]
        heapq.heapreplace(self._loads, (load + 1, place))
        self.schedulers[place].add(answer)

    def _left(self, place: int, deliver: Sink, answers: list[Answer]) -> None:
        if self._turn is None:
            heapq.heappush(self._loads, (self.schedulers[place].batch.load, place))
        deliver(answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The result of a run. `answers` are in order of completion; `busy` is the share of time in which engines ran
    steps.
    """

    answers: tuple[Answer, ...]
    seconds: float
    busy: float
    preempted: int


class OutOfTime(Infeasible):
    """A simulation exceeded its time."""


def serve(
    model: Model,
    cluster: Cluster,
    deployment: Deployment,
    traffic: Traffic,
    *,
    begun: bool = False,
    until_s: float = math.inf,
) -> Served:
    """Run all requests of `traffic`. With `begun`, as many clients of a closed loop as there is room for are somewhere
    in their answers at the start, each at another place, as after a long time; otherwise all ask at once.

    Raises Infeasible where a request does not fit an empty cache, OutOfTime at `until_s` of `time.monotonic`.
    """
    env = simpy.Environment()
    requests = traffic.draw()
    engine = engine_of(deployment.engine)
    done: list[Answer] = []
    left = iter(requests[traffic.concurrency :] if traffic.concurrency and not traffic.trace else ())

    def begin(prompt: int, output: int, later_s: float = 0.0) -> None:
        cached = int(prompt * traffic.cached_prompt)
        answer = Answer(arrival_s=env.now, prompt=max(1, prompt - cached), output=output, cached=cached)
        if time.monotonic() > until_s:
            return  # many thousands may begin at once; the loop below raises OutOfTime
        outside_s = engine.outside_s(prompt) + later_s
        if outside_s:
            _after(env, outside_s, lambda: first.add(answer))
        else:  # what a client asks when its answer ends is there before the next step is put together
            first.add(answer)

    def finished(answers: Iterable[Answer]) -> None:
        for answer in answers:
            done.append(answer)
            following = next(left, None)
            if following is not None:
                begin(following.prompt, following.output)

    engines = partial(
        _engines, env, model, cluster, deployment, most=len(requests), length=traffic.usual, static=traffic.static
    )
    last = engines(deployment.pool, finished)
    first = last
    if deployment.prefill is not None:
        move = move_seconds(model, cluster, deployment)
        first = engines(deployment.prefill, lambda read: _hand_over(env, read, last, move, finished), reads_only=True)
    every = list({id(scheduler): scheduler for scheduler in (*first.schedulers, *last.schedulers)}.values())
    _refuse_what_never_fits(requests, every)
    if traffic.concurrency and not traffic.trace:
        wait_s = engine.first_wait_s(latent=model.latent is not None) if traffic.first else 0.0
        running = _room(last, traffic) if begun else 0
        for number, request in enumerate(requests[: traffic.concurrency]):
            if number < running:
                last.add(_midway(request, (number + 0.5) / min(running, traffic.concurrency)))
            else:
                begin(request.prompt, request.output, wait_s)
    else:
        env.process(_arrive(env, requests, begin))
    while len(done) < len(requests):
        if time.monotonic() > until_s:
            raise OutOfTime(
                f"{len(done):,} of {len(requests):,} requests were simulated within the time limit",
                remedy="a longer --time-limit, or fewer clients",
            )
        env.step()
    pools = [deployment.pool, *([] if deployment.prefill is None else [deployment.prefill])]
    return Served(
        answers=tuple(done),
        seconds=env.now,
        busy=sum(scheduler.busy_s for scheduler in every) / (sum(map(_batches, pools)) * env.now),
        preempted=sum(scheduler.batch.preempted for scheduler in every),
    )


def _room(pool: EnginePool, traffic: Traffic) -> int:
    """Return how many usual requests the engines of a pool answer at a time."""
    batches = [scheduler.batch for scheduler in pool.schedulers]
    return sum(min(batch.max_sequences, batch.capacity // traffic.usual) for batch in batches)


def _midway(request: Request, left: float) -> Answer:
    """Return a request with this share of its answer left to write, and all that comes before in the cache."""
    output = max(1, math.ceil(request.output * left))
    context = request.prompt + request.output - output
    return Answer(arrival_s=0.0, prompt=0, output=output, cached=context)


def _engines(
    env: simpy.Environment,
    model: Model,
    cluster: Cluster,
    deployment: Deployment,
    pool: Pool,
    deliver: Sink,
    *,
    most: int,
    length: int,
    static: bool,
    reads_only: bool = False,
) -> EnginePool:
    """Return the engines of a pool.

    Each stage of a pipeline works on a batch of its own, so an engine has as many batches as stages; a `static` one is
    in one stage at a time. A request goes to
    the first batch with the least load, so batches beyond the `most` concurrent requests would stay empty. `length` is
    that of a typical request. Separated engines get requests in turn, as NVIDIA Dynamo's frontend routes by default
    (`--router-mode` of its arguments: round-robin).
    """
    costs = ForwardPass(model, cluster, deployment, pool)
    room = cache_capacity(model, cluster, deployment, pool, length=length)
    lanes = 1 if static else pool.pp
    balanced = deployment.balance_every > 1 and pool.dp_attention > 1
    found = EnginePool(in_turn=deployment.prefill is not None)
    for _ in range(min(pool.engines * lanes, most)):
        batch = Batch(
            engine=costs.engine,
            capacity=room.tokens // lanes,
            max_sequences=max(1, costs.max_sequences * pool.dp_attention // lanes),
            max_tokens=costs.max_batched_tokens * pool.dp_attention,
            reads_only=reads_only,
            receive_every=deployment.balance_every if balanced else deployment.receive_every,
            balanced_ranks=pool.dp_attention if balanced else 0,
        )
        found.start(env, costs, batch, deliver)
    return found


def _batches(pool: Pool) -> int:
    """Return the number of batches in progress in a pool."""
    return pool.engines * pool.pp


def _after(env: simpy.Environment, delay_s: float, action: Callable[[], None]) -> None:
    """Call `action` once after a delay in seconds; one SimPy event, where a process would take three."""
    event = env.timeout(delay_s)
    event.callbacks.append(lambda _: action())


def _arrive(
    env: simpy.Environment, requests: Iterable[Any], begin: Callable[[int, int], None]
) -> Generator[simpy.Event, Any, None]:
    for request in requests:
        yield env.timeout(max(0.0, request.arrival_s - env.now))
        begin(request.prompt, request.output)


def _hand_over(
    env: simpy.Environment, read: list[Answer], last: EnginePool, move: Callable[[int], float], finished: Sink
) -> None:
    """Move read prompts to the generating engines, where each continues as an answer does. These send the first token
    as well: NVIDIA Dynamo streams answers from its decode workers
    (docs.nvidia.com/dynamo v0.9.1, architecture-flow), llm-d's prefill engines' tokens are dropped
    (inference-sim/inference-sim issue 930), and SGLang's router passes on what the decode engine streams
    (sgl-project/sglang issue 22853).
    """

    def moved(answer: Answer) -> None:
        answer.done_s = answer.first_s = -1.0
        answer.cached, answer.prompt, answer.read = answer.context, 0, 0
        answer.output, answer.written = answer.output - 1, 0
        last.add(answer)

    for answer in read:
        if answer.output <= 1:
            finished([answer])
        else:
            _after(env, move(answer.context), partial(moved, answer))


def move_seconds(model: Model, cluster: Cluster, deployment: Deployment) -> Callable[[int], float]:
    """Return the seconds to move the cache of this many tokens to another pool, from all GPUs of an engine at once."""
    pool = deployment.prefill or deployment.pool
    per_token = cache_bytes_per_token(model, pool, deployment.kv_cache)
    inside = deployment.gpus <= cluster.gpus_per_node
    shape = GroupShape(ranks=2, ranks_per_node=2 if inside else 1, siblings=pool.gpus)
    collectives = CollectiveModel(cluster)
    base, rate = (float(value) for value in collectives.time_s("send_recv", [1.0, 1e9], shape))
    return lambda tokens: base + (rate - base) * tokens * per_token / 1e9


def _refuse_what_never_fits(requests: Iterable[Any], schedulers: Iterable[Scheduler]) -> None:
    longest = max(request.prompt + request.output for request in requests)
    room = min(scheduler.batch.capacity for scheduler in schedulers)
    if longest > room:
        raise Infeasible(
            f"a request of {longest} tokens does not fit: the KV cache holds {room}",
            why="weights and activations leave no more of the GPUs' memory",
            remedy="spread the model over more GPUs, store weights or cache in fewer bits, or serve shorter requests",
        )
