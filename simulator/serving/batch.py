"""One engine's requests between steps: those running, those waiting, and the work of the next step.

It follows the engine's policy: answers continue first and prompts fill the rest of a step (`mixes`), or prompts run
alone while answers wait. A request starts when the cache has room.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from simulator.serving.engine import Engine


@dataclass(slots=True, eq=False)
class Answer:
    """One request in the server. Times are seconds since the start; -1: not yet."""

    arrival_s: float
    prompt: int  # tokens of the prompt to read, without those in the prefix cache; 0: its cache came from elsewhere
    output: int
    cached: int = 0  # tokens of the prompt in the prefix cache
    read: int = 0  # of the prompt
    written: int = 0
    first_s: float = -1.0
    done_s: float = -1.0
    tokens: int = 0  # tokens of the whole answer, whether or not it was stopped or moved
    queued_s: float = 0.0  # when a scheduler received it
    joined: int = 0  # step number of the batch when its answer began

    def __post_init__(self) -> None:
        self.tokens = self.output

    @property
    def context(self) -> int:
        return self.cached + self.read + self.written

    @property
    def whole(self) -> int:
        """Tokens in the cache at the end."""
        return self.cached + self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step: prompt tokens, their pairs of query and key, numbers of prompts and of answers."""

    prompt_tokens: int
    pairs: float
    readers: tuple[Answer, ...]
    sequences: int
    keys: float

    @property
    def resumes(self) -> bool:
        """Whether it reads a prompt that an earlier step began, or whose beginning the prefix cache has."""
        return any(answer.cached or answer.read for answer in self.readers)


@dataclass(slots=True)
class Batch:
    """The queue of one scheduler. `capacity` is the number of tokens that its cache holds."""

    engine: Engine
    capacity: int
    max_sequences: int
    max_tokens: int
    reads_only: bool = False  # answers are moved to another pool after their first token
    receive_every: int = 1  # steps without a prompt between two looks at new requests
    balanced_ranks: int = 0  # ranks that read prompts together, or every `receive_every` steps
    waiting: deque[Answer] = field(default_factory=deque)
    reading: list[Answer] = field(default_factory=list)
    writing: int = 0  # answers in progress
    steps: int = 0  # tokens by which answers have continued so far
    held: int = 0  # tokens of the cache in use or, where answers are reserved, promised
    keys: int = 0  # tokens of context of all answers in progress
    began: list[Answer] = field(default_factory=list)  # in progress, and their first token comes with the next step
    preempted: int = 0
    arrived: deque[Answer] = field(default_factory=deque)  # arrived, but not yet seen by the scheduler
    unseen_steps: int = 0
    seen_s: float = math.inf  # later requests join the step after the next
    _ends: list[tuple[int, int, Answer]] = field(default_factory=list)  # heap: (step of its last token, order, answer)
    _order: count[int] = field(default_factory=count)

    def add(self, answer: Answer) -> None:
        later = self.receive_every > 1 and not self.idle
        (self.arrived if later else self.waiting).append(answer)
        if later and self._all_ranks_read():
            self._see()

    def _receive(self) -> None:
        """Look at arrived requests, if it is time to or there is nothing else to do."""
        if self.unseen_steps >= self.receive_every or not (self.waiting or self.reading or self.writing):
            self._see()

    def _see(self) -> None:
        self.waiting.extend(self.arrived)
        self.arrived.clear()
        self.unseen_steps = 0

    def _all_ranks_read(self) -> bool:
        """Return whether ranks need not wait for each other's prompts: each has one, or not all have answers.

        A request goes to the rank that an answer has left, so the number of requests until all have one is that of the
        coupon collector's problem.
        """
        if not self.balanced_ranks:
            return False
        set_of_all = sum(self.balanced_ranks / missing for missing in range(1, self.balanced_ranks + 1))
        return len(self.arrived) >= set_of_all or self.writing < self.balanced_ranks

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.reading or self.writing or self.arrived)

    @property
    def load(self) -> int:
        return len(self.arrived) + len(self.waiting) + len(self.reading) + self.writing

    def admits_next(self) -> bool:
        """Return whether the first waiting request can start at once."""
        if not self.waiting or len(self.reading) + self.writing >= self.max_sequences:
            return False
        return self.held + self._needs(self.waiting[0]) <= self.capacity or not (self.reading or self.writing)

    @property
    def ready(self) -> bool:
        """Whether the first waiting request can be part of the next step."""
        return self.waiting[0].queued_s <= self.seen_s or not (self.reading or self.writing)

    def _needs(self, answer: Answer) -> int:
        if self.reads_only or not self.engine.reserves_output:
            return answer.cached + answer.prompt + (answer.prompt > 0)
        return answer.whole

    def _admit(self) -> None:
        """Move requests from the queue into the batch while there is room. One without a prompt to read continues at
        once, next to the answers in progress (process_prebuilt of sgl-project/sglang, schedule_batch; generation
        requests of TensorRT-LLM's py_executor; a query of one token counts as an answer in vLLM).
        """
        while self.admits_next() and self.ready:
            answer = self.waiting.popleft()
            self.held += self._needs(answer)
            if answer.prompt:
                self.reading.append(answer)
            else:
                self.began.append(answer)
                self._continue(answer)

    def next_step(self) -> Step:
        """Return the work of the next step; the queue does not change until `finish_step`."""
        self._receive()
        self._admit()
        budget = self.max_tokens
        sequences = self.writing
        if self.engine.mixes:
            budget -= sequences
        chosen: list[Answer] = []
        tokens, pairs = 0, 0.0
        for answer in self.reading:
            left = answer.prompt - answer.read
            if left > budget - tokens:
                if not self.engine.chunks and chosen:
                    break
                left = min(left, budget - tokens) if self.engine.chunks else left
            if left <= 0:
                break
            before = answer.cached + answer.read
            pairs += left * (before + (left + 1) / 2)
            tokens += left
            chosen.append(answer)
            if tokens >= budget:
                break
        if tokens and not self.engine.mixes:
            sequences = 0
        return Step(tokens, pairs, tuple(chosen), sequences, float(self.keys) if sequences else 0.0)

    def finish_step(self, step: Step, now_s: float) -> list[Answer]:
        """Complete a step that ended at `now_s`; return the answers that left."""
        self.unseen_steps += self.receive_every if step.prompt_tokens and not self.balanced_ranks else 1
        left: list[Answer] = []
        if step.sequences:
            self._write(1, now_s, left)
        budget = step.prompt_tokens
        for answer in step.readers:
            took = min(answer.prompt - answer.read, budget)
            budget -= took
            answer.read += took
            if answer.read < answer.prompt:
                continue
            self.reading.remove(answer)
            if answer.first_s < 0:
                answer.first_s = now_s
            answer.written += 1
            if self.reads_only or answer.written >= answer.output:
                self._leave(answer, now_s, left)
            else:
                self._continue(answer)
        return left

    def _continue(self, answer: Answer) -> None:
        """Count a request among the answers in progress."""
        self.writing += 1
        self.keys += answer.context
        answer.joined = self.steps
        heapq.heappush(self._ends, (self.steps + answer.output - answer.written, next(self._order), answer))

    def steps_to_next_end(self) -> int:
        """Return the number of steps for which all answers can continue before one begins or ends or the cache is
        full.
        """
        steps = 1 if self.began else self._ends[0][0] - self.steps
        if not self.engine.reserves_output:
            steps = min(steps, max(1, (self.capacity - self.held) // self.writing))
        if self.receive_every > 1:
            steps = min(steps, max(1, self.receive_every - self.unseen_steps))
        return steps

    def write(self, steps: int, now_s: float) -> list[Answer]:
        """Continue all answers by `steps` tokens, the last of them at `now_s`; return those that ended."""
        left: list[Answer] = []
        self.unseen_steps += steps
        self._write(steps, now_s, left)
        return left

    def _write(self, steps: int, now_s: float, left: list[Answer]) -> None:
        reserved = self.engine.reserves_output
        self.steps += steps
        self.keys += steps * self.writing
        if not reserved:
            self.held += steps * self.writing
        for answer in self.began:
            answer.first_s = now_s
        self.began.clear()
        while self._ends and self._ends[0][0] <= self.steps:
            answer = heapq.heappop(self._ends)[2]
            self._stop(answer)
            self._leave(answer, now_s, left)
        while not reserved and self.held > self.capacity and self.writing > 1:
            self._preempt()

    def _stop(self, answer: Answer) -> None:
        """Remove an answer from those in progress, and count its tokens."""
        answer.written += self.steps - answer.joined
        self.writing -= 1
        self.keys -= answer.context

    def _leave(self, answer: Answer, now_s: float, left: list[Answer]) -> None:
        answer.done_s = now_s
        whole = self.engine.reserves_output and not self.reads_only
        self.held -= answer.whole if whole else answer.cached + answer.prompt + max(1, answer.written)
        left.append(answer)

    def _preempt(self) -> None:
        """Stop the answer that joined last, because the cache is full: it becomes the first in the queue and is read
        again from the beginning.
        """
        place = max(range(len(self._ends)), key=lambda i: self._ends[i][1])
        answer = self._ends.pop(place)[2]
        heapq.heapify(self._ends)
        self.preempted += 1
        self._stop(answer)
        self.held -= answer.cached + answer.prompt + answer.written
        answer.prompt += answer.written
        answer.output -= answer.written
        answer.read = answer.written = 0
        self.waiting.appendleft(answer)
