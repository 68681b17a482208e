"""The code of every unit of one plan's model, and its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from simulator.config.model import Model
from simulator.kernels.operators import OperatorSpec
from simulator.lowering.block_code import BlockCode, block_code
from simulator.runtimes.model_operators import ModelOperators
from simulator.runtimes.parts import RecomputeSpec
from simulator.step.context import CostContext
from simulator.step.frozen import local_parameters
from simulator.step.host import layer_host_s, update_host_s
from simulator.step.units import Unit, UnitMaker


class Network:
    """`stages[s]` lists the units of stage s in forward order; `code_of` returns the code of a unit."""

    def __init__(
        self, model: Model, operators: ModelOperators, context: CostContext, sustained: CostContext | None = None
    ) -> None:
        """Blocks run at the clocks of `context`, copies and updates at those of `sustained`, which long products
        sustain.
        """
        self.context, self.sustained = context, sustained or context
        self._modes = operators.modes
        self.operators: Mapping[str, Sequence[OperatorSpec]] = {
            "embedding": operators.embedding,
            "head": operators.head,
        } | operators.layers(moe=model.moe is not None)
        self._blocks: dict[tuple[str, str], BlockCode] = {}
        plan = context.table.plans[0]
        self.stages = UnitMaker(model, self.sustained, local_parameters(model, self.sustained)).stages(plan)

    def code_of(self, unit: Unit) -> BlockCode:
        """Return the code of a unit's passes."""
        word = str(unit.words[0])
        key = (unit.code, word if unit.wrapped else "")
        if key not in self._blocks:
            self._blocks[key] = self._new_block(unit, word)
        return self._blocks[key]

    def _new_block(self, unit: Unit, word: str) -> BlockCode:
        layer = unit.block in {"dense", "moe"}
        added = layer_host_s(self.context.spec, self.context.table, sparse=unit.block == "moe")
        forward_s, backward_s = (float(seconds[0]) for seconds in added)
        return block_code(
            f"{unit.code} {word}" if unit.wrapped else unit.code,
            self.operators[unit.code],
            self.context.in_layers if layer else self.context,
            replace(self._modes(unit.code)[word], layers=1.0) if unit.wrapped else RecomputeSpec(),
            sparse=unit.block == "moe",
            host_forward_s=forward_s if layer else 0.0,
            host_backward_s=(backward_s if layer else 0.0) + float(update_host_s(self.context, unit.tensors)[0]),
        )
