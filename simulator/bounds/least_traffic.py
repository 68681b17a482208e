"""The least time that data-parallel traffic adds to a step, however well it is hidden: copies, and the collectives at
the ends of passes that nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats, PlanTable
from simulator.pipeline.schedules.registry import where
from simulator.pipeline.stages import StageLayout
from simulator.step.context import CostContext
from simulator.step.fsdp_copies import FsdpCopies
from simulator.step.held import Parameters
from simulator.step.offload import update_bytes_per_s
from simulator.step.traffic import has_replicas
from simulator.step.units import ENDS, LAYERS
from simulator.step.update import host_update_bytes, update_bytes, update_rate, updates_units
from simulator.step.zero import adding_bytes

Rows = NDArray[np.bool_]


class LeastTraffic:
    """Least seconds of data-parallel traffic in a step, shape (plans, ranks); `simulator.step.traffic` describes it.

    `forward` and `backward` happen during those passes, `last_s` after all ranks have met. `waits_for_traffic`, shape
    (plans,), is true where, without a pipeline, a pass starts only after the traffic of the one before.
    """

    def __init__(self, context: CostContext, layout: StageLayout, parameters: Parameters, lookup_s: Floats) -> None:
        self.context, self.layout, self.table, self.spec = context, layout, context.table, context.spec
        self.parameters = parameters
        trained, rows = parameters.of("gradients"), np.zeros(len(self.table))
        self.shared, self.experts = trained.of_stage(layout)
        self.copies = FsdpCopies(context)
        self._compute, self._reduce = context.dtype_bytes("gathered"), context.dtype_bytes("reduce")
        dense, moe = layout.layers
        self.used, self.trained = (
            {block: (of.of_block(block)[0] + rows, of.of_block(block)[1] + rows) for block in (*LAYERS, *ENDS)}
            for of in (parameters, trained)
        )
        # Whether the optimizer is sharded, and gradients are; and without full sharding, whether those of a unit are
        # reduced during the backward pass that computes them.
        self.sharded, self.scattered = (self.table.state_shard[kind] > 1 for kind in ("optimizer", "gradients"))
        self._fetched = self.sharded & ~self.scattered & self.spec.ddp.sharded_overlap
        self.behind = self._fetched | (~self.sharded & self.spec.ddp.overlap)
        self._units: dict[str, UnitTraffic] = {}
        counts = {"dense": dense, "moe": moe}
        self._layers = {name: held for name, held in counts.items() if (held > 0).any()}
        self._m, self._piped = self.table.micro_batches, self.table["pp"] > 1
        self._first, self._last = 1.0 * layout.first, 1.0 * layout.last
        update_s, in_backward = self._update_s(), updates_units(context.runtime)
        self.last_s = 0.0 * update_s if in_backward else update_s
        full = self.table.fully_sharded
        self.waits_for_traffic = full.copy()
        nothing = PassTraffic(*(np.zeros(dense.shape) for _ in range(3)))
        self.forward, self.backward = nothing, nothing
        # Gathers of a rank's first forward pass, except those of its first units, and all copies of one micro batch in
        # it.
        self.first_gathers_s, self.first_copies_s = nothing.stream_s, nothing.stream_s
        self.last_copies_s = nothing.stream_s  # of the last backward pass
        self.unit_gather_s = rows  # the least over the kinds of layer
        # Gathers and reductions, which run one after the other, where parameters are freed after each pass; and the
        # most that copies of a layer's gradients take behind a backward pass.
        self.in_turn_s, self.turning_s = nothing.stream_s, rows
        if full.any():
            self.forward, self.backward = self._sharded(lookup_s)
        if not full.all():
            self.forward = self.forward.only(full)
            self.backward = self._whole(~full).only(~full).plus(self.backward.only(full))
        if in_backward:
            self.backward = replace(self.backward, copies_s=self.backward.copies_s + update_s)

    def unit(self, block: str) -> UnitTraffic:
        """Return the seconds of one unit, by the block it holds."""
        if block not in self._units:
            self._units[block] = UnitTraffic(self, block)
        return self._units[block]

    def _sharded(self, lookup_s: Floats) -> tuple[PassTraffic, PassTraffic]:
        """Units are gathered, copied, and their gradients scattered, one by one."""
        table, m = self.table, self._m
        keeps, off = table.keeps_gathered, where(table.schedule, lambda kind: kind.splits_backward)
        # A unit is gathered before each pass, unless it is still gathered from the pass before, like a stage's last
        # unit.
        forward, backward = np.where(keeps, 1.0, m), np.where(keeps | off, 0.0, m)
        reductions = np.where(self._piped, 1.0, m)
        embedding, *layers, head = map(self.unit, ("embedding", *self._layers, "head"))
        held = [self._first, *self._layers.values(), self._last]
        units = [embedding, *layers, head]

        def total(quantity: str) -> Floats:
            each = (count * getattr(unit, quantity)[:, None] for count, unit in zip(held, units, strict=True))
            return sum(each, np.zeros(self._first.shape))

        def widest(quantity: str) -> Floats:
            layer = np.max([getattr(unit, quantity) for unit in layers], axis=0)[:, None]
            stages = np.maximum(table["virtual_stages"], 1.0)[:, None]
            return np.asarray(self._last * getattr(head, quantity)[:, None] + (stages - self._last) * layer)

        # With delayed weight gradients a whole stage stays gathered, so the next pass need not gather it.
        stay = np.where(off & ~keeps, m - 1.0, 0.0)[:, None]
        out, gathered = total("out_s"), total("gather_s")
        copied_out = np.maximum(forward[:, None] * out - stay * widest("out_s"), 0.0)
        out_again = backward[:, None] * np.maximum(out - widest("out_s"), 0.0)
        gathered_again = backward[:, None] * np.maximum(gathered - widest("gather_s"), 0.0)
        # The gather of the first layer can hide only behind the lookup of the embedding.
        second = np.min([unit.gather_s for unit in layers], axis=0) - embedding.out_s - lookup_s
        lead = embedding.gather_s + np.maximum(second, 0.0)
        lead = np.where(self._piped, 1.0, forward) * lead
        once = reductions[:, None]
        drain = self._end(embedding.drain_s, np.min([unit.drain_s for unit in layers], axis=0))
        reduced = np.maximum(gathered_again + once * total("scatter_s"), once * total("replicate_s"))
        full = table.fully_sharded[:, None]
        in_turn = forward[:, None] * gathered - stay * widest("gather_s") + gathered_again + once * total("scatter_s")
        self.in_turn_s = np.where(full & ~keeps[:, None], in_turn, 0.0)
        added = np.max([np.add(*self.trained[name]) for name in self._layers], axis=0)
        width = 0.0 if self.spec.state.gradient_dtype == "reduce" else self._compute + 2 * self._reduce
        self.turning_s = np.max([unit.in_s for unit in layers], axis=0)
        self.turning_s = self.turning_s + added * width / self.context.roofline.memory_bytes_per_s
        # The first unit of a stage is gathered before the pass begins, and the second while the pass waits for the
        # first.
        ahead = 2.0 * np.maximum(
            widest("gather_s"), np.max([unit.gather_s for unit in units], axis=0)[:, None] * stages_of(table)
        )
        self.first_gathers_s = np.where(full, np.maximum(gathered - ahead, 0.0), 0.0)
        self.first_copies_s = np.where(full, copied_out / forward[:, None], 0.0)
        self.last_copies_s = np.where(full, total("in_s") + (out_again + self._added()) / m[:, None], 0.0)
        self.unit_gather_s = np.where(table.fully_sharded, np.min([unit.gather_s for unit in layers], axis=0), 0.0)
        return (
            PassTraffic(copied_out, forward[:, None] * gathered, np.broadcast_to(lead[:, None], out.shape)),
            PassTraffic(out_again + once * total("in_s") + self._added(), reduced, once * drain),
        )

    def _added(self) -> Floats:
        """Return the seconds of adding up micro batches' gradients where parameters are fully sharded."""
        if self.spec.state.gradient_dtype == "reduce":
            return np.zeros(self.shared.shape)
        seconds = self._m * (self._compute + 2 * self._reduce) / self.context.roofline.memory_bytes_per_s
        return np.where(self._piped[:, None], (self.shared + self.experts) * seconds[:, None], 0.0)

    def _whole(self, rows: Rows) -> PassTraffic:
        """Return the backward traffic of unsharded gradients: reduced behind the backward pass that computes them, or
        after the last.
        """
        # A sharded optimizer's gradients may be reduced during the backward pass, and its parameters gathered during
        # the first forward pass.
        sharded, scattered, fetched, behind = self.sharded, self.scattered, self._fetched, self.behind
        every = self._m if self.spec.ddp.every_micro_batch else np.ones(len(self.table))
        times = np.where(self._piped, 1.0, np.where(scattered, self._m, every))[:, None]
        first, further = adding_bytes(self.context)
        seconds = (first + (self._m - 1) * further) / self.context.roofline.memory_bytes_per_s
        copies = (self.shared + self.experts) * seconds[:, None]
        embedding, *layers, head = (self.reduced_s(name) for name in ("embedding", *self._layers, "head"))
        held = [self._first, *self._layers.values(), self._last]
        each = (count * one[:, None] for count, one in zip(held, [embedding, *layers, head], strict=True))
        reduced = sum(each, np.zeros(copies.shape))
        drain = self._end(embedding, np.min([self.last_sent_s(name) for name in self._layers], axis=0))
        one_by_one = (behind | scattered)[:, None]
        late = np.where(
            sharded[:, None],
            self._of_all("reduce_scatter", self._reduce) if (sharded & ~behind).any() else 0.0,
            self._of_all("all_reduce", self._reduce) if not (sharded | behind).all() else 0.0,
        )
        if sharded.any():
            gathered = self._of_all("all_gather", self._compute, "fsdp")
            self.last_s = self.last_s + np.where((rows & sharded & ~fetched)[:, None], gathered, 0.0)
        self.waits_for_traffic = self.waits_for_traffic | (rows & behind)
        return PassTraffic(
            copies,
            np.where(one_by_one, times * reduced, 0.0),
            np.where(one_by_one, np.where(behind[:, None], times, 1.0) * drain, late),
        )

    def _end(self, embedding_s: Floats, layer_s: Floats) -> Floats:
        """Return the time of the unit whose gradients a rank computes last."""
        looped = (self.table["virtual_stages"] > 1)[:, None]
        first, other = embedding_s[:, None], layer_s[:, None]
        return np.where(self._first > 0, np.where(looped, np.minimum(first, other), first), other)

    def _buckets(self, block: str) -> Floats | float:
        """Return the buckets that the gradients of one unit fill."""
        size, elements = self.spec.ddp.bucket_bytes, np.add(*self.trained[block])
        return np.maximum(np.ceil(elements * self._reduce / size), 1.0) if size else 1.0

    def reduced_s(self, block: str) -> Floats:
        """Return the seconds to reduce the gradients of one unit, in buckets or as a reduce-scatter."""
        (shared, experts), buckets = self.trained[block], self._buckets(block)
        summed = buckets * self.send_s("all_reduce", "dp", shared / buckets, experts / buckets, self._reduce)
        if not self.sharded.any():
            return np.asarray(summed)
        return np.where(self.sharded, self.send_s("reduce_scatter", "dp", shared, experts, self._reduce), summed)

    def last_sent_s(self, block: str) -> Floats:
        """Return the least that is reduced of one unit once it has computed: of buckets, one."""
        reduced = self.reduced_s(block)
        return np.where(self.sharded, reduced, reduced / self._buckets(block))

    def _of_all(self, op: str, width: float, family: str = "dp") -> Floats:
        """Return the seconds of a collective over all parameters that a rank holds, shape (plans, ranks)."""
        ranks = range(self.shared.shape[1])
        return np.stack([self.send_s(op, family, self.shared[:, r], self.experts[:, r], width) for r in ranks], axis=1)

    def send_s(self, op: str, family: str, shared: Floats, experts: Floats, width: float) -> Floats:
        """Return the seconds of a collective over `shared` and `experts` parameters, sent separately."""
        groups = self.context.groups
        total = np.where(shared > 0, groups.time_s(op, family, shared * width), 0.0)
        if experts.any():
            total = total + np.where(experts > 0, groups.time_s(op, f"expert_{family}", experts * width), 0.0)
        return total

    def _update_s(self) -> Floats:
        table, runtime, context = self.table, self.context.runtime, self.context
        shards = [each["optimizer"][:, None] for each in (table.state_shard, table.expert_shard)]
        owned = sum(held / shard for held, shard in zip((self.shared, self.experts), shards, strict=True))
        whole, away = self.shared + self.experts, table.offloaded["optimizer"][:, None]
        matrices, orthogonal_s = self.parameters.matrices, self.parameters.orthogonal_s
        of_matrices: Floats | float = 0.0
        if matrices is not None:
            of_stage = matrices.of_stage(self.layout)
            of_matrices = np.asarray(sum(held / shard for held, shard in zip(of_stage, shards, strict=True)))
        (first, _), (last, _) = (self.trained[end] for end in ("embedding", "head"))
        layers = whole - self._first * first[:, None] - self._last * last[:, None]
        quantised = 0.0 if any(runtime.wide_layers) else layers  # at least
        moved = update_bytes(runtime, np.where(away, 0.0, owned), whole, of_matrices, quantised=quantised)
        seconds = np.asarray(moved / update_rate(runtime, context.roofline))
        if away.any():
            seconds = (
                seconds + np.where(away, host_update_bytes(runtime, owned), 0.0) / update_bytes_per_s(context)[:, None]
            )
        return seconds if orthogonal_s is None else seconds + orthogonal_s.of_stage(self.layout)[0]


def stages_of(table: PlanTable) -> Floats:
    """Return the number of stages of a rank, shape (plans, 1)."""
    return np.maximum(table["virtual_stages"], 1.0)[:, None]


@dataclass(frozen=True, slots=True)
class PassTraffic:
    """Data-parallel traffic of a step's forward or backward passes: `copies_s` on the compute stream; `stream_s` of
    collectives, one after the other on their stream; `exposed_s` of these that cannot be hidden.
    """

    copies_s: Floats
    stream_s: Floats
    exposed_s: Floats

    def only(self, rows: Rows) -> PassTraffic:
        here = rows[:, None]
        return PassTraffic(*(np.where(here, each, 0.0) for each in (self.copies_s, self.stream_s, self.exposed_s)))

    def plus(self, other: PassTraffic) -> PassTraffic:
        return PassTraffic(
            self.copies_s + other.copies_s, self.stream_s + other.stream_s, self.exposed_s + other.exposed_s
        )


class UnitTraffic:
    """Seconds of one unit, shape (plans,). Fully sharded: copies out of its gather (`out_s`), the gather, copies into
    its reduction (`in_s`), the reduction (`scatter_s`), and the sum over replicas.
    """

    def __init__(self, traffic: LeastTraffic, block: str) -> None:
        self._traffic, self._block, context, table = traffic, block, traffic.context, traffic.table
        used, (shared, experts) = traffic.used[block], traffic.trained[block]
        self._full, pushed = table.fully_sharded, table.pushed & (block in LAYERS)
        rate, copies = context.roofline.packing_bytes_per_s, traffic.copies
        moves = copies.after_gather(*used), copies.before_reduction(shared, experts, further=False)
        self.out_s, self.in_s = (self._if_sharded(move.nbytes / rate(move.packing)) for move in moves)

        def exchange_s(op: str, elements: tuple[Floats, Floats], dtype: str) -> Floats:
            width = context.dtype_bytes(dtype)
            seconds = traffic.send_s(op, "fsdp", *elements, width)
            if pushed.any():
                seconds = np.where(pushed, traffic.send_s(f"pushed_{op}", "fsdp", *elements, width), seconds)
            return self._if_sharded(seconds)

        self.gather_s = exchange_s("all_gather", used, "gathered")
        self.scatter_s = exchange_s("reduce_scatter", (shared, experts), "reduce")
        self.replicate_s = np.zeros(len(table))
        if has_replicas(table).any():
            groups = context.groups
            shard = shared / groups.extent("fsdp")[0] + experts / groups.extent("expert_fsdp")[0]
            summed = groups.time_s("all_reduce", "replicate", shard * context.dtype_bytes("reduce"))
            self.replicate_s = self._if_sharded(np.where(shard > 0, summed, 0.0))

    def _if_sharded(self, seconds: Floats) -> Floats:
        return np.where(self._full, seconds, 0.0)

    @property
    def drain_s(self) -> Floats:
        """Seconds of a reduction and of the sum over replicas that follows."""
        return self.scatter_s + self.replicate_s

    @cached_property
    def reduce_s(self) -> Floats:
        """Seconds of the reduction, fully sharded or not."""
        return self._reduced(self._traffic.reduced_s)

    @cached_property
    def after_s(self) -> Floats:
        """Seconds of the reduction once the unit has computed."""
        return self._reduced(self._traffic.last_sent_s)

    def _reduced(self, of_whole: Callable[[str], Floats]) -> Floats:
        """Return the seconds of a reduction; `of_whole` gives those of plans that are not fully sharded."""
        if self._full.all():
            return self.scatter_s
        one_by_one = self._traffic.behind | self._traffic.scattered
        return np.where(self._full, self.scatter_s, np.where(one_by_one, of_whole(self._block), 0.0))

    @cached_property
    def added_s(self) -> Floats:
        """Seconds of adding gradients to those of earlier micro batches."""
        context = self._traffic.context
        if context.spec.state.gradient_dtype == "reduce":
            return np.zeros(len(self._full))
        sharded = context.dtype_bytes("gathered") + 2 * context.dtype_bytes("reduce")
        moved = np.add(*self._traffic.trained[self._block]) * np.where(self._full, sharded, adding_bytes(context)[1])
        return np.asarray(moved / context.roofline.memory_bytes_per_s)
