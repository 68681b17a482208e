"""Runs with failures simulated on SimPy; the spread of their times is the range of the expected time."""

from __future__ import annotations

import random
from collections.abc import Generator

import simpy

from simulator.failures.goodput import Failures

HISTORIES = 60
MOST_FAILURES = 20_000  # failures in all simulated runs together: about a second of simulation


class _Run:
    """One simulated run: a trainer, and failures that interrupt it."""

    def __init__(self, failures: Failures, work_s: float, interval_s: float, draw: random.Random) -> None:
        self.failures, self.left_s, self.interval_s, self.draw = failures, work_s, interval_s, draw
        self.env = simpy.Environment()
        self.out, self.back, self.waits = 0, self.env.event(), False
        self.trainer = self.env.process(self._train())
        self.env.process(self._fail())

    def end_s(self) -> float:
        self.env.run(until=self.trainer)
        return float(self.env.now)

    def _train(self) -> Generator[simpy.Event, None, None]:
        segment = self.interval_s + self.failures.save_s
        down = False
        while self.left_s > 0:
            begun = self.env.now
            try:
                if down:
                    self.waits = True
                    while self.out > self.failures.spares:
                        yield self.back
                    self.waits = False
                    yield self.env.timeout(self.failures.restart_s)
                    down, begun = False, self.env.now
                # A checkpoint follows each full interval; the last steps need none.
                yield self.env.timeout(self.left_s + self.failures.save_s * _checkpoints(self.left_s, self.interval_s))
                self.left_s = 0.0
            except simpy.Interrupt:
                if not down:
                    self.left_s -= self.interval_s * ((self.env.now - begun) // segment)
                down = True

    def _fail(self) -> Generator[simpy.Event, None, None]:
        while True:
            yield self.env.timeout(self.draw.expovariate(1.0 / self.failures.mtbf_s))
            if self.trainer.is_alive and not self.waits:
                self.trainer.interrupt()
                if self.failures.repair_s:
                    self.out += 1
                    self.env.process(self._repair())

    def _repair(self) -> Generator[simpy.Event, None, None]:
        yield self.env.timeout(self.draw.expovariate(1.0 / self.failures.repair_s))
        self.out -= 1
        self.back.succeed()
        self.back = self.env.event()


def _checkpoints(left_s: float, interval_s: float) -> int:
    return max(0, -int(-left_s // interval_s) - 1)


def histories(failures: Failures, work_s: float, interval_s: float) -> list[float]:
    """Return the sorted times of several simulated runs in seconds; fewer runs where each has very many failures."""
    each = failures.total_s(work_s, interval_s) / failures.mtbf_s
    count = max(2, min(HISTORIES, int(MOST_FAILURES / max(each, 1.0))))
    draw = random.Random(0)  # noqa: S311 - a simulation
    return sorted(_Run(failures, work_s, interval_s, draw).end_s() for _ in range(count))


def spread(failures: Failures, work_s: float, interval_s: float) -> tuple[float, float]:
    """Return the ends of the range that holds four of five runs, over their mean. An end is the mean itself where few
    runs have a failure.
    """
    ends = histories(failures, work_s, interval_s)
    mean = sum(ends) / len(ends)
    tenth = len(ends) // 10
    return min(ends[tenth] / mean, 1.0), max(ends[-1 - tenth] / mean, 1.0)
