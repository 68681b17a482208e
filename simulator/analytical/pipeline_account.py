"""The account of a step through a pipeline: each kind of pass is counted once, and the passes are put together in the
order of the schedule's table.

Every pass of a kind moves its rank's clocks in the same way, by times that depend on whether the device, the host or
parameters still to be gathered come last. A long step repeats itself, so its table is walked twice, with few micro
batches and with one round more; every further round adds the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from simulator.analytical.rank_timeline import PARTS, RankTimeline
from simulator.analytical.table_walk import Clocks
from simulator.analytical.wave_walk import LONG_AGO, PassClocks
from simulator.columns.plan_table import Floats
from simulator.pipeline.schedule_walk import Gathered, PassKind, Table
from simulator.pipeline.schedules.table import Kind, Schedule
from simulator.pipeline.waves import Flags, Ints
from simulator.step.data_writer import DataWriter
from simulator.step.host import QUEUED_LAUNCHES
from simulator.step.traffic import REPLICAS, STREAM, WIRES
from simulator.step.units import Unit
from simulator.step.walk import StepWalk

# (compute, wire, host) clocks at the start of a pass, one row for each of the three walks: nothing in the device's way,
# only the host in its way, only the wire.
BEGINS = np.array([(0.0, LONG_AGO, LONG_AGO), (LONG_AGO, LONG_AGO, 0.0), (LONG_AGO, 0.0, LONG_AGO)])


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCounts(PassClocks):
    """How a kind of pass moves the clocks of its rank, and `parts`: its seconds on the device by part, shape (parts,
    plans).
    """

    parts: Floats

    def of_plans(self, count: int) -> PassCounts:
        """Return the counts of the first plan for `count` that are equal to it."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        alike = {name: np.broadcast_to(each[..., :1], (*each.shape[:-1], count)) for name, each in arrays.items()}
        return PassCounts(**values | alike)


Local = tuple[Kind, bool, bool, Gathered, bool]  # a PassKind without its stage
KnownPasses = dict[object, Mapping[Local, PassCounts]]  # by the units of a stage and its kinds of passes


class Counter:
    """Counts each kind of pass in the tables of some plans, once for all stages with the same units.

    `walks` has one walk for all plans, or one for each plan where the layers of their stages differ. Each pass is
    walked from three states at once (`BEGINS`), which together show how it moves the clocks. `known` has what was
    counted of earlier plans, and is added to, where all plans are equal but for their stages.
    """

    def __init__(
        self,
        walks: Sequence[StepWalk],
        tables: Sequence[Table],
        new_timeline: Callable[[int], RankTimeline],
        known: KnownPasses | None = None,
    ) -> None:
        self.walks, self.new_timeline = walks, new_timeline
        shapes = {id(units): shape_of(units) for walk in walks for units in walk.stages}
        number_of = {shape: number for number, shape in enumerate(dict.fromkeys(shapes.values()))}
        by_stage = zip(*(walk.stages for walk in walks), strict=True)
        # The number of each stage's list of units under each walk, shape (stages, walks): equal numbers for equal
        # units.
        self._shapes = np.array([[number_of[shapes[id(units)]] for units in of_walks] for of_walks in by_stage])
        blocks = [tuple((block, repeats) for block, _, repeats, _ in shape) for shape in number_of]
        contents = {one: number for number, one in enumerate(dict.fromkeys(blocks))}
        self._blocks = np.array([contents[one] for one in blocks])[self._shapes]
        self._kinds: dict[int, set[Local]] = {}
        for kind in {kind for table in tables for kind in table.kinds}:
            for shape in set(self._shapes[kind.stage].tolist()):
                self._kinds.setdefault(shape, set()).add(local_kind(kind))
        self._known: dict[int, Mapping[Local, PassCounts]] = {}
        self._known_before = known

    def endings(self, schedule: Schedule) -> list[Ending]:
        """Return how ranks end a step, once for all whose stages have the same blocks: recomputation ends nothing."""
        stages = np.array([schedule.stages_of(rank) for rank in range(schedule.ranks)])
        lists = self._blocks[stages].swapaxes(1, 2).reshape(-1, stages.shape[1])
        _, firsts, which = np.unique(lists, axis=0, return_index=True, return_inverse=True)
        which = which.reshape(schedule.ranks, len(self.walks))
        return [
            self._ending(which == number, self.walks[first % len(self.walks)], stages[first // len(self.walks)])
            for number, first in enumerate(firsts.tolist())
        ]

    def _ending(self, here: Flags, walk: StepWalk, stages: Ints) -> Ending:
        ranks = np.nonzero(here.any(axis=1))[0]
        timeline = self.new_timeline(len(ranks))
        data = walk.begin(timeline)
        return Ending(ranks, here[ranks], stages.tolist(), walk, timeline, data, timeline.host[0])

    def passes(self, table: Table) -> list[PassCounts]:
        """Return the counts of each kind of pass in a table, in the order of `table.kinds`."""
        of_stage = {stage: self._of_stage(stage) for stage in {kind.stage for kind in table.kinds}}
        return [of_stage[kind.stage][local_kind(kind)] for kind in table.kinds]

    def _of_stage(self, stage: int) -> Mapping[Local, PassCounts]:
        found = []
        shapes, firsts, which = np.unique(self._shapes[stage], return_index=True, return_inverse=True)
        for shape, first in zip(shapes.tolist(), firsts, strict=True):
            if shape not in self._known:
                self._known[shape] = self._counted_before(self._kinds[shape], self.walks[first], stage)
            found.append(self._known[shape])
        if len(found) == 1:
            return found[0]
        shared = set(found[0]).intersection(*found[1:])
        return {kind: _counts_of_each(which, [passes[kind] for passes in found]) for kind in shared}

    def _counted_before(self, kinds: set[Local], walk: StepWalk, stage: int) -> Mapping[Local, PassCounts]:
        if self._known_before is None:
            return self._passes(kinds, walk, stage)
        units = tuple((unit.code, unit.wrapped, unit.repeats, str(unit.words[0])) for unit in walk.stages[stage])
        key = units, frozenset(kinds), stage == 0
        if key not in self._known_before:
            self._known_before[key] = self._passes(kinds, walk, stage)
        return {kind: counts.of_plans(len(self.walks)) for kind, counts in self._known_before[key].items()}

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
class Ending:
    """The end of a step on the `ranks` that have the same blocks in all or some plans: those `here`, shape (ranks,
    plans), or (ranks, 1) where all plans have the same stages. `stages` are those of one of them, and `host_s` is when
    hosts begin.
    """

    ranks: Ints
    here: Flags
    stages: Sequence[int]
    walk: StepWalk
    timeline: RankTimeline
    data: DataWriter
    host_s: Floats


def _of_each(which: Ints, values: Sequence[Floats]) -> Floats:
    """Return for each column that of the `values` which it has; columns are the last dimension."""
    found = values[0]
    for number, other in enumerate(values[1:], start=1):
        if other is not found:
            found = np.where(which == number, other, found)
    return found


def _counts_of_each(which: Ints, passes: Sequence[PassCounts]) -> PassCounts:
    """Return the counts whose column i is that of `passes[which[i]]`."""
    found: dict[str, Any] = {}
    for one in fields(PassCounts):
        values = [getattr(each, one.name) for each in passes]
        found[one.name] = any(values) if isinstance(values[0], bool) else _of_each(which, values)
    return PassCounts(**found)


def shape_of(units: Sequence[Unit]) -> tuple[tuple[str, bool, int, int], ...]:
    """Return a key that is equal for stages with equal units: the code of each, whether it is wrapped, how often it
    repeats, and which recompute modes it has.
    """
    return tuple((unit.code, unit.wrapped, unit.repeats, id(unit.words)) for unit in units)


def local_kind(kind: PassKind) -> Local:
    """Return the kind of a pass without its stage."""
    return kind.action, kind.first, kind.last, kind.gathered, kind.paired


def _each_kind(kinds: set[Local]) -> list[tuple[Local, int]]:
    """Return (kind, micro batch) of passes that include every kind of a stage at least once, in an order that a stage
    can run.
    """
    runs, forwards = _backwards(kinds), _sorted(kinds, Kind.FORWARD)
    count = max(len(forwards), len(runs))
    forward = [(forwards[min(number, len(forwards) - 1)], number) for number in range(count)]
    return forward + [(kind, number) for number, run in enumerate(runs) for kind in run]


def _sorted(kinds: set[Local], action: Kind) -> list[Local]:
    """Return the kinds of `action`, first passes first and last passes last."""
    return sorted((kind for kind in kinds if kind[0] is action), key=lambda kind: (not kind[1], *kind[2:]))


def _backwards(kinds: set[Local]) -> list[list[Local]]:
    """Return the kinds of a stage's backward passes, one list for each micro batch: a whole pass, or its two halves."""
    inputs, weights = (_sorted(kinds, action) for action in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD))
    count = max(len(inputs), len(weights))
    # Where there are fewer kinds of second halves than of first halves, the first kind of second half is repeated.
    halves = [[inputs[min(n, len(inputs) - 1)], weights[max(0, n - count + len(weights))]] for n in range(count)]
    runs = halves + [[kind] for kind in _sorted(kinds, Kind.BACKWARD)]
    return sorted(runs, key=lambda run: (not run[-1][1], run[-1][2]))


def _counted(timeline: RankTimeline, *, waits_for_traffic: bool, gathers: bool) -> PassCounts:
    """Return how a pass moves the clocks, from its three walks.

    When a pass has more kernels than a stream's queue holds, the host can be ahead of the device by a full queue only,
    however long the device waited for its message. It launches the remaining kernels while the device runs, and is done
    when those not yet run just fill the queue.
    """
    free, hosted, wired = timeline.compute
    beyond = 1.0 - np.minimum(1.0, QUEUED_LAUNCHES / np.maximum(timeline.launched, 1.0))
    device_s = np.maximum(free, beyond * timeline.host[1])
    waits_s = np.where(timeline.host[0] > 0.0, timeline.host[0], LONG_AGO)
    before_parts = timeline.at_pass
    long_ago = np.full(timeline.rows, LONG_AGO)
    ends = [timeline.clocks[name][0] for name in WIRES if name in timeline.clocks and name != REPLICAS]
    summed = timeline.clocks[REPLICAS][0] if REPLICAS in timeline.clocks else long_ago
    spent_s = timeline.spent_s()
    parts = np.stack([(spent_s[name] - before_parts[name])[0] for name in PARTS])
    parts[PARTS.index("host")] += device_s - free
    lead_s = wired - free if gathers else long_ago
    return PassCounts(
        device_s=device_s,
        parts=parts,
        host_s=timeline.host[1],
        waits_s=np.where(beyond > 0.0, np.maximum(waits_s, beyond * device_s), waits_s),
        lead_s=lead_s,
        drain_s=np.max([*ends, long_ago], axis=0) - free,
        sent_s=timeline.sent_s[STREAM][0],
        summed_drain_s=summed - free,
        summed_s=timeline.sent_s[REPLICAS][0],
        waits_for_traffic=waits_for_traffic,
        slack_s=np.maximum(hosted - device_s, 0.0),
        kernels_s=parts[PARTS.index("compute")] + parts[PARTS.index("recompute")],
    )


@dataclass(frozen=True, slots=True)
class Ends:
    """How the ranks of a pipeline end a step: when each is ready to meet the others, when everything is
    done, shape (ranks, plans), and the `parts` of what follows its last pass, shape (ranks, parts,
    plans).
    """

    met: Floats
    done: Floats
    parts: Floats


def finish(endings: Sequence[Ending], clocks: Clocks) -> Ends:
    """Return how the ranks end the step. They meet to sum the norm of the gradients."""
    alone = _ends_of(endings, clocks, None)
    return _ends_of(endings, clocks, alone.met.max(axis=0))


def passes_of_ranks(table: Table, passes: Sequence[PassCounts]) -> tuple[Floats, list[PassCounts]]:
    """Return how often each rank runs each distinct pass, shape (ranks, passes), and those passes."""
    number_of: dict[int, int] = {}
    numbers = [number_of.setdefault(id(did), len(number_of)) for did in passes]
    times = np.zeros((table.schedule.ranks, len(number_of)))
    ranks = [table.schedule.rank_of(kind.stage) for kind in table.kinds]
    np.add.at(times, (ranks, numbers), np.bincount(table.turn_kinds, minlength=len(passes)))
    return times, [passes[numbers.index(number)] for number in range(len(number_of))]


def _ends_of(endings: Sequence[Ending], clocks: Clocks, meeting: Floats | None) -> Ends:
    ranks, plans = clocks.compute.shape
    met, done = np.zeros((2, ranks, plans))
    found = Ends(met, done, np.zeros((ranks, len(PARTS), plans)))
    for some in endings:
        end = _end_of(some, clocks, meeting)
        for one in fields(Ends):
            all_ranks, here = getattr(found, one.name), some.here[:, None] if one.name == "parts" else some.here
            all_ranks[some.ranks] = np.where(here, getattr(end, one.name), all_ranks[some.ranks])
    return found


def _end_of(some: Ending, clocks: Clocks, meeting: Floats | None) -> Ends:
    timeline = some.timeline
    compute_s, wire_s, host_s = (each[some.ranks] for each in (clocks.compute, clocks.sent, clocks.host))
    timeline.begin_pass(compute_s=compute_s, wire_s=wire_s, host_s=host_s)
    timeline.meeting = meeting
    some.walk.end(timeline, some.data, some.stages)
    before = timeline.at_pass
    spent_s = timeline.spent_s()
    parts = np.stack([spent_s[name] - before[name] for name in PARTS], axis=1)
    return Ends(timeline.met, timeline.done, parts)
