"""A lower bound of a step through a pipeline, from its schedule's table: passes, messages and the waits for them.

A pass takes at least the time of its kernels, the copies of parameters just gathered, and the gathers that units wait
for. Its first gather follows the collectives of earlier passes on the same stream. Hosts, and what compute and
collectives slow each other down, are left out, so the account of a step (`simulator.analytical.account`), which has
them, is never below. A table is walked once for all plans that share it.

On the critical path through a table, passes, messages and collectives happen one after the other, so the sum of their
times is a bound, too, for every plan with that table. The longest path of one plan is nearly the longest for similar
plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.account import AccountInputs, HopTimes, plan_of, unit_maker, walked_together, wrapped_alike
from simulator.analytical.block_times import BlockTimes
from simulator.analytical.pipeline_account import shape_of
from simulator.analytical.table_walk import TableWalk
from simulator.analytical.wave_walk import LONG_AGO, Course, PassClocks
from simulator.bounds.least_traffic import LeastTraffic, UnitTraffic
from simulator.columns.plan_table import Floats
from simulator.config.plan import Plan
from simulator.pipeline.schedule_program import TURNS
from simulator.pipeline.schedule_walk import Gathered, PassKind, shown, table_of
from simulator.pipeline.schedules.table import Kind
from simulator.pipeline.stages import stage_layout
from simulator.pipeline.waves import Ints
from simulator.step.host import step_host_s
from simulator.step.rank import RUNS
from simulator.step.units import Unit
from simulator.step.update import norm_s
from simulator.step.walk import message_bytes
from topology.time_limit import check_time

# What of a pass can be on a path: its time on the device, that by which it follows its first gather, the rest of its
# collectives after it, or all of them, on the stream of shards and on that of sums over replicas.
TIMES = ("device_s", "lead_s", "drain_s", "sent_s", "summed_drain_s", "summed_s")
# What is reached first, going back from the end: the end of a pass on the device, or the end of a stream's collectives.
DEVICE, SHARDS, REPLICAS = range(3)

WALKED = 3  # plans of each table that are walked in turn; the critical path of each bounds all plans


@dataclass(frozen=True, slots=True)
class Path:
    """How often a path contains each time of each kind of pass of its table, shape (TIMES, kinds), and each hop; the
    latter has shape (2, ranks), as in `Hops`.
    """

    passes: Floats
    hops: Floats


def longest_paths(walk: TableWalk, last: Sequence[int], ends: Sequence[int]) -> list[Path]:
    """Return, for each course, the critical path to the end of its `last` pass (an index into all passes) on the device
    or, as `ends` says, of the collectives up to that pass on a stream.

    Every course must have been walked with one plan whose hosts take no time.
    """
    count, waited_for_gather = len(walk.state), _led(walk)
    before, time, hops = _waited_for(walk)
    visited, now = [], np.array(last) + count * np.array(ends)
    while (now >= 0).any():
        visited.append(now)
        now = np.where(now >= 0, before[now], -1)
    paths = []
    for course, first_hop, every in zip(walk.courses, walk.hops_of.tolist(), np.array(visited).T, strict=True):
        visits = every[every >= 0]
        places, kinds = visits % count, len(course.table.kinds)
        passes = np.zeros((len(TIMES), kinds))
        on_device = visits < count
        led = places[on_device & waited_for_gather[places]]
        for row, some in ((0, places[on_device]), (1, led)):
            passes[row] = np.bincount(walk.kind[some], minlength=kinds)
        sent = visits[~on_device]
        np.add.at(passes, (time[sent], walk.kind[sent % count]), 1.0)
        shape = course.hops.seconds.shape[:2]
        mine = np.concatenate([some[places[on_device]] for some in hops])
        times = np.bincount(mine[mine >= 0] - first_hop, minlength=shape[0] * shape[1])
        paths.append(Path(passes, times.reshape(shape).astype(np.float64)))
    return paths


def _led(walk: TableWalk) -> NDArray[np.bool_]:
    """Return which passes began when their first gather allowed."""
    return walk.waited["dp"] > 0.0


def _waited_for(walk: TableWalk) -> tuple[Ints, Ints, list[Ints]]:
    """Return what each pass and the streams after it waited for: a pass or, counted from as many further on for each,
    the streams after a pass (-1: nothing); which of TIMES the streams took; and the hops of messages that passes waited
    for.
    """
    count, led = len(walk.state), _led(walk)
    previous = np.full(count, -1, dtype=np.intp)
    order = np.argsort(walk.state, kind="stable")
    same = walk.state[order[1:]] == walk.state[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    sender = np.full(walk.messages + 2, -1, dtype=np.intp)
    for sends in walk.sends:
        sender[sends.message] = np.arange(count)
    on_device = previous.copy()
    hops: list[Ints] = []
    for needs in walk.needs:
        came = (needs.waited > 0.0) & ~led
        on_device[came] = sender[needs.message[came]]
        for earlier in hops:
            earlier[came] = -1
        hops.append(np.where(led, -1, needs.hop))

    def after_others(stream: int) -> Ints:
        return np.where(previous >= 0, previous + stream * count, -1)

    on_device = np.where(led, after_others(SHARDS), on_device)
    streams = [
        np.where(drained, np.arange(count), after_others(stream))
        for stream, drained in zip((SHARDS, REPLICAS), walk.drained, strict=True)
    ]
    time = np.concatenate([np.zeros(count), *(np.where(d, 2, 3) + 2 * n for n, d in enumerate(walk.drained))])
    return np.concatenate([on_device, *streams]), time.astype(np.intp), hops


def scheduled_at_least_s(inputs: AccountInputs, limit_s: float = np.inf) -> Floats:
    """Return a lower bound of every plan's step in seconds; 0 for plans without a pipeline.

    Bounds above `limit_s` are not made tighter.
    """
    least = np.zeros(len(inputs.context.table))
    piped = np.nonzero(inputs.context.table["pp"] > 1)[0]
    if not len(piped):
        return least
    groups = []
    for alike in wrapped_alike(inputs.context.table.take(piped), inputs.context.spec):
        rows = piped[alike]
        some = _LeastPasses(inputs.take(rows, inputs.context.take(rows)))
        together = walked_together(some.context.table, some.context, traffic=False)
        groups += [(rows[mine], _Group(some, mine)) for mine in together]
    left = [group for _, group in groups]
    for _ in range(WALKED):
        left = [group for group in left if group.may_be_below(limit_s)]
        if left:
            _walk_one_of_each(left)
    for rows, group in groups:
        least[rows] = group.step_s()
    return least


def _walk_one_of_each(groups: Sequence[_Group]) -> None:
    """Walk the plan of each group that may be the fastest, and bound all other plans by its critical path."""
    chosen = [group.fastest() for group in groups]
    walk = TableWalk([group.course(row) for group, row in zip(groups, chosen, strict=True)])
    walk.run(None)
    ends = [group.end(row, walk, number) for number, (group, row) in enumerate(zip(groups, chosen, strict=True))]
    paths = longest_paths(walk, [end.place for end in ends], [end.of for end in ends])
    for group, row, end, path in zip(groups, chosen, ends, paths, strict=True):
        group.bound_by(row, end, path)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a walk at `done_s`, `of` the pass at `place`, the last of `rank`, or of collectives up to there; see
    `longest_paths`.
    """

    place: int
    of: int
    rank: int
    done_s: float


class _LeastPasses:
    """What pipeline plans whose modes wrap the same layers have in common: each kind of pass, counted once for all
    tables; messages; and what comes before and after the passes.
    """

    def __init__(self, inputs: AccountInputs) -> None:
        self.context, self.maker, spec = inputs.context, unit_maker(inputs), inputs.context.spec
        layout = stage_layout(inputs.scenario.model, self.context.table, spec.pipeline, merged=True)
        traffic = LeastTraffic(self.context, layout, inputs.parameters, inputs.blocks["embedding"].forward.device_s)
        self.traffic, self.exposed_s, self.rank_count = traffic, traffic.backward.exposed_s, layout.rank_count
        self.blocks = BlockTimes(self.context, inputs.blocks, inputs.clocks)
        self.hops = HopTimes(self.context, message_bytes(self.context, inputs.scenario.model.hidden), 1.0)
        self.norm_s = norm_s(self.context)
        self.host_s = step_host_s(spec.host, self.context)
        self.last_s = traffic.last_s.max(axis=1, where=layout.exists, initial=0.0)
        self._units: dict[object, list[tuple[object, list[Unit]]]] = {}
        self._known: dict[object, Floats] = {}
        self._busy: dict[object, tuple[UnitTraffic, Floats]] = {}

    def units(self, plan: Plan) -> list[tuple[object, list[Unit]]]:
        """Return (shape, units) of every stage of a plan: equal units folded into one, and a key that is equal for
        stages with equal units.
        """
        key = plan.pp, plan.virtual_stages, plan.layers_per_stage, plan.recompute_per_stage
        if key not in self._units:
            stages = self.maker.stages(plan, folded=True)
            self._units[key] = [(shape_of(units), units) for units in stages]
        return self._units[key]

    def pass_of(self, kind: PassKind, shape: object, units: Sequence[Unit]) -> Floats:
        """Return the TIMES of a pass of a stage of `units`, shape (TIMES, plans); `shape` is their key."""
        key = shape, kind.action, kind.first, kind.last, kind.gathered, kind.paired
        if key not in self._known:
            self._known[key] = self._new_pass(kind, units if kind.action is Kind.FORWARD else units[::-1])
        return self._known[key]

    def _new_pass(self, kind: PassKind, units: Sequence[Unit]) -> Floats:
        """Return the TIMES of a pass that runs `units` in this order. Clocks are those of the device, which begins at
        zero, and of the streams of shards and of replicas, which had nothing to do. What follows a unit is gathered
        when the unit itself has been copied, and reduced after it.
        """
        nothing, long_ago = np.zeros(len(self.host_s)), np.full(len(self.host_s), LONG_AGO)
        device = sent = scattered = summed = nothing
        shards = replicas = lead = long_ago
        fresh, reduces = [*self._fresh(kind, units), False], kind.action in TURNS and kind.last
        if fresh[0]:
            sent = self.traffic.unit(units[0].block).gather_s
            lead = self._if_sharded(sent, long_ago)
        for number, unit in enumerate(units):
            (traffic, busy), again, gathers = self._busy_s(unit, kind), unit.repeats - 1, fresh[number + 1]
            gather = self.traffic.unit(units[number + 1].block).gather_s if gathers else nothing
            reduced, replicated = (traffic.reduce_s, traffic.replicate_s) if reduces else (nothing, nothing)
            after = traffic.after_s if reduces else nothing
            out = self._if_sharded(traffic.out_s, nothing) if fresh[number] else nothing
            last = device + out  # when the last of several units in a row begins
            gathered = self._if_sharded(np.maximum(shards, last) + gather, shards) if gathers else shards
            begun = np.maximum(gathered, last) + reduced - after
            shards = np.maximum(np.maximum(gathered, begun), last + busy) + after if reduces else gathered
            if again:
                own = np.maximum(busy, self._if_sharded(traffic.gather_s, nothing)) if fresh[number] else busy
                last, further = last + again * (out + own), again * (gather + reduced)
                gathered = np.maximum(gathered + further, self._if_sharded(last + gather, long_ago))
                shards = shards + further if reduces else gathered if gathers else shards
            device = last + busy
            if gathers:
                device = np.maximum(device, self._if_sharded(gathered, nothing))
                if lead is long_ago:
                    lead = self._if_sharded(gather - device, long_ago)
            if reduces:
                replicas = np.maximum(replicas, shards - again * (gather + reduced)) + unit.repeats * replicated
            sent, scattered = sent + unit.repeats * gather, scattered + unit.repeats * reduced
            summed = summed + unit.repeats * replicated
        return np.stack([device, lead, shards - device, sent + scattered, replicas - device, summed, scattered])

    def _busy_s(self, unit: Unit, kind: PassKind) -> tuple[UnitTraffic, Floats]:
        """Return (a unit's traffic, seconds of its pass and the copies of its gradients)."""
        key = unit.code, unit.wrapped, id(unit.words), kind.action, kind.first, kind.last, kind.paired
        if key not in self._busy:
            traffic = self.traffic.unit(unit.block)
            compute = self.blocks.of(unit, RUNS[kind.action], paired=kind.paired).device_s
            after = self._turning_s(traffic, kind) if kind.action in TURNS else 0.0
            self._busy[key] = traffic, compute + after
        return self._busy[key]

    def _turning_s(self, traffic: UnitTraffic, kind: PassKind) -> Floats:
        """Return what copies of a unit's gradients take behind its backward pass."""
        added = self._if_sharded(traffic.added_s, traffic.added_s * (not kind.first))
        return np.asarray(added + (traffic.in_s if kind.last else 0.0))

    def _if_sharded(self, seconds: Floats, otherwise: Floats) -> Floats:
        """Return seconds of plans whose parameters are fully sharded, and of all others what they take otherwise."""
        sharded = self.context.table.fully_sharded
        return seconds if sharded.all() else np.where(sharded, seconds, otherwise)

    def _fresh(self, kind: PassKind, units: Sequence[Unit]) -> list[bool]:
        """Return of which units a pass gathers the parameters where they are sharded, in the order in which it runs
        them.
        """
        forward = kind.action is Kind.FORWARD
        gathers = (kind.first and forward) if kind.gathered is Gathered.AS_LEFT else kind.gathered is not Gathered.ALL
        some = [gathers and kind.action is not Kind.WEIGHT_GRAD] * len(units)
        if kind.gathered is Gathered.LAST:  # last in a forward pass, first in a backward pass
            some[-1 if forward else 0] = False
        return some


class _Group:
    """Plans that go through one table: the `rows` of those that `every` counts."""

    def __init__(self, every: _LeastPasses, rows: NDArray[np.intp]) -> None:
        check_time()
        self._besides_s = every.host_s[rows], every.last_s[rows], every.norm_s[rows]
        plans = every.context.table
        plan = plan_of(plans, int(rows[0]))
        name = plan.schedule_name
        self._micro_batches = plans.micro_batches[rows]
        lets_go = bool((plans.fully_sharded & ~plans.keeps_gathered)[rows[0]])
        self.most = shown(name, plan.pp, int(self._micro_batches[0]))
        paired = bool(plans.paired[rows[0]])
        self.table = table_of(name, plan.pp, self.most, plan.virtual_stages, lets_go=lets_go, paired=paired)
        ranks = every.rank_count[rows[0]]
        self._exposed_s = every.exposed_s[rows][:, np.repeat(np.arange(len(ranks)), ranks)]
        units = every.units(plan)
        passes = [every.pass_of(kind, *units[kind.stage]) for kind in self.table.kinds]
        different = {id(one): one for one in passes}
        number_of = {key: number for number, key in enumerate(different)}
        self._number = [number_of[id(one)] for one in passes]
        self._times = np.stack([one[:-1, rows] for one in different.values()], axis=1)
        if (self._micro_batches > self.most).any():
            # A gather may follow those of all passes before, and then one more micro batch adds as much as it gathers.
            self._times[TIMES.index("lead_s")] = LONG_AGO
            self._times[TIMES.index("sent_s")] = [one[-1, rows] for one in different.values()]
        self._hops = every.hops.of(rows, plan.pp)
        self._done = np.zeros(len(rows))
        self.walked = np.zeros(len(rows), dtype=np.bool_)

    def may_be_below(self, limit_s: float) -> bool:
        """Return whether some plan not yet walked may take at most `limit_s`."""
        return bool((self.step_s()[~self.walked] <= limit_s).any())

    def fastest(self) -> int:
        """Return the plan not yet walked with the least bound; before the first walk, that with the shortest passes."""
        done = self._done if self.walked.any() else self._times[0].sum(axis=0)
        return int(np.argmin(np.where(self.walked, np.inf, done)))

    def course(self, row: int) -> Course:
        """Return the course of one plan, with hosts that take no time."""
        nothing, long_ago = np.zeros(1), np.full(1, LONG_AGO)
        known = [
            PassClocks(
                kernels_s=nothing,
                host_s=nothing,
                waits_s=long_ago,
                slack_s=nothing,
                waits_for_traffic=False,
                **{name: seconds[number, row : row + 1] for name, seconds in zip(TIMES, self._times, strict=True)},
            )
            for number in range(self._times.shape[1])
        ]
        hops = replace(self._hops.take(slice(row, row + 1)), host_s=nothing)
        return Course(table=self.table, passes=[known[n] for n in self._number], hops=hops, begins_s=nothing)

    def end(self, row: int, walk: TableWalk, number: int) -> _End:
        """Return how the walk of a plan ends, which is course `number` of the walk."""
        mine = slice(walk.states_of[number], walk.states_of[number] + self.table.schedule.ranks)
        computed = walk.compute[mine] + self._exposed_s[row]
        ends = [
            (float(each.max()), of, int(each.argmax()))
            for of, each in enumerate((computed, walk.wire[mine], walk.summed[mine]))
        ]
        done_s, of, rank = max(ends, key=lambda end: end[0])
        return _End(walk.last_pass(mine.start + rank), of, rank, done_s)

    def bound_by(self, row: int, end: _End, path: Path) -> None:
        """Bound all plans by the path to the end of the walk of plan `row`."""
        times = np.zeros(self._times.shape[:2])
        np.add.at(times.T, self._number, path.passes.T)
        done = np.tensordot(times, self._times, axes=2) + np.tensordot(path.hops, self._hops.seconds, axes=2)
        if end.of == DEVICE:
            done = done + self._exposed_s[:, end.rank]
        self._done = np.maximum(self._done, done)
        self._done[row], self.walked[row] = end.done_s, True

    def step_s(self) -> Floats:
        """Return the bound of the step, seconds of shape (plans,)."""
        # In a V the last micro batches turn in another order, so one more may add less than a rank's time for it.
        more = np.maximum(self._micro_batches - self.most, 0.0) * (not self.table.schedule.v_shaped)
        further = more * self._round_s() if more.any() else 0.0
        host_s, last_s, norm_s = self._besides_s
        return np.asarray(host_s + self._done + further + last_s + norm_s)

    def _round_s(self) -> Floats:
        """Return the least seconds that one more micro batch adds, the minimum over ranks."""
        least: dict[tuple[int, Kind], Floats] = {}
        for kind, number in zip(self.table.kinds, self._number, strict=True):
            seconds, before = self._times[0, number], least.get((kind.stage, kind.action))
            least[kind.stage, kind.action] = seconds if before is None else np.minimum(before, seconds)
        schedule = self.table.schedule
        of_rank = [np.zeros(len(self.walked))] * schedule.ranks
        for (stage, _), seconds in least.items():
            of_rank[schedule.rank_of(stage)] = of_rank[schedule.rank_of(stage)] + seconds
        return np.asarray(np.minimum.reduce(of_rank))
