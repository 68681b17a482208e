"""The expected time of a long run with failures and checkpoints, and the checkpoint interval that minimises it.

Failures occur at a constant rate. Each loses the work since the last checkpoint, from which the run restarts. The
expected time is Daly's complete model (J. T. Daly, A higher order estimate of the optimum checkpoint interval for
restart dumps, FGCS 22, 2006), the best interval its estimate of higher order, which for rare failures is Young's sqrt(2
d M) (1974).
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import simpy

from simulator.analytical.estimates import calibrated_operators, cost_context
from simulator.analytical.scenario import Scenario
from simulator.columns.plan_table import plan_table
from simulator.config.plan import Plan
from simulator.step.frozen import local_parameters
from simulator.step.held import PARTS, state_bytes
from topology.rates.host import host_rates

# Mean GPU hours between failures. Source: Llama 3 405B, 419 unexpected interruptions in 54 days of 16,384 H100 (arXiv
# 2407.21783, section 3.3.4). Range: 6.50 and 2.34 failures per thousand node-days of 8 A100 (Kokolis et al., arXiv
# 2410.21680, RSC-1 and RSC-2).
GPU_HOURS = 54 * 24 * 16_384 / 419
GPU_HOURS_RANGE = (1000 * 24 * 8 / 6.50, 1000 * 24 * 8 / 2.34)
# Seconds from a failure to the next step, without reading the checkpoint. Source: MegaScale detects, diagnoses and
# recovers within 10 minutes on average (arXiv 2402.15627, section 6.3).
RESTART_S = 600.0
# Bytes/s that storage accepts per GPU. Source: Llama 3's 2 TB/s sustained for 16,384 GPUs (section 3.3.1).
STORAGE_BYTES_PER_S = 2e12 / 16_384
HISTORIES = 60
MOST_FAILURES = 20_000  # failures in all simulated runs together: about a second of simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """A run is interrupted every `mtbf_s` on average and computes again `restart_s` later; a checkpoint stops it for
    `save_s`, and another cannot begin within `least_interval_s`.

    A failed node is back after `repair_s`, repaired or replaced by the provider. One of `spares` takes its place in the
    meantime; without a spare the run waits.
    """

    mtbf_s: float
    restart_s: float
    save_s: float
    least_interval_s: float = 0.0
    repair_s: float = 0.0
    spares: int = 0

    @property
    def waiting(self) -> float:
        """The share of time in which more nodes are out than there are spares. Failures come at a constant rate while
        the run computes and not while it waits, so this is the blocking probability (Erlang's B) of a queue with one
        server more than there are spares.
        """
        load, share = self.repair_s / self.mtbf_s, 1.0
        for servers in range(1, self.spares + 2):
            share = load * share / (servers + load * share)
        return share if load else 0.0

    def total_s(self, work_s: float, interval_s: float) -> float:
        """Return the expected time of a run with `work_s` of steps and a checkpoint after each `interval_s` of them;
        infinite where failures leave it no time.
        """
        mtbf, segment = self.mtbf_s, (interval_s + self.save_s) / self.mtbf_s
        if max(segment, self.restart_s / mtbf) > MOST_EXPONENT:
            return math.inf
        if self.waiting >= 1.0:
            return math.inf
        up = mtbf * math.exp(self.restart_s / mtbf) * math.expm1(segment) * work_s / interval_s
        return up / (1.0 - self.waiting)

    def goodput(self, interval_s: float) -> float:
        """Return the share of the run's time that is spent on its steps."""
        return 1.0 / self.total_s(1.0, interval_s)

    @property
    def best_interval_s(self) -> float:
        """Seconds of steps between two checkpoints that minimise the run's time."""
        d, m = self.save_s, self.mtbf_s
        if d >= 2 * m:
            return max(m, self.least_interval_s)
        ratio = d / (2 * m)
        best = math.sqrt(2 * d * m) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - d
        return max(best, self.least_interval_s, MINIMUM_S)


MOST_EXPONENT = 500.0
MINIMUM_S = 1.0  # shortest interval, for checkpoints that cost nothing


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint_bytes(scenario: Scenario) -> float:
    """Return the bytes of a checkpoint: trained parameters and their optimizer state."""
    table = plan_table([Plan()], scenario.workload)
    context = cost_context(scenario, table, calibrated_operators(scenario))
    model, held = scenario.model, local_parameters(scenario.model, context)
    layers = {"dense_layer": model.dense_layers, "moe_layer": model.moe_layers, "experts": model.moe_layers}
    trained, kept = (
        sum(layers.get(part, 1) * float(np.ravel(getattr(held.of(kind), part))[0]) for part in PARTS)
        for kind in ("gradients", "optimizer")
    )
    state = state_bytes(context)
    return trained * state["parameters"] + kept * state["optimizer"]


def copy_s(scenario: Scenario, nbytes: float, gpus: int) -> float:
    """Return the seconds in which every GPU has copied its part of a checkpoint to host memory."""
    rates = host_rates(scenario.cluster, min(gpus, scenario.cluster.gpus_per_node))
    return nbytes / gpus / rates.copy_bytes_per_s


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
