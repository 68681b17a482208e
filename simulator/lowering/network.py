"""The network of one plan as stages of units: which block each layer is, under which recompute mode, of what size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from simulator.closed_form.layer_cost import CostContext
from simulator.closed_form.memory import Parameters, head_peak_bytes, local_parameters, placeholder_bytes
from simulator.closed_form.overlap_memory import symmetric_bytes
from simulator.closed_form.step_cost import layer_host_s
from simulator.config.model import Model
from simulator.lowering.block_code import BlockCode, block_code
from simulator.lowering.sharded_data import Unit
from simulator.pipeline.stages import stage_layers
from simulator.runtimes.library import ModelOperators, RecomputeSpec

StageUnits = Sequence[tuple[Unit, BlockCode]]


class Network:
    """`stages[s]` lists the units of stage s in forward order, each with its code.

    With `collapse` a stage is a single unit: parameters, bytes and steps of all its units together.
    """

    def __init__(self, model: Model, operators: ModelOperators, context: CostContext, *, collapse: bool) -> None:
        self.model, self.operators, self.context = model, operators, context
        self.parameters: Parameters = local_parameters(model, context)
        self._blocks: dict[tuple[str, str, bool], BlockCode] = {}
        self.stages: list[StageUnits] = []
        self._kinds: list[frozenset[str]] = []  # of layers, by stage
        plan = context.table.plans[0]
        layer = 0
        counts = stage_layers(model.layers, plan, context.spec.pipeline)
        same: dict[tuple[object, ...], BlockCode] = {}
        for stage, count in enumerate(counts):
            units: list[tuple[Unit, BlockCode]] = []
            if stage == 0:
                # Looked up, not multiplied with, unless it is the head as well.
                units.append(
                    (
                        self._unit("embedding", self.parameters.embedding, cast=model.tied_embeddings),
                        self._block("embedding"),
                    )
                )
            word = plan.recompute_per_stage[stage] if plan.recompute_per_stage else plan.recompute
            units += [self._layer(index, word) for index in range(layer, layer + count)]
            held = model.layer_kinds[layer : layer + count]
            self._kinds.append(frozenset("moe" if kind.sparse else "dense" for kind in held))
            layer += count
            if stage == len(counts) - 1:
                units.append((self._unit("head", self.parameters.head), self._block("head")))
            self.stages.append(_collapsed(units, stage, same) if collapse else units)

    def _layer(self, index: int, word: str) -> tuple[Unit, BlockCode]:
        mode = self.context.spec.recompute[word]
        # A mode for a share of the layers wraps every so many of them, the last of each run.
        every = round(1 / mode.layers)
        wrapped = bool(mode.recomputes) and index % every == every - 1
        p, name = self.parameters, f"layer {index}"
        if not self.model.layer_kinds[index].sparse:
            return self._unit(name, p.dense_layer, wrapped=wrapped), self._block("dense", word, wrapped=wrapped)
        unit = self._unit(name, p.moe_layer, p.experts, wrapped=wrapped)
        return unit, self._block("moe", word, wrapped=wrapped)

    def placeholder_bytes(self, stages: Sequence[int]) -> float:
        """Return the bytes of weight gradients that nobody fills on a rank that holds `stages`."""
        of_kind = {"dense": self.operators.dense_layer, "moe": self.operators.moe_layer}
        kinds = frozenset[str]().union(*(self._kinds[stage] for stage in stages))
        held = [operator for kind in sorted(kinds) for operator in of_kind[kind]]
        return float(placeholder_bytes(held, self.context)[0])

    def symmetric_bytes(self, stages: Sequence[int]) -> float:
        """Return the bytes of symmetric memory on a rank that holds `stages`."""
        kinds = [kind for stage in stages for kind in self._kinds[stage]]
        dense, moe = (np.array([[kinds.count(kind)]]) for kind in ("dense", "moe"))
        return float(symmetric_bytes(self.context, dense, moe)[0, 0])

    def _unit(
        self, name: str, shared: object, experts: object = 0.0, *, wrapped: bool = False, cast: bool = True
    ) -> Unit:
        found = Unit(name=name, shared=_number(shared), experts=_number(experts))
        used = found.elements if cast else 0.0
        return replace(found, recast=used) if wrapped else replace(found, kept_cast=used)

    def _block(self, name: str, word: str = "none", *, wrapped: bool = False) -> BlockCode:
        key = (name, word, wrapped)
        if key not in self._blocks:
            self._blocks[key] = self._new_block(name, word, wrapped=wrapped)
        return self._blocks[key]

    def _new_block(self, name: str, word: str, *, wrapped: bool) -> BlockCode:
        layer = name in {"dense", "moe"}
        host = self.context.spec.host
        forward_s, backward_s = (float(seconds[0]) for seconds in layer_host_s(host, self.context.table))
        operators = {
            "dense": self.operators.dense_layer,
            "moe": self.operators.moe_layer,
            "embedding": self.operators.embedding,
            "head": self.operators.head,
        }[name]
        mode = replace(self.context.spec.recompute[word], layers=1.0) if wrapped else RecomputeSpec()
        block = block_code(
            f"{name} {word}" if wrapped else name,
            operators,
            self.context.in_layers if layer else self.context,
            mode,
            host_forward_s=forward_s if layer else 0.0,
            host_backward_s=backward_s if layer else 0.0,
        )
        if name == "head":
            # The loss turning round: what is alive together then, beyond what the head saves.
            peak = float(head_peak_bytes(self.context)[0])
            return replace(block, again_bytes=round(max(0.0, peak - block.saved_bytes)))
        return block


def _collapsed(
    units: list[tuple[Unit, BlockCode]], stage: int, same: dict[tuple[object, ...], BlockCode]
) -> list[tuple[Unit, BlockCode]]:
    """Return a stage as one unit; stages made of equal blocks share one code."""
    whole = Unit(
        name=f"stage {stage}",
        shared=sum(u.shared for u, _ in units),
        experts=sum(u.experts for u, _ in units),
        pieces=len(units),
        widest=max((u.elements for u, _ in units), default=0.0),
        kept_cast=sum(u.kept_cast for u, _ in units),
        recast=sum(u.recast for u, _ in units),
    )
    key = tuple(id(block) for _, block in units)
    if key not in same:
        same[key] = BlockCode(
            name=f"stage kind {len(same)}",
            forward=tuple(step for _, b in units for step in b.forward),
            backward=tuple(step for _, b in reversed(units) for step in b.backward),
            saved_bytes=sum(b.saved_bytes for _, b in units),
            again_bytes=max((b.again_bytes for _, b in units), default=0),
        )
    return [(whole, same[key])]


def _number(value: object) -> float:
    return float(np.asarray(value, dtype=np.float64).flat[0])
