"""The code of every unit of one plan's network, and its stages, as fine as a program is to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from simulator.config.model import Model
from simulator.kernels.operators import OperatorSpec
from simulator.lowering.block_code import BlockCode, block_code
from simulator.lowering.steps import KernelStep, Step, TransferStep, WaitStep
from simulator.overlap.combined import DELAY_WGRAD, TINY, LayerParts, hidden_and_lost_s
from simulator.runtimes.library import ModelOperators
from simulator.runtimes.parts import RecomputeSpec
from simulator.step.context import CostContext
from simulator.step.held import local_parameters, saved_bytes, tensors_bytes
from simulator.step.host import layer_host_s
from simulator.step.units import SavedBytes, Unit, UnitMaker


class Network:
    """`stages[s]` lists the units of stage s in forward order; `code_of` gives the code of each.

    With `collapse` a stage is a single unit: parameters, bytes and steps of all its units together.
    """

    def __init__(self, model: Model, operators: ModelOperators, context: CostContext, *, collapse: bool) -> None:
        self.context = context
        self.operators: Mapping[str, Sequence[OperatorSpec]] = {
            "dense": operators.dense_layer,
            "embedding": operators.embedding,
            "head": operators.head,
        } | ({"moe": operators.moe_layer} if model.moe is not None else {})
        self._blocks: dict[tuple[str, str], BlockCode] = {}
        self._collapsed: dict[str, BlockCode] = {}
        self._same: dict[tuple[object, ...], BlockCode] = {}
        self._exposed: float | None = None
        saved = {name: self._saved(held) for name, held in self.operators.items()}
        plan = context.table.plans[0]
        self.units = UnitMaker(model, context, local_parameters(model, context), saved).stages(plan)
        self.stages = [[self._as_one_unit(units, s)] for s, units in enumerate(self.units)] if collapse else self.units

    def code_of(self, unit: Unit) -> BlockCode:
        """Return the code of a unit's passes."""
        if unit.name in self._collapsed:
            return self._collapsed[unit.name]
        word = str(unit.words[0])
        key = (unit.block, word if unit.wrapped else "")
        if key not in self._blocks:
            self._blocks[key] = self._new_block(unit, word)
        return self._blocks[key]

    def exposed(self, step: Step) -> Step:
        """Return an exchange of tokens as long as it delays two micro batches beside each other, and any other step as it is."""
        if not isinstance(step, TransferStep) or step.group != "ep":
            return step
        if self._exposed is None:
            self._exposed = self._exposed_share()
        return replace(step, seconds=self._exposed * step.seconds)

    def _exposed_share(self) -> float:
        """Return what a layer forward and one backward beside it take longer for exchanges, as a share of these."""
        code = next((code for (block, _), code in self._blocks.items() if block == "moe"), None)
        if code is None:
            return 1.0
        forward, backward = _layer_parts(code.forward), _layer_parts(code.backward)
        later = str(self.context.table.ep_overlap[0]) == DELAY_WGRAD
        moved = forward.moved_s + backward.moved_s
        sizes = [float(step.nbytes) for step in code.forward if isinstance(step, TransferStep) and step.group == "ep"]
        held = (
            self.context.groups.load("all_to_all", "ep", np.array(sizes[:1] or [0.0]))[0]
            / self.context.roofline.gpu.sm_count
        )
        hidden, lost = hidden_and_lost_s(forward, backward, held, weights_later=later)
        return float(((moved - hidden + lost) / np.maximum(moved, TINY))[0])

    def _saved(self, operators: Sequence[OperatorSpec]) -> SavedBytes:
        spec, table = self.context.spec, self.context.table
        return SavedBytes(
            by_mode={
                word: saved_bytes(operators, spec.recompute[word], self.context) for word in table.recompute_modes
            },
            everything=tensors_bytes(operators, self.context),
        )

    def _new_block(self, unit: Unit, word: str) -> BlockCode:
        layer = unit.block in {"dense", "moe"}
        added = layer_host_s(self.context.spec, self.context.table, sparse=unit.block == "moe")
        forward_s, backward_s = (float(seconds[0]) for seconds in added)
        return block_code(
            f"{unit.block} {word}" if unit.wrapped else unit.block,
            self.operators[unit.block],
            self.context.in_layers if layer else self.context,
            replace(self.context.spec.recompute[word], layers=1.0) if unit.wrapped else RecomputeSpec(),
            host_forward_s=forward_s if layer else 0.0,
            host_backward_s=backward_s if layer else 0.0,
        )

    def _as_one_unit(self, units: Sequence[Unit], stage: int) -> Unit:
        """Return a stage as one unit; stages made of equal blocks share one code."""
        codes = [self.code_of(unit) for unit in units]
        key = tuple(id(code) for code in codes)
        if key not in self._same:
            self._same[key] = BlockCode(
                name=f"stage kind {len(self._same)}",
                forward=tuple(step for code in codes for step in code.forward),
                backward=tuple(step for code in reversed(codes) for step in code.backward),
            )
        name, nothing = f"stage {stage}", np.zeros(1)
        self._collapsed[name] = self._same[key]
        return Unit(
            name=name,
            blocks=tuple(unit.block for unit in units),
            words=np.array([""]),
            wrapped=False,
            shared=sum((u.shared for u in units), nothing),
            experts=sum((u.experts for u in units), nothing),
            saved_bytes=sum((u.saved_bytes for u in units), nothing),
            again_bytes=np.asarray(max((u.again_bytes for u in units), default=nothing)),
            passing_bytes=np.asarray(max((u.passing_bytes for u in units), default=nothing)),
            kept_cast=sum((u.kept_cast for u in units), nothing),
            recast=sum((u.recast for u in units), nothing),
            widest=np.asarray(max((u.elements for u in units), default=nothing)),
        )


def _layer_parts(steps: Sequence[Step]) -> LayerParts:
    """Return what a pass computes around its experts and in them, and its exchanges."""
    seconds: list[list[float]] = [[], [], []]
    weights: list[list[float]] = [[], [], []]
    exchanges: list[float] = []
    for step in steps:
        if isinstance(step, WaitStep):
            continue
        if isinstance(step, TransferStep) and step.group == "ep":
            exchanges.append(step.seconds)
            continue
        took = step.cost.seconds if isinstance(step, KernelStep) else step.seconds
        seconds[min(len(exchanges), 2)].append(took)
        if isinstance(step, KernelStep) and step.weight:
            weights[min(len(exchanges), 2)].append(took)
    exchanges += [0.0, 0.0]
    before, experts, behind = (sum(part) for part in seconds)
    of_before, of_experts, of_behind = (sum(part) for part in weights)
    figures = (before + behind, experts, of_before + of_behind, of_experts, exchanges[0], sum(exchanges[1:]))
    names = ("around_s", "experts_s", "around_weight_s", "experts_weight_s", "first_s", "second_s")
    return LayerParts(**{name: np.full(1, figure) for name, figure in zip(names, figures, strict=True)})
