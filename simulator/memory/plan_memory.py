"""What the allocators of a plan's pipeline ranks hold, replayed as far as it is asked for, each rank once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import inf, nextafter

import numpy as np

from simulator.analytical.estimates import known_costs, memory_of_plans
from simulator.analytical.memory import CONTEXT_BYTES, MemoryColumns
from simulator.analytical.scenario import Scenario
from simulator.calibration.intervals import replayed_memory_factors
from simulator.collectives.buffers import communicator_bytes
from simulator.config.estimate import RATHER_SURE, SURE, fit_probability, sure_bytes
from simulator.config.plan import Plan
from simulator.memory.flushes import FLUSH_S_PER_BYTE, known_flush_s, retry_probability
from simulator.memory.replay import FORWARDS_FIRST, MemoryReplay, ReservedMemory
from simulator.pipeline.schedules.registry import schedule_kind
from topology.cores import forks, on_cores
from topology.rates.host import HostRates, host_rates

# That replaying a pass of a unit takes of one core; most passes of pipelines are replayed in part.
PASS_S, PIPED_PASS_S = 1.5e-4, 6e-5


class PlanMemory:
    """One plan of a scenario. Bytes are those that runs of its runtime took where its description says others."""

    def __init__(self, scenario: Scenario, plan: Plan, fullest: list[int] | None = None) -> None:
        """`fullest` are ranks that held most of plans through the same pipeline, the last such first."""
        self._scenario, self.plan, self._known = scenario, plan, known_costs(scenario)
        self._fullest = [] if fullest is None else fullest
        self._replay = MemoryReplay(scenario, plan)
        self._held: dict[int, ReservedMemory] = {}
        self._tried: dict[int, ReservedMemory] = {}
        self._ahead: dict[tuple[int, float], ReservedMemory | None] = {}  # by rank and limit, what will be asked for
        self._beyond: dict[int, float] = {}  # bytes that a rank was found to hold more than
        self.communicator_bytes = float(communicator_bytes(self._replay.context.groups)[0])
        self.capacity_bytes = scenario.cluster.gpu_memory_bytes - CONTEXT_BYTES
        self.left_bytes = self.capacity_bytes - self.communicator_bytes

    @cached_property
    def _shorter(self) -> MemoryReplay | None:
        """Where a step is too long to be replayed as it is, another one: what both hold tells of longer ones."""
        forwards_first = self.plan.pp > 1 and schedule_kind(self.plan.schedule_name).forwards_first
        if not forwards_first or self._replay.micro_batches <= FORWARDS_FIRST[1]:
            return None
        return MemoryReplay(self._scenario, self.plan, micro_batches=FORWARDS_FIRST[0])

    def rank(self, rank: int) -> ReservedMemory:
        """Return what a pipeline rank holds with as much memory as it asks for."""
        if rank not in self._held:
            described = self._ahead.pop((rank, inf), None) or self._replay.rank(rank)
            if self._shorter is not None:
                described = _extrapolated(self._shorter.rank(rank), described, self._replay.micro_batches)
            self._held[rank] = self._as_known(rank, described)
            if self._shorter is not None:
                self._held[rank] = self._at_least(rank, self._held[rank])
        return self._held[rank]

    def _at_least(self, rank: int, held: ReservedMemory) -> ReservedMemory:
        """Return what follows from shorter steps, of which another moment may be the fullest: no less than the bound
        of the step itself.
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
        """Return whether a rank holds no more than a limit; one that does is replayed no further."""
        if rank not in self._held and self._shorter is None and self._beyond.get(rank, 0.0) < limit_bytes:
            known = self._limit(rank, limit_bytes)
            described = self._ahead.pop(known) if known in self._ahead else self._replay.rank_within(*known)
            if described is None:
                self._beyond[rank] = limit_bytes
            else:
                self._held[rank] = self._as_known(rank, described)
        beyond = rank not in self._held and self._beyond.get(rank, 0.0) >= limit_bytes
        return not beyond and self.rank(rank).reserved_bytes <= limit_bytes

    def _limit(self, rank: int, limit_bytes: float) -> tuple[int, float]:
        return rank, self._known.described_bytes(limit_bytes, self._state[rank])

    def first_ahead(self, sure: float) -> list[Replayed]:
        """Return the replay of the rank that is asked about first, where it has not been done."""
        return self._to_replay([next(self._order)], self._sure_bytes(sure))

    def _to_replay(self, ranks: Iterable[int], limit_bytes: float) -> list[Replayed]:
        if self._shorter is not None:  # each rank of which takes two
            return []
        new = [rank for rank in ranks if rank not in self._held and self._beyond.get(rank, 0.0) < limit_bytes]
        keys = [self._limit(rank, limit_bytes) if limit_bytes < inf else (rank, inf) for rank in new]
        return [(self, key) for key in keys if key not in self._ahead]

    def take(self, replayed: tuple[int, float]) -> ReservedMemory | None:
        """Replay a rank within a limit."""
        return self._replay.rank_within(*replayed)

    def note(self, replayed: tuple[int, float], held: ReservedMemory | None) -> None:
        """Keep what was found before it is asked for."""
        self._ahead[replayed] = held

    @property
    def replay_s(self) -> float:
        """Seconds that replaying a rank takes, about."""
        return self._replay.passes * (PIPED_PASS_S if self.plan.pp > 1 else PASS_S)

    @property
    def ranks(self) -> tuple[ReservedMemory, ...]:
        """What every pipeline rank holds."""
        replay_ahead(self._to_replay(range(self.plan.pp), inf))
        return tuple(self.rank(rank) for rank in range(self.plan.pp))

    @property
    def worst(self) -> int:
        """The pipeline rank that holds most."""
        ranks = self.ranks
        return max(range(len(ranks)), key=lambda rank: ranks[rank].reserved_bytes)

    @cached_property
    def fits(self) -> bool:
        """Whether no rank runs out of memory, though some may have to give back what they hold and ask again, and the
        host has the memory for what it keeps of theirs, where it is known how much that has.
        """
        return self._fits_gpus and (self.host_left_bytes is None or self.host_bytes <= self.host_left_bytes)

    @property
    def host_left_bytes(self) -> float | None:
        """A GPU's share of the host's memory, where it is known."""
        known = self._scenario.cluster.groups[0].node.host_memory_bytes
        return None if known is None else self._host.memory_bytes

    @cached_property
    def _host(self) -> HostRates:
        return host_rates(self._scenario.cluster, self.plan.gpus)

    @cached_property
    def _fits_gpus(self) -> bool:
        replay_ahead(self._to_replay(self._order, inf))
        # A rank that allocates more than there is has run out of it.
        return all(self.rank(rank).allocated_bytes <= self.left_bytes for rank in self._order) and not any(
            self._limited(rank).out_of_memory for rank in self._order
        )

    @property
    def _order(self) -> Iterator[int]:
        """Every pipeline rank, first those that held most before and the ends of the pipeline: mostly one of them holds
        most.
        """
        return iter(dict.fromkeys([*self._fullest, 0, self.plan.pp - 1, *range(self.plan.pp)]))

    @property
    def peak_bytes(self) -> int:
        """What is allocated at the fullest moment of any rank."""
        return max(rank.allocated_bytes for rank in self.ranks)

    @property
    def reserved_bytes(self) -> int:
        """What the fullest rank holds."""
        return self.rank(self.worst).reserved_bytes

    @property
    def most_missing_bytes(self) -> float:
        """What the ranks that were replayed lack at most where the plan does not fit: what they allocate beyond what
        there is, or hold where giving it back does not help.
        """
        allocated = max(rank.allocated_bytes for rank in self._held.values()) - self.left_bytes
        return (
            allocated if allocated > 0 else max(rank.reserved_bytes for rank in self._held.values()) - self.left_bytes
        )

    @property
    def retries_per_step(self) -> int:
        """How often the fullest rank gives back what it holds and asks again."""
        return self._limited(self.worst).retries_per_step

    @property
    def fit_probability(self) -> float:
        """How likely memory is enough, given how far predictions of it are off; 0 where it is not by what they say."""
        return self._holds(float(self.reserved_bytes)) if self.fits else 0.0

    def at_most_likely(self, sure: float) -> float:
        """Return a probability above which the plan does not fit: that of its fullest rank; where that is below `sure`,
        no more than that it is.
        """
        likely, limit_bytes = 1.0, self._sure_bytes(sure)
        for number, rank in enumerate(self._order):
            if number == 1:  # the first shows of most plans that do not fit that they do not
                replay_ahead(self._to_replay(self._order, limit_bytes))
            within = self._within(rank, limit_bytes)
            likely = min(likely, self._holds(float(self.rank(rank).reserved_bytes)) if within else nextafter(sure, 0.0))
            if likely < sure:
                self._fullest[:] = dict.fromkeys([rank, *self._fullest])
                break
        return likely

    def may_be(self, sure: float) -> bool:
        """Return whether the plan may be `sure` to fit by the ranks that were found too full before, else the first."""
        limit_bytes = self._sure_bytes(sure)
        return all(self._within(rank, limit_bytes) for rank in [*self._beyond] or [next(self._order)])

    @property
    def surely_fits(self) -> bool:
        """Whether memory is enough for all that."""
        return self.at_most_likely(SURE) >= SURE and self.fits

    def _holds(self, reserved_bytes: float) -> float:
        low, high = replayed_memory_factors()
        return fit_probability(reserved_bytes, low * reserved_bytes, high * reserved_bytes, self.left_bytes)

    @cached_property
    def flush_s(self) -> float:
        """Seconds of a step that retries are expected to cost. One that runs out of memory is taken to have enough,
        unless runs of its runtime showed what a full GPU costs.
        """
        if self._known.flush_s is None and not self.fits:
            return 0.0
        return self._flush_s(self.reserved_bytes, self.retries_per_step)

    @property
    def least_flush_s(self) -> float:
        """The same of a plan that fits, at least: by the ranks that have been replayed, one at least."""
        if not self._held:
            self._within(next(self._order), self._sure_bytes(RATHER_SURE))
        held = (float(rank.reserved_bytes) for rank in self._held.values())
        return self._flush_s(max([*held, *self._beyond.values()]), 1)

    @cached_property
    def _paged(self) -> list[float]:
        """Bytes of an optimizer's state that are paged, on every pipeline rank."""
        return [self._replay.paged_bytes(rank) for rank in range(self.plan.pp)]

    @property
    def paged_bytes(self) -> float:
        """Those of the rank that has most."""
        return max(self._paged)

    def paging_s(self, factor: float = 1.0) -> float:
        """Return the seconds of a step in which paged states come in and go out, the slowest rank's, were `factor`
        times as much reserved.
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
        """Bytes of host memory that a rank needs at most: of state and activations kept there, and of paged states."""
        return float(self._bound.host_bytes.max()) + self._leaving()

    @property
    def full_s(self) -> float:
        """Seconds of a step that a full GPU costs: of retries and of paged states."""
        return self.flush_s + self.paging_s()

    @property
    def least_full_s(self) -> float:
        """The same of a plan that fits, at least."""
        return self.least_flush_s + (self.paging_s() if self.paged_bytes else 0.0)

    def _flush_s(self, reserved_bytes: float, retries: int) -> float:
        """Return what flushes cost where the fullest rank holds so much: no less where it holds more."""
        reserved = np.array([float(reserved_bytes)])
        likely = retry_probability(reserved, np.array([self.left_bytes]), replayed_memory_factors())
        if self._known.flush_s is not None:
            return float(known_flush_s(likely, self._known.flush_s, self._replay.micro_batches)[0])
        return float(likely[0]) * max(1, retries) * reserved_bytes * FLUSH_S_PER_BYTE

    def _sure_bytes(self, sure: float) -> float:
        """Return what a plan may hold that is so sure to fit."""
        return sure_bytes(self.left_bytes, replayed_memory_factors()[1], sure or RATHER_SURE)

    def _limited(self, rank: int) -> ReservedMemory:
        """Return what a rank holds with the memory that there is."""
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
        """Bytes of state on every pipeline rank, as they are described; where nothing tells them from others, none."""
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
        self._fullest: dict[object, list[int]] = {}  # ranks by the pipeline that they are of

    def __getitem__(self, plan: Plan) -> PlanMemory:
        if plan not in self._found:
            fullest = self._fullest.setdefault((plan.pp, plan.virtual_stages, plan.schedule_name), [])
            self._found[plan] = PlanMemory(self._scenario, plan, fullest)
        return self._found[plan]

    def look_ahead(self, plans: Iterable[Plan], sure: float) -> None:
        """Replay the first rank of each of several plans that will be asked whether they are `sure` to fit, on several
        cores where there are.
        """
        replay_ahead([replay for plan in plans for replay in self[plan].first_ahead(sure)])


Replayed = tuple[PlanMemory, tuple[int, float]]  # a rank of a plan, within a limit


def replay_ahead(replays: Sequence[Replayed]) -> None:
    """Do replays that will be asked for, where several cores do them sooner; what is asked for is the same."""
    seconds = sum(memory.replay_s for memory, _ in replays)
    if forks(len(replays), seconds):
        found = on_cores([partial(memory.take, key) for memory, key in replays], seconds=seconds)
        for (memory, key), held in zip(replays, found, strict=True):
            memory.note(key, held)


def _extrapolated(few: ReservedMemory, more: ReservedMemory, micro_batches: float) -> ReservedMemory:
    """Return the bytes of a step in which all forward passes go first, from those of two shorter steps."""
    less, most = FORWARDS_FIRST
    times = (micro_batches - most) / (most - less)
    return replace(
        more,
        reserved_bytes=round(more.reserved_bytes + times * max(0, more.reserved_bytes - few.reserved_bytes)),
        allocated_bytes=round(more.allocated_bytes + times * max(0, more.allocated_bytes - few.allocated_bytes)),
    )
