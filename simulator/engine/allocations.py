"""What a simulated rank has allocated over time, and what a caching allocator holds for it."""

from __future__ import annotations

from dataclasses import dataclass

import simpy

from simulator.engine.allocator import Block, CachingAllocator


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The most memory a rank had allocated, when, for which buffer, and what it was made of.

    `reserved_bytes` is what a caching allocator holds at the end: it never gives anything back by itself.
    """

    peak_bytes: int
    at_s: float
    by_category: dict[str, int]
    buffer: str = ""
    reserved_bytes: int = 0


class Allocations:
    def __init__(self, env: simpy.Environment, *, keep: bool) -> None:
        self.env = env
        self.keep = keep
        self.live: dict[str, tuple[int, str, Block]] = {}
        self.total = 0
        self.by_category: dict[str, int] = {}
        self.memory = CachingAllocator(expandable=False)
        self.samples: list[tuple[float, float]] = []
        self._peak = MemoryPeak(0, 0.0, {})

    @property
    def peak(self) -> MemoryPeak:
        p = self._peak
        return MemoryPeak(p.peak_bytes, p.at_s, p.by_category, p.buffer, self.memory.reserved_bytes)

    def allocate(self, name: str, nbytes: int, category: str, pool: str = "") -> None:
        self.live[name] = nbytes, category, self.memory.allocate(nbytes, pool)
        self._change(nbytes, category)
        if self.total > self._peak.peak_bytes:
            made_of = {k: v for k, v in self.by_category.items() if v}
            self._peak = MemoryPeak(self.total, self.env.now, made_of, name)

    def free(self, name: str) -> None:
        nbytes, category, block = self.live.pop(name)
        self.memory.free(block)
        self._change(-nbytes, category)

    def _change(self, nbytes: int, category: str) -> None:
        self.total += nbytes
        self.by_category[category] = self.by_category.get(category, 0) + nbytes
        if self.keep:
            self.samples.append((self.env.now, float(self.total)))


def last_at_each_time(samples: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return samples without those that another one replaces at the same moment."""
    return tuple(dict(samples).items())
