"""A lower bound of the step time of many plans, as columns; cheap, because it follows no clocks.

It counts that a rank's device runs its passes and copies and receives its messages one after the other; that its host
issues all of them; and that the first micro batch passes other ranks before it reaches this one, and the last one
passes them afterwards. Nothing else that a step may wait for is counted, so the account of a step
(`simulator.analytical.account`), which walks through everything, is never below. Block costs are summed over the blocks
that a rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.layer_cost import BlockCost
from simulator.analytical.wide_layers import least_costs
from simulator.bounds.least_traffic import LeastTraffic
from simulator.columns.plan_columns import distinct
from simulator.columns.plan_table import Floats
from simulator.config.plan import Plan
from simulator.pipeline.schedules.registry import where
from simulator.pipeline.stages import StageLayout, stage_layers
from simulator.step.context import CostContext
from simulator.step.held import Parameters
from simulator.step.host import again_host_s, host_synchronizes, layer_host_s, rest_host_s, step_host_s
from simulator.step.traffic import has_replicas
from simulator.step.units import ENDS, LAYERS
from simulator.step.update import norm_s

LAYER_PASSES = ("forward", "backward")
# Micro batches for each rank of a pipeline up to which its account walks all of them
# (`simulator.pipeline.schedule_walk.walked`).
WALKED_ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPasses:
    """Seconds of one micro batch on each rank, shape (plans, ranks). `weight` is the part of `backward` that schedules
    can delay.
    """

    forward: Floats
    backward: Floats
    weight: Floats

    @property
    def both(self) -> Floats:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBounds:
    """Lower bounds of the step from each pipeline rank alone, in seconds, shape (plans, ranks).

    A rank that begins `since` seconds after the first rank needs `own_s` for its own work, and after that at least
    `max(since - deferred_s, drain_s)`: the last backward pass must still return to the first rank, or its own
    reductions end. The next rank begins `passing_s` later. Whenever a rank begins, the step takes at least `alone_s`.
    """

    own_s: Floats
    drain_s: Floats
    deferred_s: Floats
    passing_s: Floats
    alone_s: Floats


class LowerBound:
    """The bound for the plans of `context`, whose ranks hold the layers of `layout`, exchange messages of
    `message_bytes` and run kernels at `clocks`.
    """

    def __init__(
        self,
        context: CostContext,
        layout: StageLayout,
        blocks: Mapping[str, BlockCost],
        parameters: Parameters,
        message_bytes: Floats,
        clocks: Floats,
    ) -> None:
        if context.table.paired.any():  # an exchange may be hidden entirely behind compute
            blocks = {name: _without_exchanges(block, context.table.paired) for name, block in blocks.items()}
        self._every = blocks  # layers in 16 bits among them
        self.context, self.layout, self.blocks, self.parameters = context, layout, least_costs(blocks), parameters
        self.table, self.spec = context.table, context.spec
        self._message_bytes = message_bytes
        self._clocks = clocks
        self._stages = np.maximum(self.table["virtual_stages"], 1.0)

    def step_s(self) -> Floats:
        """Return the bound, seconds of shape (plans,)."""
        traffic = self._traffic()
        # Ranks meet before they update.
        computed = self._most(self._computing_s(traffic)) + self._most(traffic.last_s)
        issued = self._most(self._issuing_s() + traffic.last_s)
        return np.asarray(self.fixed_s() + np.maximum(computed, issued))

    def computed_s(self) -> Floats:
        """Return a looser bound that costs less: what the busiest device computes, seconds of shape (plans,)."""
        return self._most(self.table.micro_batches[:, None] * self.device().both)

    def fixed_s(self) -> Floats:
        """Return the seconds of a step that do not depend on the layers of any rank: the host's own work and the norm
        of gradients.
        """
        return np.asarray(step_host_s(self.spec.host, self.context) + norm_s(self.context))

    def of_ranks(self, first_stage: Floats) -> RankBounds:
        """Return the bounds of each rank of a pipeline by itself, without `fixed_s`; `first_stage` is the number of
        layers on the first stage of each rank.
        """
        traffic = self._traffic()
        device, hop = self.device(), self._hop_s()[:, None]
        off = where(self.table.schedule, lambda kind: kind.splits_backward)[:, None]
        first, last = self._first_and_last_s(device, traffic)
        layer = np.add(*self._layer_passes_s(off[:, 0]))[:, None]
        passing = np.where(self._stages[:, None] > 1, first_stage * layer, first + last)
        own = self._own_s(device, hop, traffic) + traffic.last_s
        # A message counts to the rank that receives it; the rank's own messages are already in `own_s`.
        inner = self.layout.rank > 0
        deferred = self._deferred_s(device, traffic)
        return RankBounds(
            own_s=own,
            drain_s=np.broadcast_to(traffic.backward.exposed_s, own.shape),
            deferred_s=deferred + np.where(inner, hop, 0.0),
            passing_s=passing + 2.0 * hop,
            alone_s=np.maximum(self._wire_s(device, traffic), self._issuing_s()) + traffic.last_s,
        )

    def _traffic(self) -> LeastTraffic:
        return LeastTraffic(self.context, self.layout, self.parameters, self.blocks["embedding"].forward.device_s)

    def _computing_s(self, traffic: LeastTraffic) -> Floats:
        """Return when the device of each rank has computed, gathered and reduced everything, at the earliest."""
        table, m = self.table, self.table.micro_batches[:, None]
        device, hop = self.device(), self._hop_s()[:, None]
        forward_s, backward_s = device.forward, device.backward
        # In a pipeline, the time that a host spends waiting for its device may be hidden while the device waits for
        # messages.
        waits = (host_synchronizes(self.spec.host, table) & (table["pp"] == 1))[:, None]
        if waits.any():
            host = self.host()
            forward_s = np.where(waits, np.maximum(forward_s, host.forward), forward_s)
            backward_s = np.where(waits, np.maximum(backward_s, host.backward), backward_s)
        forward, backward = traffic.forward, traffic.backward
        forward_s = m * forward_s + forward.copies_s + forward.exposed_s
        backward_s = m * backward_s + backward.copies_s
        own, drain = forward_s + backward_s, backward.exposed_s
        waits_for_traffic, piped = traffic.waits_for_traffic[:, None], (table["pp"] > 1)[:, None]
        in_turn = np.maximum(forward_s, forward.stream_s) + np.maximum(backward_s + drain, backward.stream_s)
        alone = np.where(waits_for_traffic, in_turn, np.maximum(own + drain, forward.stream_s + backward.stream_s))
        if not piped.any():
            return np.asarray(alone)
        own = self._own_s(device, hop, traffic)
        through = np.maximum(self._through(device, hop, m, own, traffic), self._wire_s(device, traffic))
        return np.where(piped, through, alone)

    def _own_s(self, device: RankPasses, hop: Floats, traffic: LeastTraffic) -> Floats:
        """Return the seconds of each pipeline rank's device: passes, copies, messages, and the first gathers that
        nothing hides.
        """
        m, forward, backward = self.table.micro_batches[:, None], traffic.forward, traffic.backward
        own = m * device.both + forward.copies_s + forward.exposed_s + backward.copies_s
        waits = np.maximum(self._first_waits_s(device, traffic), self._waits_s(traffic))
        return np.asarray(own + m * self._messages() * hop + waits)

    def _first_waits_s(self, device: RankPasses, traffic: LeastTraffic) -> Floats:
        """Return for how long the first forward pass of a rank through all its stages waits for gathers."""
        gathers = np.maximum(traffic.first_gathers_s - device.forward - traffic.first_copies_s, 0.0)
        layers = np.maximum(np.add(*self.layout.layers) - self._stages[:, None], 0.0)
        return np.where(self.table.fully_sharded[:, None], np.maximum(gathers, layers * self._late_s(traffic)[0]), 0.0)

    def _late_s(self, traffic: LeastTraffic) -> tuple[Floats, Floats]:
        """Return by how much a layer's gather takes longer than the forward and the backward pass of the layer before,
        during which it runs, shape (plans, 1).
        """
        gather, forward, backward = (
            each[:, None] for each in (traffic.unit_gather_s, *(self._layer_s(which) for which in LAYER_PASSES))
        )
        turning = traffic.turning_s[:, None]
        return np.maximum(gather - forward, 0.0), np.maximum(gather - backward - turning, 0.0)

    def _waits_s(self, traffic: LeastTraffic) -> Floats:
        """Return for how long passes wait for gathers of parameters that are freed after each pass, shape (plans,
        ranks).

        Of a stage's two passes of a micro batch one gathers all its units and one all but the last, unless the backward
        pass is split: then one of the two may gather nothing.
        """
        table, m, stages = self.table, self.table.micro_batches[:, None], self._stages[:, None]
        lets_go = (table.fully_sharded & ~table.keeps_gathered)[:, None]
        forward, backward = self._late_s(traffic)
        layers, off = np.add(*self.layout.layers), where(table.schedule, lambda kind: kind.splits_backward)[:, None]
        fewer, all_but_one = np.maximum(layers - 2.0 * stages, 0.0), np.maximum(layers - stages, 0.0)
        split = (m - 1.0) * fewer * np.minimum(forward, backward)
        return np.where(lets_go, np.where(off, split, m * (fewer * forward + all_but_one * backward)), 0.0)

    def _first_and_last_s(self, device: RankPasses, traffic: LeastTraffic) -> tuple[Floats, Floats]:
        """Return the seconds of the first forward and of the last backward pass of each rank."""
        off = where(self.table.schedule, lambda kind: kind.splits_backward)[:, None]
        first = device.forward + traffic.first_copies_s + self._first_waits_s(device, traffic)
        return first, device.backward - np.where(off, device.weight, traffic.last_copies_s * -1.0)

    def _wire_s(self, device: RankPasses, traffic: LeastTraffic) -> Floats:
        """Return when the collectives of parameters that are freed after each pass have ended, which run one after the
        other.

        Each is issued at the latest when the unit before the one that needs it begins.
        """
        table, m = self.table, self.table.micro_batches[:, None]
        passes = m * self._stages[:, None]
        slack = sum(
            (passes * np.maximum(self._layer_s(which) - traffic.unit_gather_s, 0.0)[:, None] for which in LAYER_PASSES),
            np.zeros(device.forward.shape),
        )
        # Where shards are summed over replicas, the account lets the collectives of a pass wait for those of other
        # passes only at its end.
        lets_go = (table.fully_sharded & ~table.keeps_gathered & ~has_replicas(table))[:, None]
        late = np.where(lets_go, traffic.forward.stream_s + traffic.backward.stream_s - slack, 0.0)
        return np.maximum(late, np.where(m <= WALKED_ROUNDS * table["pp"][:, None], traffic.in_turn_s, 0.0))

    def _layer_s(self, which: str) -> Floats:
        """Return the most seconds that a layer's pass takes, recomputation included."""
        most = np.zeros(len(self.table))
        for name, block in self._every.items():
            if name not in ENDS:
                again = [cost.device_s for cost in block.recompute.values()] if which == "backward" else []
                cost = getattr(block, which)
                most = np.maximum(most, cost.device_s + cost.lost_s + sum(again, np.zeros(len(most))))
        return most

    def _issuing_s(self) -> Floats:
        """Return when the host of each rank has issued everything."""
        rest_s = rest_host_s(self.spec.host, self.table)[:, None]
        return np.asarray(self.table.micro_batches[:, None] * self.host().both + rest_s)

    def _most(self, of_ranks: Floats) -> Floats:
        return np.asarray(of_ranks.max(axis=1, where=self.layout.exists, initial=0.0))

    # --- one micro batch on a rank ------------------------------------------------------------------------------

    def device(self) -> RankPasses:
        """Return the seconds of kernels and of the communication between them."""
        saved = (1.0 - self._clocks)[:, None]

        def seconds(cost: str) -> Floats:
            total = self._sum(cost, "device_s") + self._sum(cost, "lost_s")
            kernels = ("compute_s", "lost_s") if saved.any() else ()
            return total - saved * sum((self._sum(cost, kind) for kind in kernels), np.zeros(total.shape))

        weight = self._clocks[:, None] * self._sum("backward", "weight_s")
        return RankPasses(forward=seconds("forward"), backward=seconds("backward") + seconds("again"), weight=weight)

    def host(self) -> RankPasses:
        """Return the host's seconds to issue the passes."""
        dense, moe = self.layout.layers
        layers = [dense, moe]
        of_kinds = [layer_host_s(self.spec, self.table, sparse=sparse) for sparse in (False, True)]
        forward_s, backward_s = (
            np.sum([many * each[:, None] for many, each in zip(layers, passes, strict=True)], axis=0)
            for passes in zip(*of_kinds, strict=True)
        )
        # A mode may wrap layers of either kind.
        again_s = np.minimum(*(again_host_s(self.spec, self.table, sparse=sparse) for sparse in (False, True)))[:, None]
        again = self._sum("again", "host_s") + again_s * np.sum(
            [self._wrapped(mode) for mode in self.layout.by_mode], axis=0
        )
        return RankPasses(
            forward=self._sum("forward", "host_s") + forward_s,
            backward=self._sum("backward", "host_s") + backward_s + again,
            weight=self._sum("backward", "weight_host_s"),
        )

    def _sum(self, cost: str, quantity: str) -> Floats:
        """Return a quantity of a pass (`forward`, `backward`, or `again` for recomputation), summed over all blocks of
        a rank.
        """
        layout, total = self.layout, np.zeros(self.layout.exists.shape)
        if cost == "again":
            for mode in layout.by_mode:
                total = total + self._again(mode, quantity)
            return total
        held = dict(zip(LAYERS, layout.layers, strict=True)) | {"embedding": layout.first, "head": layout.last}
        for name, block in self.blocks.items():
            total = total + held[name] * np.asarray(getattr(getattr(block, cost), quantity))[:, None]
        return total

    def _again(self, mode: str, quantity: str) -> Floats:
        each = {
            name: np.asarray(getattr(block.recompute[mode], quantity), dtype=np.float64)[:, None]
            for name, block in self.blocks.items()
            if mode in block.recompute
        }
        total = np.zeros(self.layout.exists.shape)
        if self.spec.recompute[mode].layers < 1 and each:  # the least, since it may wrap any of the layers
            return np.asarray(self._wrapped(mode) * np.minimum.reduce([*each.values()]))
        layers = dict(zip(LAYERS, self.layout.by_mode[mode], strict=True))
        for name, seconds in each.items():
            total = total + layers[name] * seconds
        return total

    def _wrapped(self, mode: str) -> Floats:
        """Return the least number of layers that a mode recomputes on each rank: every n-th of the consecutive layers
        of a stage.
        """
        spec, layers = self.spec.recompute[mode], np.add(*self.layout.by_mode[mode])
        if not spec.recomputes:
            return np.zeros(layers.shape)
        period = round(1 / spec.layers)
        return np.asarray(np.maximum(np.ceil((layers - self._stages[:, None] * (period - 1)) / period), 0.0))

    # --- the pipeline -------------------------------------------------------------------------------------------

    def _hop_s(self) -> Floats:
        """Return the seconds of a message between neighbouring ranks, the lesser of one node and two."""
        near, far = (self.context.groups.time_s("send_recv", axis, self._message_bytes) for axis in ("pp", "pp_across"))
        return np.minimum(near, far)

    def _messages(self) -> Floats:
        """Return how many messages a rank receives for one micro batch: one into each of its stages, forward and
        backward.
        """
        layout = self.layout
        between = 2.0 * self._stages[:, None] - layout.first - layout.last
        # The rank at the turn of a V holds both stages of the turn, so no message passes between them.
        turn = where(self.table.schedule, lambda kind: kind.v_shaped)[:, None] & (
            layout.rank + layout.rank_count == self.table["pp"][:, None]
        )
        return np.asarray(np.maximum(between - np.where(turn, 2.0, 0.0), 0.0))

    def _through(self, device: RankPasses, hop: Floats, m: Floats, own: Floats, traffic: LeastTraffic) -> Floats:
        """Return when the step of each rank ends at the earliest: the first micro batch arrives, the rank does its
        `own` work, then come its `drain` or the last micro batch's way back. Or, if that is later, when one micro batch
        has passed all ranks.
        """
        layout, drain = self.layout, traffic.backward.exposed_s
        off = where(self.table.schedule, lambda kind: kind.splits_backward)[:, None]
        looped = self._stages[:, None] > 1
        layer_forward, layer_back = (each[:, None] for each in self._layer_passes_s(off[:, 0]))
        first, last = self._first_and_last_s(device, traffic)
        alike = layout.rank_count * layout.exists
        # Ranks of a kind are consecutive; the last of them begins latest. A message counts to its receiver: the last of
        # the messages before a rank is in its own work.
        before, hops = self._layers_before(), np.maximum(np.cumsum(alike, axis=1) - 1, 0) * hop
        there, home = (
            np.where(looped, before * layer + hops, np.cumsum(alike * (once + hop), axis=1) - (once + hop))
            for layer, once in ((layer_forward, first), (layer_back, last))
        )
        there = np.maximum(there - hop, 0.0)
        deferred = self._deferred_s(device, traffic)
        passing = device.both - np.where(off, device.weight, 0.0)
        # One micro batch passes all ranks, after all others have passed the stage that takes longest.
        longest = np.maximum(device.forward, passing - device.forward) / self._stages[:, None]
        once = (alike * passing).sum(axis=1)[:, None] + (m - 1.0) * (longest * layout.exists).max(axis=1)[:, None]
        back = np.maximum(home - deferred, drain)
        ends = there + own + back
        if looped.any():
            after = self._after_all_stages(device, hop, m, first, traffic, layer_back)
            then = np.where(layout.last, self._forward_after(device, m, layer_forward) + back, drain)
            ends = np.where(looped, np.maximum(ends, after + then), ends)
        return np.asarray(np.maximum(ends, once))

    def _deferred_s(self, device: RankPasses, traffic: LeastTraffic) -> Floats:
        """Return the seconds of delayed weight gradients, and of copies of them, that a rank may compute while the last
        micro batch's backward pass passes the other ranks.
        """
        off = where(self.table.schedule, lambda kind: kind.splits_backward)[:, None]
        passes = np.minimum(self.table.micro_batches[:, None], self._late_passes())
        return np.where(off, passes * device.weight + traffic.backward.copies_s, 0.0)

    def _after_all_stages(
        self, device: RankPasses, hop: Floats, m: Floats, first: Floats, traffic: LeastTraffic, layer_back: Floats
    ) -> Floats:
        """Return when a rank of each kind has computed all backward passes at the earliest, in a pipeline of which each
        rank has several stages: the first micro batch passes all stages, and then the last stages of the ranks on the
        way from the end of the model.
        """
        layout, turns = self.layout, where(self.table.schedule, lambda kind: kind.v_shaped)[:, None]
        alike = layout.rank_count * layout.exists
        there = (alike * first).sum(axis=1)[:, None]
        there = there + (self.table["pp"][:, None] * self._stages[:, None] - 1.0 - turns) * hop
        back = self._last_stage() * layer_back + hop
        passed = np.cumsum(alike * back, axis=1)  # in a V the model ends on the first rank
        behind = np.where(turns, passed, passed[:, -1:] - passed + alike * back) - back
        return np.where(layout.exists, there + behind + m * device.backward + traffic.backward.copies_s, 0.0)

    def _forward_after(self, device: RankPasses, m: Floats, layer_forward: Floats) -> Floats:
        """Return the seconds of a rank's forward passes that follow that of the first micro batch through its last
        stage: those before it are of its other stages in the first round.
        """
        rounds = where(self.table.schedule, lambda kind: kind.rounds)[:, None]
        in_round = np.where(rounds, m / np.maximum(1.0, np.floor(m / self.table["pp"][:, None])), m)
        return (m - in_round) * device.forward + (in_round - 1.0) * self._last_stage() * layer_forward

    def _last_stage(self) -> Floats:
        """Return the least number of layers on the last stage of each rank."""
        layout = self.layout
        return np.maximum(np.add(*layout.layers) - (self._stages[:, None] - 1.0) * layout.largest, 0.0)

    def _late_passes(self) -> Floats:
        """Return the most micro batches whose weight gradients a rank can still have to compute when its last input
        gradient begins.
        """
        layout, stages = self.layout, self._stages[:, None]
        lags = where(self.table.schedule, lambda kind: kind.lags)[:, None]
        layers = np.maximum(np.add(*layout.layers), 1.0)
        widest = np.minimum((np.ceil(layers / stages) + 2.0) / layers, 1.0)
        return np.where(lags, (layout.rank + layout.rank_count) * np.where(stages > 1, widest, 1.0), np.inf)

    def _layers_before(self) -> Floats:
        """Return how many layers the first micro batch passes before the last rank of each kind: the first stages of
        all ranks before it.
        """
        pp, total = self.table["pp"], (self.layout.rank_count * np.add(*self.layout.layers)).sum(axis=1)
        rows, which = distinct(pp, self._stages)
        ends = np.maximum(np.cumsum(self.layout.rank_count, axis=1) - 1, 0).astype(np.intp)
        before = np.zeros(ends.shape)
        for number, row in enumerate(rows):
            plan = Plan(pp=int(pp[row]), virtual_stages=int(self._stages[row]))
            layers = np.cumsum([0, *stage_layers(int(total[row]), plan, self.spec.pipeline)[: plan.pp - 1]])
            here = which == number
            before[here] = layers[np.minimum(ends[here], plan.pp - 1)]
        return before

    def _layer_passes_s(self, off: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Return the least seconds of a layer's forward and backward pass."""
        layers = [block for name, block in self.blocks.items() if name in LAYERS]
        forward = np.minimum.reduce([block.forward.device_s for block in layers])
        back = np.minimum.reduce(
            [block.backward.device_s - np.where(off, block.backward.weight_s, 0.0) for block in layers]
        )
        return self._clocks * forward, self._clocks * back


def _without_exchanges(block: BlockCost, rows: NDArray[np.bool_]) -> BlockCost:
    forward, backward = (one.without_exchanges(rows) for one in (block.forward, block.backward))
    return replace(block, forward=forward, backward=backward)
