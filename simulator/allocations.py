"""What a simulated rank has allocated over time."""

from __future__ import annotations

from dataclasses import dataclass

import simpy


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The most memory a rank had allocated, when, and what it was made of."""

    peak_bytes: int
    at_s: float
    by_category: dict[str, int]


class Allocations:
    def __init__(self, env: simpy.Environment, *, keep: bool) -> None:
        self.env = env
        self.keep = keep
        self.live: dict[str, tuple[int, str]] = {}
        self.total = 0
        self.by_category: dict[str, int] = {}
        self.peak = MemoryPeak(0, 0.0, {})
        self.samples: list[tuple[float, float]] = []

    def allocate(self, name: str, nbytes: int, category: str) -> None:
        self.live[name] = nbytes, category
        self._change(nbytes, category)
        if self.total > self.peak.peak_bytes:
            self.peak = MemoryPeak(self.total, self.env.now, {k: v for k, v in self.by_category.items() if v})

    def free(self, name: str) -> None:
        nbytes, category = self.live.pop(name)
        self._change(-nbytes, category)

    def _change(self, nbytes: int, category: str) -> None:
        self.total += nbytes
        self.by_category[category] = self.by_category.get(category, 0) + nbytes
        if self.keep:
            self.samples.append((self.env.now, float(self.total)))


def last_at_each_time(samples: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return samples without those that another one replaces at the same moment."""
    return tuple(dict(samples).items())
