"""Requests answered while they arrive: the load generator and the loop of one server.

The scheduler is the simulation's own (`simulator.serving.batch`), with the engine `meshwright` of its table, so that
prediction and measurement differ in times, not in policy. All ranks run the same loop; only rank 0 reads the wall
clock, and broadcasts how many requests have arrived.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import Tensor

from executor.gpu.device import synchronize
from executor.launch.garbage_collection import PausedGarbageCollection
from executor.launch.records import Deadline
from executor.serving.cache import PAGE, CacheSlot
from executor.serving.engine import ENGINE, Engine
from executor.serving.shared_broadcast import SharedBroadcast
from simulator.serving.batch import Answer, Batch, Step
from simulator.serving.engine import engine_of
from simulator.serving.traffic import Request, Traffic


@dataclass(slots=True, eq=False)
class ServedRequest:
    """A request in the server: its answer, its slot and pages on the device, the step that wrote its first token (-1:
    none yet), and when it was done the time of each token.
    """

    answer: Answer
    held: CacheSlot | None = None
    began: int = -1
    at_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class HostGaps:
    """Time that the device waited for the host before steps without prompts: seconds in total, and the number of
    answers.
    """

    steps: int = 0
    answers: int = 0
    seconds: float = 0.0
    since: float | None = None  # when the device finished its work; None if it had none

    def issued(self, answers: int) -> None:
        """Count a step that the host has just launched."""
        if self.since is not None:
            self.steps += 1
            self.answers += answers
            self.seconds += time.perf_counter() - self.since


@dataclass(slots=True)
class PrefillSteps:
    """Steps that read prompts: their number, tokens and answers, and the seconds until they were issued and until they
    ended.
    """

    steps: int = 0
    tokens: int = 0
    answers: int = 0
    issued_s: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTimes:
    """An answer as its client saw it, in seconds since the start: arrival, first and last token."""

    arrival_s: float
    first_s: float
    done_s: float
    prompt: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What clients saw, answers in order of completion, and the time that the host cost.

    `itl_s`: at most about a thousand quantiles of the time between tokens. `host`: the totals of a `HostGaps`.
    """

    complete: bool
    asked: int
    seconds: float
    steps: int
    answers: tuple[AnswerTimes, ...]
    itl_s: tuple[float, ...]
    host: dict[str, float]
    reading: PrefillSteps


@dataclass(slots=True)
class Server:
    """Answers the requests of `traffic` with an engine; `broadcast` sends rank 0's values to the others, None for one
    rank.
    """

    engine: Engine
    traffic: Traffic
    max_batched_tokens: int
    broadcast: SharedBroadcast | None
    deadline: Deadline
    batch: Batch = field(init=False)
    ended_s: list[float] = field(default_factory=list)  # of each step, in which every answer that goes on gets a token
    held: list[CacheSlot] = field(default_factory=list)  # of answers that go on
    texts: dict[int, Tensor] = field(default_factory=dict)  # by number of tokens
    between: HostGaps = field(default_factory=HostGaps)
    reading: PrefillSteps = field(default_factory=PrefillSteps)

    def __post_init__(self) -> None:
        engine = self.engine
        self.batch = Batch(
            engine=engine_of(ENGINE),
            # Each sequence may leave its last page partly empty.
            capacity=(engine.cache.free_pages - engine.max_sequences) * PAGE,
            max_sequences=engine.max_sequences,
            max_tokens=self.max_batched_tokens,
        )

    def run(self) -> LoadResult:
        """Answer all requests, or as many as there is time for; return what clients saw."""
        requests = self.traffic.draw()
        self.texts = {prompt: self._text(prompt) for prompt in {request.prompt for request in requests}}
        closed = self.traffic.concurrency and not self.traffic.trace
        todo = deque(requests[self.traffic.concurrency :] if closed else requests)
        going: dict[int, ServedRequest] = {}
        done: list[ServedRequest] = []
        device = self.engine.model.device
        complete = True
        with PausedGarbageCollection():  # it begins with a collection, which takes a fifth of a second
            if self.engine.model.spread.group is not None:
                dist.barrier(group=self.engine.model.spread.group)
            synchronize(device)
            begin = time.perf_counter()
            for request in requests[: self.traffic.concurrency] if closed else ():
                self._add(request, 0.0, going)
            while todo or not self.batch.idle:
                if not closed:
                    self._arrivals(todo, begin, going)
                if len(self.ended_s) % 16 == 0 and not self._time_left():
                    complete = False
                    break
                if self.batch.idle:  # the next request arrives later
                    self.between.since = None
                    continue
                left = self._step(going, begin)
                for one in left:
                    done.append(one)
                    if closed and todo:
                        self._add(todo.popleft(), time.perf_counter() - begin, going)
        seconds, between = time.perf_counter() - begin, self.between
        gaps = [after - before for one in done for before, after in zip(one.at_s, one.at_s[1:], strict=False)]
        return LoadResult(
            complete=complete,
            asked=len(requests),
            seconds=seconds,
            steps=len(self.ended_s),
            answers=tuple(map(_times, done)),
            itl_s=tuple(sorted(gaps)[:: max(1, len(gaps) // 1000)]),
            host={"steps": between.steps, "answers": between.answers, "seconds": between.seconds},
            reading=self.reading,
        )

    def _add(self, request: Request, now_s: float, going: dict[int, ServedRequest]) -> None:
        answer = Answer(arrival_s=now_s, prompt=request.prompt, output=request.output)
        going[id(answer)] = ServedRequest(answer)
        self.batch.add(answer)

    def _arrivals(self, todo: deque[Request], begin: float, going: dict[int, ServedRequest]) -> None:
        """Add the requests that have arrived; if there is nothing else to do, wait for the next one."""
        arrived = 0
        if self.broadcast is None or self.broadcast.writes:
            if self.batch.idle and todo:
                self.between.since = None
                time.sleep(max(0.0, todo[0].arrival_s - (time.perf_counter() - begin)))
            now = time.perf_counter() - begin
            arrived = sum(1 for _ in takewhile(lambda request: request.arrival_s <= now, todo))
        for _ in range(self._agreed(arrived)):
            request = todo.popleft()
            self._add(request, request.arrival_s, going)

    def _agreed(self, value: int) -> int:
        """Return rank 0's value."""
        return value if self.broadcast is None else self.broadcast.agreed(value)

    def _time_left(self) -> bool:
        return bool(self._agreed(int(self.deadline.left_s > 0)))

    def _step(self, going: dict[int, ServedRequest], begin: float) -> list[ServedRequest]:
        """Take the scheduler's next step; return the requests that it finished."""
        step, began = self.batch.next_step(), time.perf_counter()
        ended: list[ServedRequest] = []
        if step.readers:
            parts, ended = self._parts(step, going)
            self.engine.mix(parts, self.held)
            self.reading.issued_s += time.perf_counter() - began
        else:
            self.engine.go_on(self.held)
            self.between.issued(len(self.held))
        synchronize(self.engine.model.device)
        self.between.since = time.perf_counter()
        if step.readers:
            reading = self.reading
            reading.steps += 1
            reading.tokens += step.prompt_tokens
            reading.answers += step.sequences
            reading.seconds += self.between.since - began
        now = time.perf_counter() - begin
        for one in ended:
            one.began = len(self.ended_s)
        self.ended_s.append(now)
        found = [going.pop(id(answer)) for answer in self.batch.finish_step(step, now)]
        for one in found:
            one.at_s = self.ended_s[one.began :]
            if one.held is not None:
                self.engine.release(one.held)
        if ended or found:
            self.held = [one.held for one in going.values() if one.began >= 0 and one.held is not None]
        return found

    def _parts(
        self, step: Step, going: dict[int, ServedRequest]
    ) -> tuple[list[tuple[CacheSlot, Tensor, int]], list[ServedRequest]]:
        """Return the part of each prompt that a step reads, as input of `Engine.mix`, and the requests whose prompts it
        completes.
        """
        parts, ended, budget = [], [], step.prompt_tokens
        for answer in step.readers:
            one = going[id(answer)]
            if one.held is None:
                one.held = self.engine.hold(answer.whole)
            took = min(answer.prompt - answer.read, budget)
            budget -= took
            parts.append((one.held, self.texts[answer.prompt][answer.read : answer.read + took], answer.read))
            ended += [one] if answer.read + took == answer.prompt else []
        return parts, ended

    def _text(self, tokens: int) -> Tensor:
        return torch.randint(self.engine.model.model.vocab, (tokens,), generator=torch.Generator().manual_seed(tokens))


def _times(one: ServedRequest) -> AnswerTimes:
    return AnswerTimes(
        arrival_s=one.answer.arrival_s,
        first_s=one.at_s[0],
        done_s=one.at_s[-1],
        prompt=one.answer.prompt,
        tokens=len(one.at_s),
    )
