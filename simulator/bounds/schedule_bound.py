"""What no step through a pipeline can beat, counted from its schedule's table: passes, messages and waits for them.

A pass takes no less than its kernels, the copies of parameters that are not there, and the gathers that each unit waits
for. Hosts, traffic of other streams alongside compute, and gathers ahead of a pass are left out, so the account of a
step (`simulator.analytical.account`), which has all of them, is never below. A table is walked once for all plans that
share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.account import AccountInputs, hops_of, plan_of, stage_units, walked_together
from simulator.analytical.block_times import BlockTimes
from simulator.analytical.clocks import fastest
from simulator.bounds.least_traffic import LeastTraffic, UnitTraffic
from simulator.columns.plan_table import Floats
from simulator.pipeline.schedule_program import TURNS
from simulator.pipeline.schedule_walk import Gathered, Message, PassKind, Table, table_of, walked
from simulator.pipeline.schedules.table import Kind
from simulator.pipeline.stages import stage_layout
from simulator.step.host import step_host_s
from simulator.step.rank import Pass
from simulator.step.traffic import has_replicas
from simulator.step.units import Unit
from simulator.step.update import NORM_AXES, NORM_BYTES
from simulator.step.walk import message_bytes

RUNS = {
    Kind.FORWARD: Pass.FORWARD,
    Kind.BACKWARD: Pass.BACKWARD,
    Kind.INPUT_GRAD: Pass.INPUT,
    Kind.WEIGHT_GRAD: Pass.WEIGHT,
}


def scheduled_at_least_s(inputs: AccountInputs) -> Floats:
    """Return seconds that the step of every plan takes at least; 0 of plans without a pipeline."""
    least = np.zeros(len(inputs.context.table))
    piped = np.nonzero(inputs.context.table["pp"] > 1)[0]
    if not len(piped):
        return least
    inputs = replace(inputs, clocks=np.full(len(least), fastest(inputs.context)))
    some = inputs.take(piped, inputs.context.take(piped))
    for rows in walked_together(some.context.table, some.context, traffic=False):
        mine = some.take(rows, some.context.take(rows))
        least[piped[rows]] = _Group(mine).step_s()
    return least


@dataclass(frozen=True, slots=True)
class _LeastPass:
    """Seconds of a kind of pass: on the device, until its first reduction, and of its reductions on the stream of
    shards and on that of replicas.
    """

    device_s: Floats
    first_s: Floats
    shards_s: Floats
    replicas_s: Floats


class _Group:
    """Plans that go through one table."""

    def __init__(self, inputs: AccountInputs) -> None:
        context = inputs.context
        self.inputs, self.context, plans = inputs, context, context.table
        plan = plan_of(plans)
        name = plan.schedule_name
        self.lets_go = plans.fully_sharded & ~plans.keeps_gathered
        self.most = walked(name, plan.pp, int(plans.micro_batches[0]))
        paired = bool(plans.paired[0])
        self.table = table_of(
            name, plan.pp, self.most, plan.virtual_stages, lets_go=bool(self.lets_go[0]), paired=paired
        )
        layout = stage_layout(inputs.scenario.model, plans, context.spec.pipeline)
        embedding_s = inputs.blocks["embedding"].forward.device_s
        self.traffic = LeastTraffic(context, layout, inputs.parameters, embedding_s)
        self.units = stage_units(inputs)
        self.blocks = BlockTimes(context, inputs.blocks, inputs.clocks)
        self._known: dict[object, _LeastPass] = {}

    def step_s(self) -> Floats:
        context, table, plans = self.context, self.table, self.context.table
        passes = [self._pass(kind) for kind in table.kinds]
        done = _walk(table, passes, self._messages(), self.traffic.backward.exposed_s, has_replicas(plans))
        # A V's last micro batches turn round in another order: one more may take less than it takes a rank.
        more = np.maximum(plans.micro_batches - self.most, 0.0) * (not table.schedule.v_shaped)
        further = more * self._round_s(passes) if more.any() else 0.0
        norm = sum((context.groups.time_s("all_reduce", axis, NORM_BYTES) for axis in NORM_AXES), np.zeros(len(done)))
        host_s = step_host_s(context.spec.host, context)
        return np.asarray(host_s + done + further + self.traffic.last_s.max(axis=1) + norm)

    def _messages(self) -> Mapping[tuple[int, int], Floats]:
        sent = message_bytes(self.context, self.inputs.scenario.model.hidden)
        return hops_of(self.context, sent, 1.0).seconds

    def _round_s(self, passes: Sequence[_LeastPass]) -> Floats:
        """Return what one more micro batch takes at least, on whichever rank."""
        least: dict[tuple[int, Kind], Floats] = {}
        for kind, one in zip(self.table.kinds, passes, strict=True):
            before = least.get((kind.stage, kind.action))
            if before is not one.device_s:
                least[kind.stage, kind.action] = one.device_s if before is None else np.minimum(before, one.device_s)
        schedule = self.table.schedule
        of_rank = [np.zeros(len(self.lets_go))] * schedule.ranks
        for (stage, _), seconds in least.items():
            of_rank[schedule.rank_of(stage)] = of_rank[schedule.rank_of(stage)] + seconds
        return np.asarray(np.minimum.reduce(of_rank))

    def _pass(self, kind: PassKind) -> _LeastPass:
        shape = tuple((unit.block, unit.wrapped, unit.repeats, id(unit.words)) for unit in self.units[kind.stage])
        key = shape, kind.action, kind.first, kind.last, kind.gathered, kind.paired
        if key not in self._known:
            self._known[key] = self._new_pass(kind)
        return self._known[key]

    def _new_pass(self, kind: PassKind) -> _LeastPass:
        forward, turns = kind.action is Kind.FORWARD, kind.action in TURNS
        units = self.units[kind.stage] if forward else self.units[kind.stage][::-1]
        fresh = self._fresh(kind, units)
        nothing = np.zeros(len(self.lets_go))
        total, first, shards, replicas = nothing, nothing, nothing, nothing
        for number, unit in enumerate(units):
            traffic = self.traffic.units_s[unit.block]
            compute = self.blocks.of(unit, RUNS[kind.action], paired=kind.paired).device_s
            copies = np.where(fresh[number], traffic.out_s, 0.0)
            after = self._turning_s(traffic, kind) if turns else nothing
            # The next unit is gathered when this one has been copied.
            own = np.where(fresh[number], np.maximum(compute + after, traffic.gather_s), compute + after)
            following = self.traffic.units_s[units[number + 1].block].gather_s if number + 1 < len(units) else nothing
            here = fresh[number + 1] if number + 1 < len(units) else np.zeros(len(nothing), dtype=np.bool_)
            last = np.where(here, np.maximum(compute + after, following), compute + after)
            total = total + unit.repeats * copies + (unit.repeats - 1) * own + last
            if number == 0:
                first = compute
            if turns and kind.last:
                shards = shards + unit.repeats * traffic.reduce_s
                replicas = replicas + unit.repeats * traffic.replicate_s
        return _LeastPass(total, first, shards, replicas)

    def _turning_s(self, traffic: UnitTraffic, kind: PassKind) -> Floats:
        """Return what copies of a unit's gradients take behind its backward pass."""
        added = np.where(self.context.table.fully_sharded | (not kind.first), traffic.added_s, 0.0)
        return np.asarray(added + (traffic.in_s if kind.last else 0.0))

    def _fresh(self, kind: PassKind, units: Sequence[Unit]) -> list[NDArray[np.bool_]]:
        """Return of which units a pass gathers the parameters, in the order in which it runs them."""
        forward = kind.action is Kind.FORWARD
        gathers = (kind.first and forward) if kind.gathered is Gathered.AS_LEFT else kind.gathered is not Gathered.ALL
        some = [gathers and kind.action is not Kind.WEIGHT_GRAD] * len(units)
        if kind.gathered is Gathered.LAST:  # which a forward pass runs last, and a backward pass first
            some[-1 if forward else 0] = False
        return [self.context.table.fully_sharded & each for each in some]


def _walk(
    table: Table,
    passes: Sequence[_LeastPass],
    hop_s: Mapping[tuple[int, int], Floats],
    drain_s: Floats,
    replicated: NDArray[np.bool_],
) -> Floats:
    """Return when all ranks have done their passes, and what they send after them.

    Of plans that are `replicated`, the account has what one pass sends off wait for that of others only at its end.
    """
    ranks = table.schedule.ranks
    nothing = np.zeros(len(drain_s))
    compute, shards, replicas = ([nothing] * ranks for _ in range(3))
    sent: dict[Message, tuple[Floats, int]] = {}
    reduces = [kind.last and kind.action in TURNS for kind in table.kinds]
    for turn in table.turns:
        rank, did = turn.rank, passes[turn.kind]
        begun = compute[rank]
        for message in turn.needs:
            ready, source = sent.pop(message)
            begun = np.maximum(begun, ready) + hop_s[source, rank]
        end = begun + did.device_s
        compute[rank] = end
        if reduces[turn.kind]:
            first = begun + did.first_s
            behind = np.maximum(first, np.where(replicated, 0.0, shards[rank])) + did.shards_s
            shards[rank] = np.maximum(shards[rank], behind)
            replicas[rank] = np.maximum(replicas[rank], first + did.replicas_s)
        for message, _ in turn.sends:
            sent[message] = end, rank
    done = [end + drain_s[:, rank] for rank, end in enumerate(compute)]
    return np.asarray(np.max([*done, *shards, *replicas], axis=0))
