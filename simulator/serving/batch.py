"""One engine's requests between steps: who runs, who waits, and what the next step does with whom.

Follows the engine's own policy: answers continue first and prompts fill what is left of a step (`mixes`), or prompts go
alone and answers wait meanwhile; a request starts when the cache has room.
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
    """One request inside the server. Times in seconds since the start; -1 where it has not happened."""

    arrival_s: float
    prompt: int  # tokens to read, those that a prefix cache holds left out
    output: int
    cached: int = 0  # tokens of the prompt that a prefix cache holds
    read: int = 0  # of the prompt
    written: int = 0
    first_s: float = -1.0
    done_s: float = -1.0
    tokens: int = 0  # of the whole answer, whatever was stopped or moved
    queued_s: float = 0.0  # when its scheduler got it
    joined: int = 0  # the batch's count of steps when it began to go on

    def __post_init__(self) -> None:
        self.tokens = self.output

    @property
    def context(self) -> int:
        return self.cached + self.read + self.written

    @property
    def whole(self) -> int:
        """Tokens that the cache holds at the end."""
        return self.cached + self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Step:
    """What one step does: tokens of prompts, their pairs of query and key, how many prompts, how many answers go on."""

    prompt_tokens: int
    pairs: float
    readers: tuple[Answer, ...]
    sequences: int
    keys: float


@dataclass(slots=True)
class Batch:
    """The queue of one scheduler. `capacity` are tokens of its cache."""

    engine: Engine
    capacity: int
    max_sequences: int
    max_tokens: int
    reads_only: bool = False  # answers go elsewhere after their first token
    receive_every: int = 1  # steps without a prompt after which new requests are seen
    balanced_ranks: int = 0  # that read prompts together, or each `receive_every` steps
    waiting: deque[Answer] = field(default_factory=deque)
    reading: list[Answer] = field(default_factory=list)
    writing: int = 0  # answers that go on
    steps: int = 0  # that answers have gone on so far
    held: int = 0  # tokens of the cache in use or, where answers are reserved, promised
    keys: int = 0  # tokens of context of all that write
    preempted: int = 0
    arrived: deque[Answer] = field(default_factory=deque)  # and not seen yet
    unseen_steps: int = 0
    seen_s: float = math.inf  # requests that came later join the step after the next
    _ends: list[tuple[int, int, Answer]] = field(default_factory=list)  # heap: (step of its last token, order, answer)
    _order: count[int] = field(default_factory=count)

    def add(self, answer: Answer) -> None:
        later = self.receive_every > 1 and not self.idle
        (self.arrived if later else self.waiting).append(answer)
        if later and self._all_ranks_read():
            self._see()

    def _receive(self) -> None:
        """See what has arrived, where it is time to look or there is nothing else to do."""
        if self.unseen_steps >= self.receive_every or not (self.waiting or self.reading or self.writing):
            self._see()

    def _see(self) -> None:
        self.waiting.extend(self.arrived)
        self.arrived.clear()
        self.unseen_steps = 0

    def _all_ranks_read(self) -> bool:
        """Return whether ranks need not wait for one another's prompts: each has one, or not all have answers.

        A request goes to the rank that one has left, so all have one after as many as a collector buys for a set.
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
        """Return whether the first request that waits would start at once."""
        if not self.waiting or len(self.reading) + self.writing >= self.max_sequences:
            return False
        return self.held + self._needs(self.waiting[0]) <= self.capacity or not (self.reading or self.writing)

    @property
    def ready(self) -> bool:
        """Whether the first request that waits is part of what the next step is put together from."""
        return self.waiting[0].queued_s <= self.seen_s or not (self.reading or self.writing)

    def _needs(self, answer: Answer) -> int:
        if self.reads_only or not self.engine.reserves_output:
            return answer.cached + answer.prompt + 1
        return answer.whole

    def _admit(self) -> None:
        """Move requests from the queue into the batch while there is room for them."""
        while self.admits_next() and self.ready:
            answer = self.waiting.popleft()
            self.held += self._needs(answer)
            self.reading.append(answer)

    def next_step(self) -> Step:
        """Return what the next step does; nothing in the queue moves until `finish_step`."""
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
        """Carry a step out that ended at `now_s`; return answers that left."""
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
                self.writing += 1
                self.keys += answer.context
                answer.joined = self.steps
                heapq.heappush(self._ends, (self.steps + answer.output - answer.written, next(self._order), answer))
        return left

    def steps_to_next_end(self) -> int:
        """Return how many steps all answers can go on before one ends, or the cache is full."""
        steps = self._ends[0][0] - self.steps
        if not self.engine.reserves_output:
            steps = min(steps, max(1, (self.capacity - self.held) // self.writing))
        if self.receive_every > 1:
            steps = min(steps, max(1, self.receive_every - self.unseen_steps))
        return steps

    def write(self, steps: int, now_s: float) -> list[Answer]:
        """Let all answers go on by `steps` tokens, the last of them at `now_s`; return those that ended."""
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
        while self._ends and self._ends[0][0] <= self.steps:
            answer = heapq.heappop(self._ends)[2]
            self._stop(answer)
            self._leave(answer, now_s, left)
        while not reserved and self.held > self.capacity and self.writing > 1:
            self._preempt()

    def _stop(self, answer: Answer) -> None:
        """Take an answer out of those that go on, and count what it wrote."""
        answer.written += self.steps - answer.joined
        self.writing -= 1
        self.keys -= answer.context

    def _leave(self, answer: Answer, now_s: float, left: list[Answer]) -> None:
        answer.done_s = now_s
        whole = self.engine.reserves_output and not self.reads_only
        self.held -= answer.whole if whole else answer.cached + answer.prompt + max(1, answer.written)
        left.append(answer)

    def _preempt(self) -> None:
        """Stop the answer that joined last, as no room is left: it waits first in the queue, and is read again
        whole.
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
