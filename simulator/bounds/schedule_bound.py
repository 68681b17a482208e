"""A lower bound of a step through a pipeline, from its schedule's table: passes, messages and the waits for them.

A pass takes at least the time of its kernels, the copies of parameters just gathered, and the gathers that units wait
for. Hosts, traffic of other streams alongside compute, and gathers ahead of a pass are left out, so the account of a
step (`simulator.analytical.account`), which has all of them, is never below. A table is walked once for all plans that
share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.account import AccountInputs, HopTimes, plan_of, unit_maker, walked_together, wrapped_alike
from simulator.analytical.block_times import BlockTimes
from simulator.analytical.clocks import fastest
from simulator.analytical.pipeline_account import shape_of
from simulator.analytical.table_walk import LONG_AGO, Clocks, Course, PassClocks, TableWalk, WalkedPasses
from simulator.bounds.critical_path import Path, longest_paths
from simulator.bounds.least_traffic import LeastTraffic, UnitTraffic
from simulator.columns.plan_table import Floats
from simulator.config.plan import Plan
from simulator.pipeline.schedule_program import TURNS
from simulator.pipeline.schedule_walk import Gathered, PassKind, table_of, walked
from simulator.pipeline.schedules.table import Kind
from simulator.pipeline.stages import stage_layout
from simulator.step.host import step_host_s
from simulator.step.rank import Pass
from simulator.step.traffic import has_replicas
from simulator.step.units import Unit, folded
from simulator.step.update import NORM_AXES, NORM_BYTES
from simulator.step.walk import message_bytes
from topology.time_limit import check_time

RUNS = {
    Kind.FORWARD: Pass.FORWARD,
    Kind.BACKWARD: Pass.BACKWARD,
    Kind.INPUT_GRAD: Pass.INPUT,
    Kind.WEIGHT_GRAD: Pass.WEIGHT,
}


WALKED = 3  # plans of each table that are walked in turn; the critical path of each bounds all plans


def scheduled_at_least_s(inputs: AccountInputs, limit_s: float = np.inf) -> Floats:
    """Return a lower bound of every plan's step in seconds; 0 for plans without a pipeline.

    Bounds above `limit_s` are not made tighter.
    """
    least = np.zeros(len(inputs.context.table))
    piped = np.nonzero(inputs.context.table["pp"] > 1)[0]
    if not len(piped):
        return least
    inputs = replace(inputs, clocks=np.full(len(least), fastest(inputs.context)))
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
    ends = [
        group.ends(row, clocks, walk.passes_of(number))
        for number, (group, row, clocks) in enumerate(zip(groups, chosen, walk.clocks(), strict=True))
    ]
    paths = longest_paths(walk, [end.place for end in ends])
    for group, row, end, path in zip(groups, chosen, ends, paths, strict=True):
        group.bound_by(row, end, path)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a walk: its last pass at `place`, and the time `done_s`. Either the compute of `rank` ends last, or
    the reductions of the passes `sent` do, beginning with the first of them, on the stream of replicas or on that of
    shards.
    """

    place: int
    done_s: float
    rank: int = -1
    sent: tuple[int, ...] = ()
    replicas: bool = False


@dataclass(frozen=True, slots=True)
class _LeastPass:
    """Seconds of a kind of pass: on the device, until its first reduction can start, and of its reductions on the
    stream of shards and on that of replicas.
    """

    device_s: Floats
    first_s: Floats
    shards_s: Floats
    replicas_s: Floats

    def take(self, rows: NDArray[np.intp]) -> _LeastPass:
        """Return the seconds of the plans `rows`."""
        return _LeastPass(*(getattr(self, one.name)[rows] for one in fields(_LeastPass)))


class _LeastPasses:
    """What pipeline plans whose modes wrap the same layers have in common: each kind of pass, counted once for all
    tables; messages; and what comes before and after the passes.
    """

    def __init__(self, inputs: AccountInputs) -> None:
        self.context, self.maker, spec = inputs.context, unit_maker(inputs), inputs.context.spec
        layout = stage_layout(inputs.scenario.model, self.context.table, spec.pipeline, merged=True)
        traffic = LeastTraffic(self.context, layout, inputs.parameters, inputs.blocks["embedding"].forward.device_s)
        self.units_s, self.exposed_s, self.rank_count = traffic.units_s, traffic.backward.exposed_s, layout.rank_count
        self.blocks = BlockTimes(self.context, inputs.blocks, inputs.clocks)
        self.hops = HopTimes(self.context, message_bytes(self.context, inputs.scenario.model.hidden), 1.0)
        self.replicated = has_replicas(self.context.table)
        norm = (self.context.groups.time_s("all_reduce", axis, NORM_BYTES) for axis in NORM_AXES)
        self.norm_s = sum(norm, np.zeros(len(layout.exists)))
        self.host_s = step_host_s(spec.host, self.context)
        self.last_s = traffic.last_s.max(axis=1, where=layout.exists, initial=0.0)
        self._units: dict[object, list[tuple[object, list[Unit]]]] = {}
        self._known: dict[object, _LeastPass] = {}
        self._busy: dict[object, tuple[UnitTraffic, Floats, Floats]] = {}

    def units(self, plan: Plan) -> list[tuple[object, list[Unit]]]:
        """Return (shape, units) of every stage of a plan: equal units folded into one, and a key that is equal for
        stages with equal units.
        """
        key = plan.pp, plan.virtual_stages, plan.layers_per_stage, plan.recompute_per_stage
        if key not in self._units:
            stages = [folded(units) for units in self.maker.stages(plan)]
            self._units[key] = [(shape_of(units), units) for units in stages]
        return self._units[key]

    def pass_of(self, kind: PassKind, shape: object, units: Sequence[Unit]) -> _LeastPass:
        """Return a pass of a stage of `units`; `shape` is their key."""
        key = shape, kind.action, kind.first, kind.last, kind.gathered, kind.paired
        if key not in self._known:
            self._known[key] = self._new_pass(kind, units if kind.action is Kind.FORWARD else units[::-1])
        return self._known[key]

    def _new_pass(self, kind: PassKind, units: Sequence[Unit]) -> _LeastPass:
        """Return a pass that runs `units` in this order."""
        nothing = np.zeros(len(self.replicated))
        total, first, shards, replicas = nothing, nothing, nothing, nothing
        fresh = [*self._fresh(kind, units), False]
        for number, (unit, following) in enumerate(zip(units, [*units[1:], None], strict=True)):
            traffic, compute, busy = self._busy_s(unit, kind)
            if fresh[number]:
                total = total + self._if_sharded(unit.repeats * traffic.out_s, nothing)
            # The next unit is gathered when this one has been copied.
            if unit.repeats > 1:
                own = self._if_sharded(np.maximum(busy, traffic.gather_s), busy) if fresh[number] else busy
                total = total + (unit.repeats - 1) * own
            if fresh[number + 1] and following is not None:
                busy = self._if_sharded(np.maximum(busy, self.units_s[following.block].gather_s), busy)
            total = total + busy
            if number == 0:
                first = compute
            if kind.action in TURNS and kind.last:
                shards = shards + unit.repeats * traffic.reduce_s
                replicas = replicas + unit.repeats * traffic.replicate_s
        return _LeastPass(total, first, shards, replicas)

    def _busy_s(self, unit: Unit, kind: PassKind) -> tuple[UnitTraffic, Floats, Floats]:
        """Return (a unit's traffic, seconds of its pass, seconds of its pass and the copies of its gradients)."""
        key = unit.block, unit.wrapped, id(unit.words), kind.action, kind.first, kind.last, kind.paired
        if key not in self._busy:
            traffic = self.units_s[unit.block]
            compute = self.blocks.of(unit, RUNS[kind.action], paired=kind.paired).device_s
            after = self._turning_s(traffic, kind) if kind.action in TURNS else 0.0
            self._busy[key] = traffic, compute, compute + after
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
        self.most = walked(name, plan.pp, int(self._micro_batches[0]))
        paired = bool(plans.paired[rows[0]])
        self.table = table_of(name, plan.pp, self.most, plan.virtual_stages, lets_go=lets_go, paired=paired)
        ranks = every.rank_count[rows[0]]
        self._exposed_s = every.exposed_s[rows][:, np.repeat(np.arange(len(ranks)), ranks)]
        units = every.units(plan)
        known: dict[int, int] = {}
        self._different: list[tuple[_LeastPass, PassKind]] = []
        self._number = []
        for kind in self.table.kinds:
            did = every.pass_of(kind, *units[kind.stage])
            if known.setdefault(id(did), len(known)) == len(self._different):
                self._different.append((did.take(rows), kind))
            self._number.append(known[id(did)])
        self.passes = [self._different[number][0] for number in self._number]
        self._device = np.stack([did.device_s for did, _ in self._different])
        self._reduces = np.array([kind.last and kind.action in TURNS for kind in self.table.kinds])
        self._replicated = every.replicated[rows]
        self._hops = every.hops.of(rows, plan.pp)
        self._done = np.zeros(len(rows))
        self.walked = np.zeros(len(rows), dtype=np.bool_)

    def may_be_below(self, limit_s: float) -> bool:
        """Return whether some plan not yet walked may take at most `limit_s`."""
        return bool((self.step_s()[~self.walked] <= limit_s).any())

    def fastest(self) -> int:
        """Return the plan not yet walked with the least bound; before the first walk, that with the shortest passes."""
        return int(
            np.argmin(np.where(self.walked, np.inf, self._done if self.walked.any() else self._device.sum(axis=0)))
        )

    def course(self, row: int) -> Course:
        """Return the course of one plan, with hosts that take no time.

        With replicas, the account lets the collectives of a pass wait for those of other passes only at its end.
        """
        nothing, long_ago = np.zeros(1), np.full(1, LONG_AGO)
        known = []
        for did, kind in self._different:
            reduces = kind.last and kind.action in TURNS
            device, first, shards, replicas = (
                each[row : row + 1] for each in (did.device_s, did.first_s, did.shards_s, did.replicas_s)
            )
            known.append(
                PassClocks(
                    device_s=device,
                    kernels_s=nothing,
                    host_s=nothing,
                    waits_s=long_ago,
                    slack_s=nothing,
                    lead_s=long_ago,
                    drain_s=first + shards - device if reduces else long_ago,
                    sent_s=nothing if self._replicated[row] else shards,
                    summed_drain_s=first + replicas - device if reduces else long_ago,
                    summed_s=nothing,
                    waits_for_traffic=False,
                )
            )
        hops = replace(self._hops.take(slice(row, row + 1)), host_s=nothing)
        return Course(table=self.table, passes=[known[n] for n in self._number], hops=hops, begins_s=nothing)

    def ends(self, row: int, clocks: Clocks, passes: WalkedPasses) -> _End:
        """Return how the walk of a plan ends; its ranks ran `passes`."""
        computed = clocks.compute[:, 0] + self._exposed_s[row]
        rank, sender = int(computed.argmax()), int(clocks.sent[:, 0].argmax())
        if computed[rank] >= clocks.sent[sender, 0]:
            return _End(int(passes.places[passes.rank == rank][-1]), float(computed[rank]), rank=rank)
        replicas = bool(clocks.summed[sender, 0] > clocks.wire[sender, 0])
        mine = (passes.rank == sender) & self._reduces[passes.kind]
        places, kinds, ends = passes.places[mine], passes.kind[mine].tolist(), []
        for number, kind in enumerate(kinds):
            following = (kind,) if replicas or self._replicated[row] else tuple(kinds[number:])
            sent_s = sum(
                float((self.passes[k].replicas_s if replicas else self.passes[k].shards_s)[row]) for k in following
            )
            ends.append(
                (passes.began[mine][number] + float(self.passes[kind].first_s[row]) + sent_s, number, following)
            )
        _, number, following = max(ends)
        return _End(int(places[number]), float(clocks.sent[sender, 0]), sent=following, replicas=replicas)

    def bound_by(self, row: int, end: _End, path: Path) -> None:
        """Bound all plans by the path to the end of the walk of plan `row`."""
        times = np.bincount(self._number, path.passes, len(self._device))
        if end.sent:
            times[self._number[end.sent[0]]] -= 1.0
        done = times @ self._device + np.tensordot(path.hops, self._hops.seconds, axes=2)
        if end.sent:
            first, *rest = (self.passes[kind] for kind in end.sent)
            own, *others = ((did.replicas_s if end.replicas else did.shards_s) for did in (first, *rest))
            done = done + first.first_s + own + np.where(self._replicated, 0.0, sum(others, np.zeros(len(done))))
        else:
            done = done + self._exposed_s[:, end.rank]
        self._done = np.maximum(self._done, done)
        self._done[row] = end.done_s
        self.walked[row] = True

    def step_s(self) -> Floats:
        """Return the bound of the step, seconds of shape (plans,)."""
        # In a V the last micro batches turn in another order, so one more may add less than a rank's time for it.
        more = np.maximum(self._micro_batches - self.most, 0.0) * (not self.table.schedule.v_shaped)
        further = more * self._round_s(self.passes) if more.any() else 0.0
        host_s, last_s, norm_s = self._besides_s
        return np.asarray(host_s + self._done + further + last_s + norm_s)

    def _round_s(self, passes: Sequence[_LeastPass]) -> Floats:
        """Return the least seconds that one more micro batch adds, the minimum over ranks."""
        least: dict[tuple[int, Kind], Floats] = {}
        for kind, one in zip(self.table.kinds, passes, strict=True):
            before = least.get((kind.stage, kind.action))
            if before is not one.device_s:
                least[kind.stage, kind.action] = one.device_s if before is None else np.minimum(before, one.device_s)
        schedule = self.table.schedule
        of_rank = [np.zeros(len(self._done))] * schedule.ranks
        for (stage, _), seconds in least.items():
            of_rank[schedule.rank_of(stage)] = of_rank[schedule.rank_of(stage)] + seconds
        return np.asarray(np.minimum.reduce(of_rank))
