"""Requests: how long they are and when they arrive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

LEAST_SHAPE = 1e-3  # lower variation counts as constant arrivals
STRATA = 8  # equal parts of the range of lengths
COUNTED = 200  # requests that steady figures of a closed loop are of, at least
MOST_DRAWN = 1 << 18  # requests whose lengths are drawn to estimate the longest


class Request(NamedTuple):
    """One request: seconds since the start (closed loops: ignored), tokens of the prompt, tokens of the answer."""

    arrival_s: float
    prompt: int
    output: int


def steady_requests(concurrency: int) -> int:
    """Return how many requests to simulate for steady figures with this number of clients: one of each that is
    under way at the beginning, one of each at the end, and at least COUNTED or two rounds between.
    """
    return 2 * concurrency + max(COUNTED, 2 * concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Number of tokens of prompts or answers: `mean`, or uniform between `low` and `high` times it, both ends
    included.
    """

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
        """Return one whole number for each request, at least 1. Of any STRATA in a row each is of another part of the
        range, so that few requests are as long in the mean as many.
        """
        if self.low == self.high:
            return np.full(count, max(1, round(self.mean * self.low)))
        rows = random.permuted(np.tile(np.arange(STRATA), (-(-count // STRATA), 1)), axis=1)
        shares = (rows.ravel()[:count] + random.random(count)) / STRATA
        drawn = self.mean * (self.low + (self.high - self.low) * shares)
        return np.maximum(1, np.rint(drawn)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of clients: a closed loop of `concurrency` clients, or an open loop with `request_rate` requests per
    second.

    `shape` is the coefficient of variation of the time between arrivals of an open loop: 1 Poisson, 0 constant, above
    1 bursts (a gamma distribution). `trace` gives requests one by one instead. `cached_prompt` is the share of every
    prompt that is in the prefix cache. With `first`, the server has answered no requests of this kind before those of a
    closed loop. `steady` asks for the figures of a loop that goes on for ever, rather than of `requests` that find an
    idle server. Requests that are `static` are one batch of an engine from beginning to end.
    """

    prompt: Lengths
    output: Lengths
    concurrency: int = 0
    request_rate: float = 0.0
    shape: float = 1.0
    requests: int = 0  # 0: as many as steady figures need
    cached_prompt: float = 0.0
    trace: tuple[Request, ...] = ()
    first: bool = False
    steady: bool = False
    static: bool = False
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
        """Tokens of the longest request, prompt and answer; for very many requests, the longest possible."""
        if self.count > MOST_DRAWN and not self.trace:
            return self.prompt.longest + self.output.longest
        return _longest(self)

    @property
    def usual(self) -> int:
        """Tokens of a typical request, prompt and answer."""
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
    """Return the same requests from a closed loop with another number of clients, enough for steady figures."""
    return replace(traffic, concurrency=clients, request_rate=0.0, requests=steady_requests(clients))


@lru_cache(maxsize=1)  # cached: every deployment of a search uses the same requests, perhaps hundreds of thousands
def _drawn(traffic: Traffic) -> tuple[Request, ...]:
    return traffic._draw()  # noqa: SLF001 - of this module


@lru_cache(maxsize=8)
def _longest(traffic: Traffic) -> int:
    return max(request.prompt + request.output for request in traffic.draw())
