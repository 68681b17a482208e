"""The account of a step through a pipeline: each kind of pass counted once, then put together as the schedule's table
says.

What a pass takes from its rank's clocks is the same every time: so long on the device, so long where the host is
behind, so long for parameters that are not there yet. A long step repeats itself, so its table is walked with fewer
micro batches and twice, one round apart: what the round adds, further rounds add as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.rank_timeline import PARTS, RankTimeline
from simulator.columns.plan_table import Floats
from simulator.pipeline.schedule_walk import (
    Gathered,
    Message,
    PassKind,
    Table,
)
from simulator.pipeline.schedules.table import Kind
from simulator.step.rank import Value
from simulator.step.traffic import REPLICAS, STREAM, WIRES, DataWriter
from simulator.step.units import Unit
from simulator.step.walk import StepWalk

LONG_AGO = -1e6  # seconds: a clock that holds nothing up
# In which it is found how long kernels take alongside messages, to a hundredth of what they lose.
ROUNDS = 4
# (compute, wire, host) clocks with which passes begin: nothing in the way of the device, host or wire.
BEGINS = np.array([(0.0, LONG_AGO, LONG_AGO), (LONG_AGO, LONG_AGO, 0.0), (LONG_AGO, 0.0, LONG_AGO)])


@dataclass(frozen=True, slots=True)
class PassCounts:
    """What a kind of pass does to its rank: seconds on the device and their parts; until its end from the host's start,
    where the host is behind; by how much it begins later, or earlier, than the wire is free for the parameters that it
    gathers; after its end for what it has sent.
    """

    device_s: Floats
    parts: Floats  # one row a part
    host_s: Floats
    waits_s: Floats  # until the host goes on from the device's start, where it waits for the device
    lead_s: Floats
    drain_s: Floats
    sent_s: Floats  # what the stream of shards carries for it
    summed_tail_s: Floats
    summed_s: Floats  # and that of sums over their replicas
    waits_for_traffic: bool
    leads: bool  # in any row
    slack_s: Floats  # by how much the device ends later where the host is behind
    kernels_s: Floats


Local = tuple[Kind, bool, bool, Gathered, bool]  # a kind of pass, wherever its stage is


class Counter:
    """Counts the passes of stages that a plan's tables have, those of stages with the same units only once.

    `walks` is one walk of all plans, or, of plans that hold other layers on their stages, a walk for each. Three walks
    at once tell what a pass takes: with nothing in the way of the device, with nothing but the host in the way, and
    with nothing but the wire (`BEGINS`).
    """

    def __init__(
        self, walks: Sequence[StepWalk], tables: Sequence[Table], new_timeline: Callable[[int], RankTimeline]
    ) -> None:
        self.walks, self.new_timeline = walks, new_timeline
        shape_of = {id(units): _shape(units) for walk in walks for units in walk.stages}
        # Of each stage the shapes that it has, each with the first walk that has it, and which of them every walk has.
        self._shapes: list[dict[object, int]] = []
        self._which: list[NDArray[np.intp]] = []
        for stage in range(len(walks[0].stages)):
            shapes = [shape_of[id(walk.stages[stage])] for walk in walks]
            first = {shape: number for number, shape in reversed([*enumerate(shapes)])}
            order = {shape: number for number, shape in enumerate(first)}
            self._shapes.append(first)
            self._which.append(np.array([order[shape] for shape in shapes], dtype=np.intp))
        self._kinds: dict[object, set[Local]] = {}
        for kind in {kind for table in tables for kind in table.kinds}:
            for shape in self._shapes[kind.stage]:
                self._kinds.setdefault(shape, set()).add(local_kind(kind))
        self._known: dict[object, dict[Local, PassCounts]] = {}

    def rank(self, stages: Sequence[int]) -> RankCounts:
        """Return the counts of a rank that has some stages."""
        which = np.stack([self._which[stage] for stage in stages])
        _, firsts, contents = np.unique(which, axis=1, return_index=True, return_inverse=True)
        endings = []
        for first in firsts:
            timeline = self.new_timeline(0)
            data = self.walks[first].begin(timeline)
            endings.append((self.walks[first], timeline, data))
        passes = {stage: self.stage(stage) for stage in stages}
        return RankCounts(stages, endings[0][1].host, passes, endings, contents.ravel())

    def stage(self, stage: int) -> Mapping[Local, PassCounts]:
        """Return the counts of a stage's passes by kind."""
        found = []
        for shape, first in self._shapes[stage].items():
            if shape not in self._known:
                self._known[shape] = self._passes(self._kinds[shape], self.walks[first], stage)
            found.append(self._known[shape])
        if len(found) == 1:
            return found[0]
        shared = set(found[0]).intersection(*found[1:])
        return {kind: _counts_of_each(self._which[stage], [passes[kind] for passes in found]) for kind in shared}

    def _passes(self, kinds: set[Local], walk: StepWalk, stage: int) -> dict[Local, PassCounts]:
        units = walk.stages[stage]
        timeline = self.new_timeline(len(BEGINS))
        data = DataWriter(rank=timeline, traffic=walk.traffic)
        wanted = {Gathered.NONE: [], Gathered.LAST: units[-1:], Gathered.ALL: units}
        passes: dict[Local, PassCounts] = {}
        for local, micro_batch in _each_kind(kinds):
            action, _, last, gathered, paired = local
            timeline.runs_ahead, timeline.paired = True, paired
            if gathered is not Gathered.AS_LEFT:
                data.have_gathered(units, wanted[gathered])
            data.begin_pass()
            compute_s, wire_s, host_s = BEGINS.T[:, :, None]
            timeline.begin_pass(compute_s=compute_s, wire_s=wire_s, host_s=host_s)
            walk.action(timeline, data, stage, action, micro_batch, last=last)
            if local not in passes:
                passes[local] = _counted(
                    timeline, waits_for_traffic=last and stage == 0, gathers=walk.traffic.gathers_before_use
                )
        return passes


@dataclass(frozen=True, slots=True)
class RankCounts:
    """One pipeline rank: when its host begins, its stages' passes, and who counts the end of its step:
    a walk with its timeline for each of its possible `contents`, of which every plan has one.
    """

    stages: Sequence[int]
    host_s: Floats
    passes: Mapping[int, Mapping[Local, PassCounts]]
    endings: Sequence[tuple[StepWalk, RankTimeline, DataWriter]]
    contents: NDArray[np.intp]

    def of(self, kind: PassKind) -> PassCounts:
        return self.passes[kind.stage][local_kind(kind)]


def _of_each(which: NDArray[np.intp], values: Sequence[Floats]) -> Floats:
    """Return for each column that of the `values` which it has; columns are the last dimension."""
    if len(values) == 1:
        return values[0]
    columns = np.moveaxis(np.stack(np.broadcast_arrays(*values)), -1, 1)
    return np.asarray(columns[which, np.arange(columns.shape[1])].T)


def _counts_of_each(which: NDArray[np.intp], passes: Sequence[PassCounts]) -> PassCounts:
    """Return for each column that of the `passes` which it has."""
    found: dict[str, Any] = {}
    for one in fields(PassCounts):
        values = [getattr(each, one.name) for each in passes]
        found[one.name] = any(values) if isinstance(values[0], bool) else _of_each(which, values)
    return PassCounts(**found)


def _shape(units: Sequence[Unit]) -> object:
    return tuple((unit.block, unit.wrapped, unit.repeats, id(unit.words)) for unit in units)


def local_kind(kind: PassKind) -> Local:
    """Return a kind of pass wherever its stage is."""
    return kind.action, kind.first, kind.last, kind.gathered, kind.paired


def _each_kind(kinds: set[Local]) -> list[tuple[Local, int]]:
    """Return (kind, micro batch) of passes that show each kind of a stage once at least, in an order that can be."""
    runs, forwards = _backwards(kinds), _sorted(kinds, Kind.FORWARD)
    count = max(len(forwards), len(runs))
    forward = [(forwards[min(number, len(forwards) - 1)], number) for number in range(count)]
    return forward + [(kind, number) for number, run in enumerate(runs) for kind in run]


def _sorted(kinds: set[Local], action: Kind) -> list[Local]:
    """Return the kinds of an action, first ones first and last ones last."""
    return sorted((kind for kind in kinds if kind[0] is action), key=lambda kind: (not kind[1], *kind[2:]))


def _backwards(kinds: set[Local]) -> list[list[Local]]:
    """Return the kinds of a stage's backward passes, micro batch by micro batch: whole, or in both halves."""
    inputs, weights = (_sorted(kinds, action) for action in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD))
    count = max(len(inputs), len(weights))
    # Where there are fewer kinds of second halves than of first ones, their first comes again.
    halves = [[inputs[min(n, len(inputs) - 1)], weights[max(0, n - count + len(weights))]] for n in range(count)]
    runs = halves + [[kind] for kind in _sorted(kinds, Kind.BACKWARD)]
    return sorted(runs, key=lambda run: (not run[-1][1], run[-1][2]))


def _counted(timeline: RankTimeline, *, waits_for_traffic: bool, gathers: bool) -> PassCounts:
    """Return what a pass took, from the walks of it."""
    free, hosted, wired = timeline.compute
    before_parts = timeline.at_pass
    long_ago = np.full(timeline.rows, LONG_AGO)
    ends = [timeline.clocks[name][0] for name in WIRES if name in timeline.clocks and name != REPLICAS]
    summed = timeline.clocks[REPLICAS][0] if REPLICAS in timeline.clocks else long_ago
    spent_s = timeline.spent_s()
    parts = np.stack([(spent_s[name] - before_parts[name])[0] for name in PARTS])
    lead_s = wired - free if gathers else long_ago
    return PassCounts(
        device_s=free,
        parts=parts,
        host_s=timeline.host[1],
        waits_s=np.where(timeline.host[0] > 0.0, timeline.host[0], LONG_AGO),
        lead_s=lead_s,
        drain_s=np.max([*ends, long_ago], axis=0) - free,
        sent_s=timeline.sent_s[STREAM][0],
        summed_tail_s=summed - free,
        summed_s=timeline.sent_s[REPLICAS][0],
        waits_for_traffic=waits_for_traffic,
        leads=bool((lead_s > 0.5 * LONG_AGO).any()),
        slack_s=np.maximum(hosted - free, 0.0),
        kernels_s=parts[PARTS.index("compute")] + parts[PARTS.index("recompute")],
    )


@dataclass(frozen=True, slots=True)
class Hops:
    """What a message from rank to rank takes; while it waits for its receiver it holds a share of the sender's SMs."""

    seconds: Mapping[tuple[int, int], Floats]
    held: Mapping[tuple[int, int], Floats]
    host_s: Floats


@dataclass(slots=True)
class Clocks:
    """Where a rank is while the table is walked, and what it has waited for so far."""

    host: Floats
    compute: Floats
    wire: Floats
    summed: Floats  # when the stream of sums over replicas is done
    waits: dict[str, Floats]
    # By channel: the share of SMs that its message holds, and until when it is on its way.
    sending: dict[tuple[int, str], tuple[Floats, Floats]] = field(default_factory=dict)
    filling: Floats | None = None  # how long it has waited before its first pass

    def wait(self, until: Floats, part: str) -> None:
        later = np.maximum(self.compute, until)
        self.waits[part] = self.waits[part] + (later - self.compute)
        self.compute = later

    def run(self, did: PassCounts) -> None:
        """Run a pass, alongside what is being sent."""
        begun = self.compute
        longer = self._beside_messages(did.kernels_s)
        self.compute = begun + did.device_s
        if longer is not None:
            self.waits["contention"] = self.waits["contention"] + longer
            self.compute = self.compute + longer
        self.host = np.maximum(self.host + did.host_s, begun + did.waits_s)
        self.wire = np.maximum(self.wire + did.sent_s, self.compute + did.drain_s)
        self.summed = np.maximum(self.summed + did.summed_s, self.compute + did.summed_tail_s)
        if did.waits_for_traffic:
            self.wait(self.sent, "dp")

    def _beside_messages(self, kernels_s: Floats) -> Floats | None:
        """Return how much longer kernels take while messages hold SMs; None where there are none."""
        left = {channel: (share, until - self.compute) for channel, (share, until) in self.sending.items()}
        for channel, (_, seconds) in left.items():
            if not (seconds > 0).any():
                del self.sending[channel]
        under_way = [(share, np.maximum(seconds, 0.0)) for share, seconds in map(left.__getitem__, self.sending)]
        if not under_way:
            return None
        # Of the time that they take, each message takes its share for as long as it is on its way.
        longer: Floats | None = None
        for _ in range(ROUNDS):
            beside_s = kernels_s if longer is None else kernels_s + longer
            share, seconds = under_way[0]
            longer = share * np.minimum(beside_s, seconds)
            for share, seconds in under_way[1:]:
                longer = longer + share * np.minimum(beside_s, seconds)
        return longer

    @property
    def sent(self) -> Floats:
        """When all streams of data-parallel traffic are done."""
        return np.maximum(self.wire, self.summed)


Lags = dict[Message, Floats]  # how long each message waited and moved


def walk_table(
    table: Table, ranks: Sequence[RankCounts], hops: Hops, lags: Lags, *, synchronizes: bool
) -> tuple[list[Clocks], Lags]:
    """Return where every rank is after its last pass, and how long messages were on their way; `lags` are a guess at
    it.
    """
    nothing = np.zeros_like(hops.host_s)
    parts = dict.fromkeys(("bubble", "pp", "dp", "host", "contention"), nothing)
    clocks = [Clocks(r.host_s, r.host_s, nothing, nothing, parts | {"host": r.host_s}) for r in ranks]
    passes = [
        {index: rank.of(table.kinds[index]) for index in set(row)} for rank, row in zip(ranks, table.rows, strict=True)
    ]
    sent: dict[Message, tuple[Floats, int]] = {}
    took: Lags = {}
    channels: dict[tuple[int, str], Floats] = {}
    for turn in table.turns:
        at, did = clocks[turn.rank], passes[turn.rank][turn.kind]
        for message in turn.needs:
            at.host = at.host + hops.host_s
            ready, source = sent.pop(message)
            channel = message[:2]
            at.wait(np.maximum(np.maximum(ready, channels.get(channel, nothing)), at.host), "bubble")
            at.wait(at.compute + hops.seconds[source, turn.rank], "pp")
            channels[channel] = at.compute
            took[message] = at.compute - ready
        if did.leads:
            at.wait(np.maximum(at.wire, at.host) + did.lead_s, "dp")
        if at.filling is None:
            at.filling = at.waits["bubble"] + at.waits["host"]
        at.wait(at.host + did.slack_s, "host")
        at.run(did)
        if synchronizes:
            at.host = np.maximum(at.host, at.compute)
        for message, target in turn.sends:
            at.host = at.host + hops.host_s
            ready = np.maximum(at.compute, at.host)
            sent[message] = ready, turn.rank
            if lags:
                at.sending[message[:2]] = hops.held[turn.rank, target], ready + lags[message]
    return clocks, took


@dataclass(frozen=True, slots=True)
class End:
    """How a rank ends a step: when, when all of it is done, and the parts of what comes after its last pass."""

    met: Floats
    compute: Floats
    done: Floats
    parts: Floats


def finish(ranks: Sequence[RankCounts], clocks: Sequence[Clocks]) -> list[End]:
    """Return how every rank ends the step. Ranks meet where the norm of gradients is summed."""
    alone = [_end_of(rank, at.compute, at.sent, at.host) for rank, at in zip(ranks, clocks, strict=True)]
    meeting = np.max([end.met for end in alone], axis=0)
    return [_end_of(rank, at.compute, at.sent, at.host, meeting) for rank, at in zip(ranks, clocks, strict=True)]


def issued(table: Table, ranks: Sequence[RankCounts], hops: Hops) -> Floats:
    """Return when ranks would be done that waited for nothing but their hosts, which wait for nothing."""
    ends = []
    for number, rank in enumerate(ranks):
        kinds, times = np.unique(table.rows[number], return_counts=True)
        passes = sum(count * rank.of(table.kinds[kind]).host_s for kind, count in zip(kinds, times, strict=True))
        messages = sum(len(turn.needs) + len(turn.sends) for turn in table.turns if turn.rank == number)
        ends.append(_end_of(rank, LONG_AGO, LONG_AGO, rank.host_s + passes + messages * hops.host_s).done)
    return np.stack(ends)


def _end_of(rank: RankCounts, compute_s: Value, wire_s: Value, host_s: Value, meeting: Floats | None = None) -> End:
    ends = []
    for walk, timeline, data in rank.endings:
        timeline.begin_pass(compute_s=compute_s, wire_s=wire_s, host_s=host_s)
        timeline.meeting = meeting
        walk.end(timeline, data, rank.stages)
        before = timeline.at_pass
        spent_s = timeline.spent_s()
        parts = np.stack([spent_s[name] - before[name] for name in PARTS])
        ends.append(End(timeline.met, timeline.compute, timeline.done, parts))
    return End(*(_of_each(rank.contents, [getattr(end, one.name) for end in ends]) for one in fields(End)))
