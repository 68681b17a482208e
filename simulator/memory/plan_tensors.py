"""Data shared by the replays of a plan's ranks: units, the events of their passes, traffic."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from simulator.config.optimizers import OPTIMIZERS, Optimizer
from simulator.config.savers import OPTIMIZER_IN_BACKWARD
from simulator.memory.allocator import TensorEvent, whole_blocks
from simulator.memory.tape import Act, Event
from simulator.memory.tensors import BlockTensors, Passes, Weight
from simulator.pipeline.schedule_program import last_backwards
from simulator.pipeline.schedules.table import Schedule
from simulator.runtimes.library import head_peaks, turns_at_once
from simulator.runtimes.model_operators import ModelOperators
from simulator.runtimes.parts import RecomputeSpec
from simulator.step.away import goes_away, layers_on_gpu
from simulator.step.context import CostContext
from simulator.step.frozen import frozen_units_keep_inputs
from simulator.step.held import State, between_stages_bytes, casts_experts, state_bytes
from simulator.step.muon import is_orthogonalised, matrix_state_bytes
from simulator.step.offload import held_bytes
from simulator.step.paged import PAGED_ELEMENTS, paged_bytes, paged_width
from simulator.step.traffic import DataTraffic
from simulator.step.units import Unit, held_kinds
from simulator.step.zero import sums_wide, zero_buffers


class Held(NamedTuple):
    """Elements of one parameter: gathered, stored, and trained."""

    used: float
    stored: float
    trained: float


class Piece(NamedTuple):
    """Tensors that come and go, and the weight whose gradient has then been computed, none at the end."""

    events: tuple[TensorEvent, ...]
    weight: int | None = None


class PlanTensors:
    """Data shared by all ranks of a plan: its units, the events of their passes, its traffic."""

    def __init__(
        self,
        context: CostContext,
        operators: ModelOperators,
        stages: Sequence[Sequence[Unit]],
        schedule: Schedule,
        *,
        tied: bool,
    ) -> None:
        self.tied = tied  # embedding and head are one matrix
        self.context, self.operators, self.stages, self.schedule = context, operators, stages, schedule
        self.traffic = DataTraffic(context)
        self.last_turned = last_backwards(schedule)
        self.paired = bool(context.table.paired[0])  # passes of two micro batches run at the same time
        self.state = {kind: float(held_bytes(context, kind)[0]) for kind in state_bytes(context)}
        self._tensors, self._inside = BlockTensors(context), BlockTensors(context.in_layers)
        # Cache by what layers of one kind have in common.
        self._passes: dict[tuple[str, str], Passes] = {}
        self._pieces: dict[int, tuple[Piece, ...]] = {}  # by the events of a pass
        self._halves: dict[tuple[int, frozenset[int]], tuple[tuple[Piece, ...], tuple[Piece, ...]]] = {}
        self.turns: dict[Hashable, Any] = {}  # backward passes that ranks have replayed (`memory.shortcut`)
        self._elements: dict[tuple[int, int, bool], list[Held]] = {}
        self._shares: dict[tuple[int, State], float] = {}
        plan, layers = context.table.plans[0], sum(sum(held_kinds(units)) for units in stages)
        self.away = goes_away(context.runtime) or bool(plan.offload_layers)
        self.on_gpu = layers_on_gpu(plan, context, layers)
        # How many units ahead of a backward pass a layer returns.
        self.returns_ahead = max(self.on_gpu - 1, 0) if plan.offload_layers else min(self.on_gpu, 1)
        self.in_backward = OPTIMIZER_IN_BACKWARD in context.runtime.savers
        self.metrics = self._tensors.sizes(context.spec.layer.metrics_after)
        self._of_block = operators.blocks

    @property
    def repeats(self) -> bool:
        """Whether all steps allocate the same blocks at the same addresses, apart from the optimizer's state.

        When the optimizer's state is allocated, nothing of the step is left on the compute stream, so the state lies
        after everything older. What is left is on other streams and freed before the next step. Addresses of blocks do
        not depend on how far a pool had grown before.
        """
        fresh = self.traffic.adds_up or self.traffic.gradients_sharded  # gradients that stay on the compute stream
        return not self.context.spec.layer.metrics_after and (self.traffic.fully_sharded or not fresh)

    def recast_bytes(self, unit: Unit) -> tuple[float, float]:
        """Return the bytes of 16-bit copies of a recomputed unit's weights: those that its block makes itself, of its
        experts, and the others, which autocast may remember.
        """
        own = unit.experts[0] if unit.recast[0] and casts_experts(self._of_block[unit.code]) else 0.0
        width = self.context.dtype_bytes("compute")
        return own * width, (unit.recast[0] - own) * width

    def passes(self, unit: Unit) -> Passes:
        """Return the events of a unit's passes."""
        word = str(unit.words[0]) if unit.wrapped else ""
        key = (unit.code, word)
        if key not in self._passes:
            operators = self._of_block[unit.code]
            if unit.block == "head":
                layer, cut = self.context.spec.layer, bool(self.context.table["tp"][0] > 1)
                peaks = head_peaks(layer, self.context.runtime, cut=cut)
                kept = bool(layer.metrics_after)
                self._passes[key] = self._tensors.head_passes(
                    operators, peaks, kept=kept, at_once=turns_at_once(self.context.runtime)
                )
            else:
                mode = self.operators.modes(unit.code)[word] if word else RecomputeSpec()
                tensors = self._inside if unit.is_layer else self._tensors
                self._passes[key] = tensors.passes(operators, mode)
        return self._passes[key]

    def pieces(self, events: tuple[Event, ...]) -> tuple[Piece, ...]:
        """Return the events of one of `passes` in pieces that end where the gradient of a weight has been computed."""
        if id(events) not in self._pieces:
            self._pieces[id(events)] = _in_pieces(events)
        return self._pieces[id(events)]

    def halves(
        self, events: tuple[Event, ...], from_forward: frozenset[int]
    ) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """Return the same of a backward pass that is split: the second half computes gradients of weights, and frees
        what is there from the forward pass and the gradients that it needs.

        What runs again is freed in the first half: torch's checkpoints run again in the second. Source: torch,
        distributed/pipelining/_backward.py: stage_backward_input keeps the graph, and a gradient for every weight.
        """
        key = id(events), from_forward
        if key not in self._halves:
            stay = from_forward | {slot for act, slot, _ in events if act is Act.NEEDED}
            second = [e for e in events if e[0] is Act.GRADIENT or (e[0] is Act.FREE and e[1] in stay)]
            first = [e for e in events if e[0] is Act.ALLOCATE or (e[0] is Act.FREE and e[1] not in stay)]
            self._halves[key] = _in_pieces(first), _in_pieces(second)
        return self._halves[key]

    @cached_property
    def alike(self) -> list[tuple[Hashable, ...]]:
        """For each stage what its passes follow from: equal for stages that are alike."""
        return [tuple((u.code, id(u.words), u.wrapped, id(u.trained)) for u in units) for units in self.stages]

    def keeps_inputs(self, unit: Unit) -> bool:
        """Whether a unit's input and its gradient are kept until the backward pass ends."""
        again = unit.wrapped and bool(self.context.spec.recompute[str(unit.words[0])].recomputes)
        return again and bool(frozen_units_keep_inputs(self.context)[0])

    def elements(self, unit: Unit) -> list[Held]:
        """Return the elements of a unit's parameters before sharding: of each matrix, and of all others together."""
        key = id(unit.trained), id(unit.words), unit.wrapped
        if key not in self._elements:
            self._elements[key] = self._new_elements(unit)
        return self._elements[key]

    def _new_elements(self, unit: Unit) -> list[Held]:
        weights, bytes_of = self.passes(unit).weights, self.context.dtype_bytes
        used, stored, trained = (float(each[0]) for each in (unit.elements, unit.stored.all, unit.trained.all))
        packed, param, compute = (bytes_of(kind) for kind in ("packed", "param", "compute"))
        own = bytes_of("trained") / param
        wide = self._wide_bytes() / param  # stored numbers per element of a frozen weight that is not packed

        def held(weight: Weight) -> Held:
            n = weight.elements
            if weight.packed:
                return Held(n * packed / compute, n * packed / param, 0)
            return Held(n, n * own, n) if weight.trained else Held(n, n * wide, 0)

        each = [held(weight) for weight in weights]
        total = sum(one.used for one in each)
        scale = min(1.0, used / total) if total else 0.0
        found = [Held(*(round(n * scale) for n in one)) for one in each]
        rest = [round(whole) - sum(one[at] for one in found) for at, whole in enumerate((used, stored, trained))]
        return [*found, Held(*(max(0, n) for n in rest))]

    def _wide_bytes(self) -> float:
        """Return the bytes of a frozen weight that products read without unpacking."""
        adapter, param = self.context.runtime.adapter, self.context.dtype_bytes("param")
        return param if adapter is None or adapter.packed else self.context.dtype_bytes("packed")

    def zero_of(self, units: Sequence[Unit]) -> dict[str, float]:
        """Return the bytes of a rank's ZeRO buffers and of the temporaries of its update, by purpose."""
        whole = np.array([sum(float(unit.trained.all[0]) for unit in units)])
        mine = np.array([sum(float(unit.trained.all[0]) * self.share(unit, "optimizer") for unit in units)])
        found = zero_buffers(self.context, whole, mine)
        return {one.name: float(getattr(found, one.name)[0]) for one in fields(found)}

    def made_by_update(self, units: Sequence[Unit], nbytes: float) -> list[float]:
        """Return the sizes of temporary tensors, `nbytes` in all, for updating `units`: one per parameter, or one under
        ZeRO.
        """
        if self.in_backward:  # each parameter as its gradient is computed
            return []
        if is_orthogonalised(self.context.runtime):
            return self._made_beside_matrices(units)
        owned = [one.trained * self.share(unit, "optimizer") for unit in units for one in self.elements(unit)]
        if self.context.spec.zero is not None or not sum(owned):
            return [nbytes]
        return [nbytes * n / sum(owned) for n in owned] if nbytes else []

    def flattened_at_end(self, units: Sequence[Unit]) -> list[list[float]]:
        """Return the sizes of temporary tensors that ZeRO-1 makes of gradients after the last backward pass: first to
        reduce them, then to update what the rank owns.

        Of 16-bit gradients a bucket and its flat copy, then one flat tensor and its float32 copy
        (deepspeed/runtime/zero/stage_1_and_2.py: reduce_gradients, allreduce_bucket, step); of float32 sums a flat
        bucket (deepspeed/runtime/engine.py: allreduce_bucket).
        """
        elements = self.context.spec.state.flattens_elements
        sharded = self.context.table.state_shard["optimizer"][0] > 1 and not self.traffic.fully_sharded
        if not elements or not sharded or self.traffic.updates_on_host:
            return []
        bucket = min(elements, sum(float(unit.trained.all[0]) for unit in units))
        if sums_wide(self.context):
            return [[4.0 * bucket]]
        width = self.context.dtype_bytes("param")
        mine = sum(float(unit.trained.all[0]) * self.share(unit, "optimizer") for unit in units)
        return [[elements * width, bucket * width], [mine * width, 4.0 * mine]]

    def optimizers(self, unit: Unit) -> list[tuple[float, Optimizer, float]]:
        """Return (elements, optimizer, bytes of state per element) of a unit's parameters; hidden matrices are those of
        layers.
        """
        chosen, width = OPTIMIZERS[self.context.runtime.optimizer], self.state["optimizer"]
        found = [one.trained for one in self.elements(unit)]
        if paged := self._paged_width():
            share = self.share(unit, "optimizer")
            return [(n, chosen, width + paged * (n * share < PAGED_ELEMENTS)) for n in found]
        if chosen.matrices is None or unit.orthogonal is None:
            return [(elements, chosen, width) for elements in found]
        less = matrix_state_bytes(self.context) * (width > 0)
        return [*((elements, chosen.matrices, less) for elements in found[:-1]), (found[-1], chosen, width)]

    def paged_bytes(self, units: Sequence[Unit]) -> float:
        """Return the bytes of a rank's paged states."""
        if not self._paged_width():
            return 0.0
        owned = (one.trained * self.share(unit, "optimizer") for unit in units for one in self.elements(unit))
        return sum(paged_bytes(self.context.runtime, n) for n in owned)

    def _paged_width(self) -> float:
        """Return the bytes per element of paged states; 0 where the CPU updates."""
        return 0.0 if self.traffic.updates_on_host else paged_width(self.context.runtime)

    def _made_beside_matrices(self, units: Sequence[Unit]) -> list[float]:
        """Return the temporary bytes of AdamW for everything but hidden matrices, or those of the largest hidden
        matrix, whichever is more.
        """
        copies = self.context.spec.state.update_copies * self.context.dtype_bytes("param")
        rest = [
            elements * self.share(unit, "optimizer") * copies
            for unit in units
            for elements, chosen, _ in self.optimizers(unit)
            if chosen.matrices is not None
        ]
        largest = max((float(unit.orthogonal.made_bytes[0]) for unit in units if unit.orthogonal), default=0.0)
        return rest if sum(rest) > largest else [largest]

    def stage_buffers(self, rank: int) -> list[float]:
        """Return the bytes of a pipeline rank's buffers of messages that exist throughout, and of outputs that this
        version keeps to the end of the step.
        """
        stages = self.schedule.stages_of(rank)
        first, last = (np.array([[end in stages]]) for end in (0, self.schedule.stages - 1))
        return [float(one[0, 0]) for one in between_stages_bytes(self.context, first, last, np.zeros((1, 1)))]

    def share(self, unit: Unit, kind: State) -> float:
        """Return the share of a unit's elements for which a rank has a kind of state."""
        table, own = self.context.table, unit.of(kind)
        key = id(own), kind
        if key not in self._shares:
            whole = float(own.all[0])
            mine = own.shared[0] / table.state_shard[kind][0] + own.experts[0] / table.expert_shard[kind][0]
            self._shares[key] = float(mine) / whole if whole else 0.0
        return self._shares[key]


def _in_pieces(events: Iterable[Event]) -> tuple[Piece, ...]:
    found: list[Piece] = []
    piece: list[TensorEvent] = []
    for act, slot, nbytes in events:
        if act is Act.GRADIENT:
            found.append(Piece(tuple(piece), slot))
            piece = []
        elif act is not Act.NEEDED:
            piece.append((slot, whole_blocks(nbytes) if act is Act.ALLOCATE else 0))
    return (*found, Piece(tuple(piece)))
