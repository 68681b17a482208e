"""Replayed memory of a plan's pipeline ranks; each rank is replayed once, and only as far as needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from math import nextafter

import numpy as np

from simulator.analytical.estimates import known_costs, memory_of_plans
from simulator.analytical.memory import CONTEXT_BYTES, MemoryColumns
from simulator.analytical.scenario import Scenario
from simulator.calibration.intervals import replayed_memory_factors
from simulator.collectives.buffers import communicator_bytes
from simulator.config.estimate import RATHER_SURE, SURE, fit_probability, sure_bytes
from simulator.config.plan import Plan
from simulator.lowering.training import plan_context
from simulator.memory.flushes import FLUSH_S_PER_BYTE, known_flush_s, retry_probability
from simulator.memory.replay import FORWARDS_FIRST, MemoryReplay, ReservedMemory
from simulator.pipeline.schedules.registry import schedule_kind
from topology.cores import forks, on_cores
from topology.rates.host import HostRates, host_rates


class PlanMemory:
    """The memory of one plan of a scenario, in bytes; corrected where runs of its runtime showed other values than
    described.
    """

    def __init__(
        self,
        scenario: Scenario,
        plan: Plan,
        fullest: list[int] | None = None,
        replay: MemoryReplay | None = None,
    ) -> None:
        """`fullest` are the fullest ranks of earlier plans through the same pipeline, the latest first: of plans that
        fit as well, as the fullest rank shows what a full GPU costs. `replay` may be that of another plan that
        allocates the same.
        """
        self._scenario, self.plan, self._known = scenario, plan, known_costs(scenario)
        self._fullest = [] if fullest is None else fullest
        self._replay = MemoryReplay(scenario, plan) if replay is None else replay
        self._held: dict[int, ReservedMemory] = {}
        self._tried: dict[int, ReservedMemory] = {}
        self._beyond: dict[int, float] = {}  # by rank: it reserves more than these bytes
        here = self._replay.context if self._replay.plan.placement == plan.placement else plan_context(scenario, plan)
        self.communicator_bytes = float(communicator_bytes(here.groups)[0])
        self.capacity_bytes = scenario.cluster.gpu_memory_bytes - CONTEXT_BYTES
        self.left_bytes = self.capacity_bytes - self.communicator_bytes

    @cached_property
    def _shorter(self) -> MemoryReplay | None:
        """A replay with fewer micro batches, for steps too long to replay; longer steps are extrapolated from
        the two.
        """
        forwards_first = self.plan.pp > 1 and schedule_kind(self.plan.schedule_name).forwards_first
        if not forwards_first or self._replay.micro_batches <= FORWARDS_FIRST[1]:
            return None
        return MemoryReplay(self._scenario, self.plan, micro_batches=FORWARDS_FIRST[0])

    def rank(self, rank: int) -> ReservedMemory:
        """Return what a pipeline rank reserves with unlimited memory."""
        if rank not in self._held:
            described = self._replay.rank(rank)
            if self._shorter is not None:
                described = _extrapolated(self._shorter.rank(rank), described, self._replay.micro_batches)
            self._held[rank] = self._as_known(rank, described)
            if self._shorter is not None:
                self._held[rank] = self._at_least(rank, self._held[rank])
        return self._held[rank]

    def _at_least(self, rank: int, held: ReservedMemory) -> ReservedMemory:
        """Return extrapolated memory, raised to the bound of the step itself, since its fullest moment may be another
        one.
        """
        allocated = max(held.allocated_bytes, round(float(self._bound.peak_bytes[0, rank])))
        reserved = max(held.reserved_bytes, allocated, round(float(self._bound.reserved_bytes[0, rank])))
        return replace(held, allocated_bytes=allocated, reserved_bytes=reserved)

    def _as_known(self, rank: int, described: ReservedMemory) -> ReservedMemory:
        return replace(
            described,
            reserved_bytes=round(float(self._known.held_bytes(described.reserved_bytes, self._state[rank]))),
            allocated_bytes=round(float(self._known.held_bytes(described.allocated_bytes, self._state[rank]))),
        )

    def _within(self, rank: int, limit_bytes: float) -> bool:
        """Return whether a rank reserves at most `limit_bytes`; a replay stops as soon as it exceeds the limit."""
        if rank not in self._held and self._shorter is None:
            described = self._replay.rank_within(*self._limit(rank, limit_bytes))
            if described is None:
                self._beyond[rank] = max(limit_bytes, self._beyond.get(rank, 0.0))
                return False
            self._held[rank] = self._as_known(rank, described)
        return self.rank(rank).reserved_bytes <= limit_bytes

    def _limit(self, rank: int, limit_bytes: float) -> tuple[int, float]:
        return rank, self._known.described_bytes(limit_bytes, self._state[rank])

    def first_ahead(self, sure: float) -> Replayed | None:
        """Return the replay of the rank that is asked about first; None where it is known, or takes two replays. Others
        are not made in advance, since they begin with the state of those before them.
        """
        rank, limit_bytes = next(self._order), self._sure_bytes(sure)
        known, key = self._shorter is not None or rank in self._held, self._limit(rank, limit_bytes)
        return None if known or self._replay.knows(*key) else (self._replay, *key)

    @property
    def ranks(self) -> tuple[ReservedMemory, ...]:
        """The memory of every pipeline rank."""
        return tuple(self.rank(rank) for rank in range(self.plan.pp))

    @property
    def worst(self) -> int:
        """The pipeline rank that reserves most."""
        ranks = self.ranks
        return max(range(len(ranks)), key=lambda rank: ranks[rank].reserved_bytes)

    @cached_property
    def fits(self) -> bool:
        """Whether no rank runs out of memory, though some may have to flush and retry, and the host's memory, where
        known, is enough for what is kept there.
        """
        return self._fits_gpus and (self.host_left_bytes is None or self.host_bytes <= self.host_left_bytes)

    @property
    def host_left_bytes(self) -> float | None:
        """A GPU's share of the host's memory; None where unknown."""
        known = self._scenario.cluster.groups[0].node.host_memory_bytes
        return None if known is None else self._host.memory_bytes

    @cached_property
    def _host(self) -> HostRates:
        return host_rates(self._scenario.cluster, self.plan.gpus)

    @cached_property
    def _fits_gpus(self) -> bool:
        # Allocating more than there is means out of memory.
        return all(self.rank(rank).allocated_bytes <= self.left_bytes for rank in self._order) and not any(
            self._limited(rank).out_of_memory for rank in self._order
        )

    @property
    def _order(self) -> Iterator[int]:
        """The pipeline ranks, those that were fullest before and the two ends first: usually one of them is the
        fullest.
        """
        return iter(dict.fromkeys([*self._fullest, 0, self.plan.pp - 1, *range(self.plan.pp)]))

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated at any moment on any rank."""
        return max(rank.allocated_bytes for rank in self.ranks)

    @property
    def reserved_bytes(self) -> int:
        """The bytes that the fullest rank reserves."""
        return self.rank(self.worst).reserved_bytes

    @property
    def most_missing_bytes(self) -> float:
        """How many bytes the replayed ranks of a plan that does not fit lack at most: allocated bytes beyond the limit,
        else reserved bytes beyond it.
        """
        allocated = max(rank.allocated_bytes for rank in self._held.values()) - self.left_bytes
        return (
            allocated if allocated > 0 else max(rank.reserved_bytes for rank in self._held.values()) - self.left_bytes
        )

    @property
    def retries_per_step(self) -> int:
        """Retries per step of the fullest rank."""
        return self._limited(self.worst).retries_per_step

    @property
    def fit_probability(self) -> float:
        """The probability that memory is enough, given the errors of predictions; 0 if the prediction itself does not
        fit.
        """
        return self._holds(float(self.reserved_bytes)) if self.fits else 0.0

    def at_most_likely(self, sure: float) -> float:
        """Return an upper bound of the probability that the plan fits: the exact value for its fullest rank or, if that
        is below `sure`, any value below `sure`.
        """
        likely, limit_bytes = 1.0, self._sure_bytes(sure)
        for rank in self._order:
            within = self._within(rank, limit_bytes)
            likely = min(likely, self._holds(float(self.rank(rank).reserved_bytes)) if within else nextafter(sure, 0.0))
            if likely < sure:
                break
        fullest = self.worst if likely >= sure else rank
        self._fullest[:] = dict.fromkeys([fullest, *self._fullest])
        return likely

    def may_be(self, sure: float) -> bool:
        """Return whether the plan may fit with probability `sure`, judged by the ranks found too full before, else by
        the first.
        """
        limit_bytes = self._sure_bytes(sure)
        return all(self._within(rank, limit_bytes) for rank in [*self._beyond] or [next(self._order)])

    def reserves_at_most(self, limit_bytes: float) -> bool:
        """Return whether no rank reserves more than some bytes."""
        return all(self._within(rank, limit_bytes) for rank in self._order)

    @property
    def surely_fits(self) -> bool:
        """Whether the plan fits with probability SURE."""
        return self.fits_with(SURE)

    def fits_with(self, sure: float) -> bool:
        """Return whether the plan fits with probability `sure`."""
        return (not sure or self.at_most_likely(sure) >= sure) and self.fits

    def _holds(self, reserved_bytes: float) -> float:
        low, high = replayed_memory_factors()
        return fit_probability(reserved_bytes, low * reserved_bytes, high * reserved_bytes, self.left_bytes)

    @cached_property
    def flush_s(self) -> float:
        """Expected seconds of retries in a step. A plan that runs out of memory is costed as if it had enough, unless
        runs of its runtime showed what a full GPU costs.
        """
        if self._known.flush_s is None and not self.fits:
            return 0.0
        return self._flush_s(self.reserved_bytes, self.retries_per_step)

    @property
    def least_flush_s(self) -> float:
        """A lower bound of `flush_s` for a plan that fits, from the ranks replayed so far (at least one)."""
        if not self._held:
            self._within(next(self._order), self._sure_bytes(RATHER_SURE))
        held = (float(rank.reserved_bytes) for rank in self._held.values())
        return self._flush_s(max([*held, *self._beyond.values()]), 1)

    @cached_property
    def _paged(self) -> list[float]:
        """Bytes of paged optimizer state on every pipeline rank."""
        return [self._replay.paged_bytes(rank) for rank in range(self.plan.pp)]

    @property
    def paged_bytes(self) -> float:
        """Bytes of paged optimizer state on the rank that has most."""
        return max(self._paged)

    def paging_s(self, factor: float = 1.0) -> float:
        """Return the seconds per step in which the slowest rank's paged states move to the GPU and back, if `factor`
        times as much were reserved.
        """
        return 2 * self._leaving(factor) / self._host.copy_bytes_per_s

    def _leaving(self, factor: float = 1.0) -> float:
        """Return the most bytes of paged states that have no room on a rank's GPU."""
        if not self.paged_bytes:
            return 0.0
        reserved = (rank.reserved_bytes for rank in self.ranks)
        return max(n if factor * r + n > self.left_bytes else 0.0 for n, r in zip(self._paged, reserved, strict=True))

    @property
    def host_bytes(self) -> float:
        """The most host memory of a rank in bytes: state and activations kept there, and paged states."""
        return float(self._bound.host_bytes.max()) + self._leaving()

    @property
    def full_s(self) -> float:
        """Seconds per step that a full GPU costs: retries and paged states."""
        return self.flush_s + self.paging_s()

    @property
    def least_full_s(self) -> float:
        """A lower bound of `full_s` for a plan that fits."""
        return self.least_flush_s + (self.paging_s() if self.paged_bytes else 0.0)

    def _flush_s(self, reserved_bytes: float, retries: int) -> float:
        """Return the expected seconds of flushes if the fullest rank reserves `reserved_bytes`; never less for more
        bytes.
        """
        reserved = np.array([float(reserved_bytes)])
        likely = retry_probability(reserved, np.array([self.left_bytes]), replayed_memory_factors())
        if self._known.flush_s is not None:
            return float(known_flush_s(likely, self._known.flush_s, self._replay.micro_batches)[0])
        return float(likely[0]) * max(1, retries) * reserved_bytes * FLUSH_S_PER_BYTE

    def _sure_bytes(self, sure: float) -> float:
        """Return the most bytes that a plan may reserve to fit with probability `sure`."""
        return sure_bytes(self.left_bytes, replayed_memory_factors(), sure or RATHER_SURE)

    def _limited(self, rank: int) -> ReservedMemory:
        """Return the memory of a rank within the available bytes."""
        held = self.rank(rank)
        if held.reserved_bytes <= self.left_bytes:
            return held
        if rank not in self._tried:
            if self._shorter is not None:
                self._tried[rank] = replace(
                    held, retries_per_step=1, out_of_memory=held.allocated_bytes > self.left_bytes
                )
            else:
                limit = self._known.described_bytes(self.left_bytes, self._state[rank])
                self._tried[rank] = self._replay.rank(rank, capacity_bytes=limit)
        return self._tried[rank]

    @cached_property
    def _state(self) -> list[float]:
        """Described bytes of state on every pipeline rank; zero if activations have no factor of their own."""
        if self._known.activations == 1.0:
            return [0.0] * self.plan.pp
        return [float(nbytes) / self._known.reserved for nbytes in self._bound.state_bytes[0, : self.plan.pp]]

    @cached_property
    def _bound(self) -> MemoryColumns:
        return memory_of_plans(self._scenario, [self.plan])


class Replays:
    """The memory of plans of one scenario, each replayed once."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._found: dict[Plan, PlanMemory] = {}
        self._replays: dict[Plan, MemoryReplay] = {}  # by plan without placement, which changes no allocation
        self._fullest: dict[object, list[int]] = {}  # fullest ranks, by pipeline

    def __getitem__(self, plan: Plan) -> PlanMemory:
        if plan not in self._found:
            fullest = self._fullest.setdefault((plan.pp, plan.virtual_stages, plan.schedule_name), [])
            anywhere = replace(plan, placement=())
            if anywhere not in self._replays:
                self._replays[anywhere] = MemoryReplay(self._scenario, anywhere)
            self._found[plan] = PlanMemory(self._scenario, plan, fullest, self._replays[anywhere])
        return self._found[plan]

    def look_ahead(self, plans: Iterable[Plan], sure: float) -> None:
        """Replay the first rank of several plans that will be asked whether they fit with probability `sure`, on
        several cores if there are any.
        """
        asked = dict.fromkeys(ahead for plan in plans if (ahead := self[plan].first_ahead(sure)) is not None)
        seconds = sum(replay.seconds for replay, _, _ in asked)
        if forks(len(asked), seconds):
            tasks = [partial(replay.rank_within, rank, limit) for replay, rank, limit in asked]
            found = on_cores(tasks, seconds=seconds)
            for (replay, rank, limit), held in zip(asked, found, strict=True):
                replay.note(rank, limit, held)


Replayed = tuple[MemoryReplay, int, float]  # with rank and limit


def _extrapolated(few: ReservedMemory, more: ReservedMemory, micro_batches: float) -> ReservedMemory:
    """Return the memory of a step in which all forward passes come first, extrapolated from two shorter steps."""
    less, most = FORWARDS_FIRST
    times = (micro_batches - most) / (most - less)
    return replace(
        more,
        reserved_bytes=round(more.reserved_bytes + times * max(0, more.reserved_bytes - few.reserved_bytes)),
        allocated_bytes=round(more.allocated_bytes + times * max(0, more.allocated_bytes - few.allocated_bytes)),
    )
