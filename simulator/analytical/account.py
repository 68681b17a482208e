"""The account of a step: the seconds of each of its parts, added up over the operations that `simulator.step.walk`
issues.

Plans whose steps have the same operations with other sizes are counted together, as columns. Micro batches that repeat
each other are counted once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.block_times import BlockTimes, TrafficTimes
from simulator.analytical.clocks import working_clocks
from simulator.analytical.layer_cost import BlockCost, network_blocks
from simulator.analytical.pipeline_account import Counter, KnownPasses, finish, passes_of_ranks
from simulator.analytical.rank_timeline import PARTS, RankTimeline
from simulator.analytical.scenario import Scenario
from simulator.analytical.table_walk import Clocks, walk_tables
from simulator.analytical.wave_walk import Course, Hops
from simulator.columns.plan_columns import distinct, words
from simulator.columns.plan_table import Floats, PlanTable
from simulator.config.overlap_sites import NONE
from simulator.config.plan import Plan
from simulator.pipeline.schedule_walk import period_of, shown, table_of, walked
from simulator.pipeline.schedules.table import Action, Kind
from simulator.runtimes.library import RuntimeSpec
from simulator.runtimes.model_operators import ModelOperators
from simulator.step.context import CostContext
from simulator.step.held import Parameters
from simulator.step.traffic import sharded_sends, traffic_kinds
from simulator.step.units import UnitMaker, wrapping_period
from simulator.step.walk import StepWalk, message_bytes
from topology.time_limit import check_time

BUBBLE, HOST = PARTS.index("bubble"), PARTS.index("host")
# Axes along which communication can be exposed.
AXES = ("tp", "cp", "ep", "pp", "dp")
BREAKDOWN = ("compute", "recompute", "copies", "contention", "exposed_communication", "bubble", "host", "optimizer")
# Micro batches of a step that are walked; further ones repeat the second.
WALKED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The step of every plan: `parts_s` maps a part to seconds, shape (plans,); the parts add up to the step."""

    parts_s: dict[str, Floats]
    clocks: Floats  # factor of kernel times, relative to a GPU that is never idle
    together: Sequence[NDArray[np.intp]] = ()  # rows that one walk gave

    @property
    def total_s(self) -> Floats:
        return sum(self.parts_s.values(), np.zeros(len(self.clocks)))

    @property
    def breakdown_s(self) -> dict[str, Floats]:
        """The seconds of each part of every step, with exposed communication summed over axes."""
        exposed_s = sum((self.parts_s[axis] for axis in AXES), np.zeros(len(self.clocks)))
        parts = {**self.parts_s, "exposed_communication": exposed_s}
        parts["optimizer"] = parts["optimizer"] + parts["orthogonal"]
        parts["copies"] = parts["copies"] + parts["packing"]
        return {name: parts[name] for name in BREAKDOWN}


@dataclass(frozen=True, kw_only=True)  # no slots, for a cached property
class AccountInputs:
    """What an account is computed from: the plans of `context`, the costs of their blocks, and the clocks of their
    kernels, by default those that the power limit allows.
    """

    scenario: Scenario
    context: CostContext
    operators: ModelOperators
    blocks: Mapping[str, BlockCost]
    parameters: Parameters
    at: Floats | None = None

    @cached_property
    def clocks(self) -> Floats:
        if self.at is not None:
            return self.at
        return working_clocks(self.scenario.model, self.blocks, self.parameters, self.context)

    def take(self, rows: NDArray[np.intp], context: CostContext) -> AccountInputs:
        """Return the inputs of the plans `rows`, for which `context` was made."""
        blocks = {name: block.take(rows) for name, block in self.blocks.items()}
        return replace(
            self, context=context, blocks=blocks, parameters=self.parameters.take(rows), at=self.clocks[rows]
        )


def account_plans(inputs: AccountInputs) -> Account:
    """Return the account of all plans; plans whose steps have the same operations are walked together."""
    inputs = at_clocks(inputs)
    rows = len(inputs.context.table)
    parts = {part: np.zeros(rows) for part in PARTS}
    if inputs.context.table.fully_sharded.any():
        TrafficTimes(inputs.context).look_up(sharded_sends(inputs.context, unit_maker(inputs).kinds()))
    piped: list[tuple[NDArray[np.intp], PipelinePlans]] = []
    together = walked_together(inputs.context.table, inputs.context)
    for some in together:
        check_time()
        mine = inputs if len(some) == rows else inputs.take(some, inputs.context.take(some))
        if mine.context.table["pp"][0] > 1:
            piped.append((some, PipelinePlans(mine)))
            continue
        account = account_unpipelined(mine)
        for part in PARTS:
            parts[part][some] = account.parts_s[part]
    accounts = account_pipelines([plans for _, plans in piped])
    for (some, _), account in zip(piped, accounts, strict=True):
        for part in PARTS:
            parts[part][some] = account.parts_s[part]
    return Account(parts_s=parts, clocks=inputs.clocks, together=together)


def at_clocks(inputs: AccountInputs) -> AccountInputs:
    """Return the inputs with what kernels at their clocks, rather than sustained ones, leave exposed of the transfers
    that run next to them. Bounds do without: longer kernels hide more.
    """
    context, clocks = inputs.context, inputs.clocks
    rings = sum(cost.lost_s for block in inputs.blocks.values() for cost in (block.forward, block.backward))
    rows = np.nonzero(((context.table.tp_overlap != NONE) | (rings > 0)) & (clocks != 1.0))[0]
    if not len(rows):
        return inputs
    some = context.take(rows)
    by_plan: Any = some.roofline.kernel_factor * clocks[rows]
    roofline = replace(some.roofline, kernel_factor=by_plan)
    modes = list(inputs.blocks["dense"].recompute)
    slower = replace(some, roofline=roofline, own_costs=True)
    hiding = [name for name, block in inputs.blocks.items() if block.hides]
    slowed = network_blocks(inputs.operators, slower, modes, only=hiding)
    changed = {name: inputs.blocks[name].with_transfers_of(slowed[name], rows, clocks[rows]) for name in hiding}
    return replace(inputs, blocks={**inputs.blocks, **changed}, at=clocks)


def account_assignments(inputs: AccountInputs, plans: Sequence[Plan], known: KnownPasses | None = None) -> Account:
    """Return the account of `plans`, which differ only in the layers and recompute modes of their stages.

    `inputs` are those of one plan with the same pipeline, `at_clocks`; modes have the names of the runtime's
    description. `known` has the passes that were counted for earlier plans with these inputs, and is added to.
    """
    rows = np.zeros(len(plans), dtype=np.intp)
    return account_pipelines([PipelinePlans(inputs.take(rows, inputs.context.take(rows)), plans, known)])[0]


def plan_of(table: PlanTable, row: int = 0) -> Plan:
    """Return the plan of a row, or one with the pipeline of that row where the table has no plans."""
    if table.plans:
        return table.plans[row]
    schedule = str(table.schedule[row]) or None
    return Plan(pp=int(table["pp"][row]), virtual_stages=int(table["virtual_stages"][row]), schedule=schedule)


def _wrapping(table: PlanTable, spec: RuntimeSpec) -> tuple[Floats, NDArray[np.int64]]:
    """Return, for each plan, the period n of recomputation that wraps every n-th layer (0: none or all layers), and a
    number that is equal for plans that run the same passes at once.
    """
    period = np.zeros(len(table))
    for word in words(table.recompute):
        every = wrapping_period(spec, word)
        period = np.where(table.recompute == word, np.where(every > 1, every, 0), period)
    return period, np.unique(table.ep_overlap, return_inverse=True)[1]


def wrapped_alike(table: PlanTable, spec: RuntimeSpec) -> list[NDArray[np.intp]]:
    """Return row numbers in groups: within a group, stages of the same length have the same units."""
    return _groups(*_wrapping(table, spec))


def _groups(*keys: NDArray[Any]) -> list[NDArray[np.intp]]:
    _, which = distinct(*(np.asarray(key, dtype=np.float64) for key in keys))
    return [np.nonzero(which == number)[0] for number in range(int(which.max()) + 1)]


def walked_together(table: PlanTable, context: CostContext, *, traffic: bool = True) -> list[NDArray[np.intp]]:
    """Return row numbers in groups of plans whose steps have the same operations. Without `traffic`, data-parallel
    traffic may differ within a group, except for whether parameters are freed after each pass, and tables are `shown`
    instead of `walked`.
    """
    m = table.micro_batches
    period, overlap = _wrapping(table, context.spec)
    own = np.zeros(len(table))
    stated_by: dict[object, int] = {}  # a number for each distinct statement of layers and modes by stage
    for row, plan in enumerate(table.plans):
        if any(stated := (plan.layers_per_stage, plan.recompute_per_stage)):
            own[row] = stated_by.setdefault(stated, len(stated_by) + 1)
    schedule = np.unique(table.schedule, return_inverse=True)[1].astype(np.float64)
    # Without a pipeline only the first few micro batches are walked; with one, those before the schedule repeats
    # itself.
    counted = np.minimum(m, 2.0)
    piped = np.nonzero(table["pp"] > 1)[0]
    stages = table["virtual_stages"]
    different, which = distinct(schedule[piped], table["pp"][piped], m[piped], stages[piped])
    steps = (
        (str(table.schedule[row]), int(table["pp"][row]), max(1, int(m[row])), max(1, int(stages[row])))
        for row in piped[different]
    )
    counts = [walked(*step) if traffic else shown(*step[:3]) for step in steps]
    counted[piped] = np.array(counts, dtype=np.float64)[which]
    kinds = traffic_kinds(table) if traffic else table.fully_sharded & ~table.keeps_gathered
    away = table.offload_layers > 0
    return _groups(kinds, table["pp"], table["virtual_stages"], schedule, counted, period, own, overlap, away)


def unit_maker(inputs: AccountInputs) -> UnitMaker:
    """Return what makes the units of these plans' stages."""
    return UnitMaker(inputs.scenario.model, inputs.context, inputs.parameters)


def account_unpipelined(inputs: AccountInputs) -> Account:
    """Return the account of plans without a pipeline whose steps have the same operations."""
    context = inputs.context
    m = context.table.micro_batches
    stages = unit_maker(inputs).stages(plan_of(context.table), folded=True)
    walk = StepWalk(context, stages, inputs.scenario.model)
    rank = RankTimeline(*_times(inputs))
    data = walk.begin(rank)
    rank.start()
    # Three micro batches are walked; for plans with two, `repeat` takes the middle one back. Where passes of two micro
    # batches run at the same time, one more is walked, since the first pair differs from the next.
    walked_out = WALKED + int(context.table.paired[0])
    count = 1 if m[0] <= 1 else walked_out
    for number in range(count):
        since, last = rank.mark(), number == count - 1
        if context.table.paired[0] and number:
            walk.pair(rank, data, Action(0, Kind.BACKWARD, number - 1), Action(0, Kind.FORWARD, number), last=False)
            if last:
                walk.action(rank, data, 0, Kind.BACKWARD, number, last=True)
        else:
            walk.action(rank, data, 0, Kind.FORWARD, number, last=last)
            if last or not context.table.paired[0]:
                walk.action(rank, data, 0, Kind.BACKWARD, number, last=last)
        if number == walked_out - 2:
            rank.repeat(since, m - walked_out)
    walk.end(rank, data, (0,))
    parts = rank.spent_s()
    # The step ends when the last stream or the host is done.
    end = np.maximum(np.max(list(rank.clocks.values()), axis=0), rank.host)
    parts["host"] = parts["host"] + (end - rank.compute)
    return Account(parts_s=parts, clocks=inputs.clocks)


class PipelinePlans:
    """Plans through one pipeline whose steps have the same operations; plans with more micro batches repeat those of
    the others. With `assigned`, the layers and modes of their stages may differ. They are walked through one table, or
    through two where micro batches repeat.
    """

    def __init__(self, inputs: AccountInputs, assigned: Sequence[Plan] = (), known: KnownPasses | None = None) -> None:
        columns, plan = inputs.context.table, plan_of(inputs.context.table)
        name, m = plan.schedule_name, columns.micro_batches
        self.inputs = inputs
        lets_go, paired = bool(columns.fully_sharded[0] & ~columns.keeps_gathered[0]), bool(columns.paired[0])
        most, period = walked(name, plan.pp, int(m[0]), plan.virtual_stages), period_of(name, plan.pp, int(m[0]))
        self._rounds = (m - most) / period
        counts = (most, most - period) if (m > most).any() else (most,)
        tables = [
            table_of(name, plan.pp, count, plan.virtual_stages, lets_go=lets_go, paired=paired) for count in counts
        ]
        maker = unit_maker(inputs)
        stages = [maker.stages(one, mode=one.recompute if assigned else "", folded=True) for one in assigned or (plan,)]
        walk = StepWalk(inputs.context, stages[0], inputs.scenario.model)
        blocks, traffic = _times(inputs)
        counter = Counter(
            [walk.with_stages(units) for units in stages],
            tables,
            lambda several: RankTimeline(blocks, traffic, several=several),
            known,
        )
        self._endings = counter.endings(tables[0].schedule)
        self._passes = [counter.passes(table) for table in tables]
        sent = message_bytes(inputs.context, inputs.scenario.model.hidden)
        hops = HopTimes(inputs.context, sent, traffic.sms).of(np.arange(len(columns)), plan.pp)
        self.courses = [
            Course(
                table=table,
                passes=passes,
                hops=hops,
                begins_s=self._endings[0].host_s,
                synchronizes=walk.synchronizes,
            )
            for table, passes in zip(tables, self._passes, strict=True)
        ]

    def account(self, clocks: Sequence[Clocks]) -> Account:
        """Return the account of the plans, given the clocks at the end of each course."""
        end, *shorter = clocks
        parts = self._parts(0, end)
        if shorter:
            parts += self._rounds * (parts - self._parts(1, shorter[0]))
            end, late_s = end.longer_by(self._rounds, shorter[0])
            for part, seconds in late_s.items():
                parts[:, PARTS.index(part)] += seconds
        ends = finish(self._endings, end)
        parts += ends.parts
        busy_s = parts.sum(axis=1) - parts[:, BUBBLE] - parts[:, HOST]
        # Rounds that are not walked are taken to be like those that are, which hosts may hold up more than the others.
        done_s = np.maximum(ends.done.max(axis=0), busy_s.max(axis=0))
        parts[:, HOST] = np.clip(parts[:, HOST], 0.0, done_s - busy_s)
        parts[:, BUBBLE] = done_s - busy_s - parts[:, HOST]
        # What is shown are the parts of the rank that computes longest.
        computing = parts[:, PARTS.index("compute")] + parts[:, PARTS.index("recompute")]
        slowest, every = np.argmax(computing, axis=0), np.arange(computing.shape[1])
        found = {part: parts[slowest, number, every] for number, part in enumerate(PARTS)}
        return Account(parts_s=found, clocks=self.inputs.clocks)

    def _parts(self, number: int, clocks: Clocks) -> Floats:
        """Return the seconds of the parts of each rank's passes through a table, shape (ranks, parts, plans)."""
        times, different = passes_of_ranks(self.courses[number].table, self._passes[number])
        parts = np.tensordot(times, np.stack([did.parts for did in different]), axes=1)
        for part, seconds in clocks.waits.items():
            parts[:, PARTS.index(part)] += seconds
        return np.asarray(parts)


def account_pipelines(several: Sequence[PipelinePlans]) -> list[Account]:
    """Return the accounts of groups of plans, all walked at once."""
    clocks = iter(walk_tables([course for plans in several for course in plans.courses]))
    return [plans.account([next(clocks) for _ in plans.courses]) for plans in several]


def _times(inputs: AccountInputs) -> tuple[BlockTimes, TrafficTimes]:
    blocks = BlockTimes(inputs.context, inputs.blocks, inputs.clocks)
    return blocks, TrafficTimes(inputs.context)


class HopTimes:
    """Times of messages of `nbytes` between neighbouring ranks of a pipeline, on one node or on two."""

    def __init__(self, context: CostContext, nbytes: Floats, sms: float) -> None:
        self.context, groups = context, context.groups
        self._near_s, self._far_s = (groups.time_s("send_recv", axis, nbytes) for axis in ("pp", "pp_across"))
        self._near, self._far = (groups.load("send_recv", axis, nbytes)[0] / sms for axis in ("pp", "pp_across"))

    def of(self, rows: NDArray[np.intp], ranks: int) -> Hops:
        """Return the messages of the plans `rows`, whose pipelines have `ranks` ranks."""
        gpus, a_node = self.context.table["gpus"][rows], float(self.context.groups.cluster.gpus_per_node)
        nodes = np.arange(ranks)[:, None] * (gpus / ranks) // a_node
        apart = np.stack([nodes != np.roll(nodes, -way, axis=0) for way in (1, -1)])
        host_s = np.broadcast_to(self.context.spec.host.collective_s, len(self.context.table))[rows]
        return Hops(
            np.where(apart, self._far_s[rows], self._near_s[rows]),
            np.where(apart, self._far[rows], self._near[rows]),
            host_s,
        )
