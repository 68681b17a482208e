"""Requests: how long they are and when they arrive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

LEAST_SHAPE = 1e-3  # arrivals that vary by less are constant
MOST_DRAWN = 1 << 18  # requests whose lengths are drawn to find the longest


class Request(NamedTuple):
    """One request: seconds since the start (closed loops: ignored), tokens of the prompt, tokens of the answer."""

    arrival_s: float
    prompt: int
    output: int


def steady_requests(concurrency: int) -> int:
    """Return how many requests are followed for figures of so many clients: several rounds of all of them."""
    return max(200, 4 * concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of prompts or answers: `mean`, or uniform between `low` and `high` times it, both ends included."""

    mean: int
    low: float = 1.0
    high: float = 1.0

    @property
    def longest(self) -> int:
        return max(1, round(self.mean * self.high))

    @property
    def usual(self) -> int:
        return max(1, round(self.mean * (self.low + self.high) / 2))

    def draw(self, count: int, random: Generator) -> np.ndarray:
        """Return whole numbers, one a request, at least 1."""
        if self.low == self.high:
            return np.full(count, max(1, round(self.mean * self.low)))
        drawn = random.uniform(self.mean * self.low, self.mean * self.high, count)
        return np.maximum(1, np.rint(drawn)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What clients send: a closed loop of `concurrency` clients, or an open one of `request_rate` a second.

    `shape` is the coefficient of variation of the time between arrivals of an open loop: 1 Poisson, 0 constant, above
    1 bursts (a gamma distribution). `trace` gives requests one by one instead. `cached_prompt` is the share of every
    prompt that the cache of prefixes already holds. Where they are `first`, a server has answered nothing before the
    requests of a closed loop, or nothing of their kind.
    """

    prompt: Lengths
    output: Lengths
    concurrency: int = 0
    request_rate: float = 0.0
    shape: float = 1.0
    requests: int = 0  # 0: as many as give steady figures
    cached_prompt: float = 0.0
    trace: tuple[Request, ...] = ()
    first: bool = False
    seed: int = 0

    @property
    def count(self) -> int:
        if self.trace:
            return len(self.trace)
        return self.requests or max(100, 10 * self.concurrency)

    def draw(self) -> tuple[Request, ...]:
        """Return all requests, in order of arrival. The same seed gives the same requests."""
        return _drawn(self)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer; of very many, the longest that there can be."""
        if self.count > MOST_DRAWN and not self.trace:
            return self.prompt.longest + self.output.longest
        return _longest(self)

    @property
    def usual(self) -> int:
        """Tokens of a usual request, prompt and answer."""
        return self.prompt.usual + self.output.usual

    def _draw(self) -> tuple[Request, ...]:
        if self.trace:
            return tuple(sorted(self.trace))
        random = np.random.default_rng(self.seed)
        prompts, outputs = self.prompt.draw(self.count, random), self.output.draw(self.count, random)
        return tuple(
            Request(float(at), int(prompt), int(output))
            for at, prompt, output in zip(self._arrivals(random), prompts, outputs, strict=True)
        )

    def _arrivals(self, random: Generator) -> np.ndarray:
        if not self.request_rate:
            return np.zeros(self.count)
        mean = 1 / self.request_rate
        if self.shape < LEAST_SHAPE:
            return np.arange(self.count) * mean
        spread = self.shape**2
        return np.cumsum(random.gamma(1 / spread, mean * spread, self.count))


def with_clients(traffic: Traffic, clients: int) -> Traffic:
    """Return the same requests from a closed loop of so many clients, followed until figures are steady."""
    return replace(traffic, concurrency=clients, request_rate=0.0, requests=steady_requests(clients))


@lru_cache(maxsize=1)  # every deployment of a search is asked for the same, which may be hundreds of thousands
def _drawn(traffic: Traffic) -> tuple[Request, ...]:
    return traffic._draw()  # noqa: SLF001 - of this module


@lru_cache(maxsize=8)
def _longest(traffic: Traffic) -> int:
    return max(request.prompt + request.output for request in traffic.draw())
