"""The model of a plan as stages of units: the block, recompute mode and size of each unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_columns import words
from simulator.columns.plan_table import Floats
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.pipeline.stages import stage_layers
from simulator.runtimes.library import RuntimeSpec
from simulator.runtimes.model_operators import WIDE, operators_for
from simulator.step.context import CostContext
from simulator.step.held import Parameters, State
from simulator.step.muon import Orthogonal, orthogonalised

LAYERS, ENDS = ("dense", "moe"), ("embedding", "head")  # blocks by their place in the network


@dataclass(frozen=True, slots=True, eq=False)
class Elements:
    """Elements of parameters, with routed experts separate. Shape (plans,). `some`: in some plan there are any."""

    shared: Floats
    experts: Floats
    all: Floats = field(init=False)
    some: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "all", self.shared + self.experts)
        object.__setattr__(self, "some", bool(self.all.any()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    """One wrapped module: a block, and the elements of its parameters on a rank before sharding, as data-parallel ranks
    gather them, with routed experts separate. Where some are frozen, `trained` counts those with gradients and
    optimizer state, and `stored` the numbers that are stored (`simulator.step.held.Parameters`).

    `words` are its recompute modes, shape (plans,); `wrapped` is whether it is recomputed under some mode. Of the
    elements that products use, `kept_cast` belong to modules that run once, whose 16-bit copies the backward pass keeps
    under autocast, and `recast` to recomputed ones. `orthogonal` is the work on its hidden matrices, where an update
    orthogonalises their momentum.

    `wide` layers stay in 16 bits where the products of others do not; `code` tells them apart.

    `tensors` is the number of its trained parameters. The unit stands for `repeats` equal units in a row.
    """

    name: str
    block: str  # dense, moe, embedding or head
    words: NDArray[np.str_]
    wrapped: bool
    shared: Floats
    experts: Floats
    kept_cast: Floats
    recast: Floats
    trained: Elements
    stored: Elements
    orthogonal: Orthogonal | None = None
    tensors: int = 0
    repeats: int = 1
    wide: bool = False

    @property
    def code(self) -> str:
        """What its passes run: its block, or the same in 16 bits (`ModelOperators.layers`)."""
        return WIDE[self.block] if self.wide else self.block

    @property
    def is_layer(self) -> bool:
        return self.block in LAYERS

    @property
    def sparse(self) -> bool:
        """Whether it is a layer with experts."""
        return self.block == "moe"

    @property
    def elements(self) -> Floats:
        return self.shared + self.experts

    def of(self, kind: State) -> Elements:
        """Return the elements that have a kind of state."""
        return self.stored if kind == "parameters" else self.trained


def wrapping_period(spec: RuntimeSpec, word: str) -> int:
    """Return n for a recompute mode that wraps every n-th layer; 0 for none."""
    mode = spec.recompute[word]
    return round(1 / mode.layers) if mode.recomputes else 0


class UnitMaker:
    """Makes the units of plans with the same division into stages: those of `context`, for example `plan`."""

    def __init__(self, model: Model, context: CostContext, parameters: Parameters) -> None:
        self.model, self.context, self.parameters = model, context, parameters
        self._rows = len(context.table)
        self._none = np.full(self._rows, "none")
        self._made: dict[tuple[object, ...], Unit] = {}
        self._stages: dict[tuple[int, int, str, bool, bool, bool], list[Unit]] = {}
        # For each word: the modes of all plans, and their period.
        self._modes: dict[str, tuple[NDArray[np.str_], int]] = {}

    def stages(self, plan: Plan, *, mode: str = "", folded: bool = False) -> list[list[Unit]]:
        """Return the units of every stage in forward order, under the `mode` that the plan states for a stage, else the
        given one or, if that is empty, each plan's own: all plans of the table must then wrap the same layers. With
        `folded`, equal neighbours are one unit that repeats. Stages that are equal are the same list.
        """
        counts = stage_layers(self.model.layers, plan, self.context.spec.pipeline)
        starts = np.cumsum([0, *counts]).tolist()
        found = []
        for number, (start, count) in enumerate(zip(starts, counts, strict=False)):
            word = plan.recompute_per_stage[number] if plan.recompute_per_stage else mode
            key = start, count, word, number == 0, number == len(counts) - 1, folded
            if key not in self._stages:
                self._stages[key] = self._stage(*key)
            found.append(self._stages[key])
        return found

    def kinds(self) -> list[Unit]:
        """Return a unit of each block that the model has, without recomputation."""
        layers = {"moe" if kind.sparse else "dense" for kind in self.model.layer_kinds}
        never = np.zeros(self._rows, dtype=bool)
        return [self._unit(block, self._none, never) for block in ("embedding", *sorted(layers), "head")]

    def _stage(self, start: int, count: int, mode: str, first: bool, last: bool, folded: bool) -> list[Unit]:
        """Return the units of a stage with `count` layers from layer `start` on."""
        found = []
        if first:
            # The embedding is looked up, not multiplied with, unless its matrix is also the head's.
            found.append(self._end("embedding", cast=self.model.tied_embeddings))
        layers = range(start, start + count)
        found += self._folded(layers, mode) if folded else [self._layer(index, mode) for index in layers]
        if last:
            found.append(self._end("head"))
        return found

    def _folded(self, layers: Sequence[int], word: str) -> Iterator[Unit]:
        """Yield layers with equal neighbours folded into one, except the first two and the last two of them.

        So the folded unit comes third in either direction, where the steady state has begun: earlier units still wait
        for traffic of the model's ends.
        """
        for _, run in groupby(layers, key=lambda index: self._kind(index, word)):
            alike = [*run]
            middle = alike[2:-2]
            for index in alike if len(middle) < 2 else (*alike[:3], *alike[-2:]):
                unit = self._layer(index, word)
                yield replace(unit, repeats=len(middle)) if len(middle) > 1 and index == middle[0] else unit

    def _layer(self, index: int, word: str) -> Unit:
        kind, key = self._kind(index, word), (index, word)
        if kind not in self._made:
            block, _, wrapped, wide = kind
            made = self._new_layer(block, self._mode(word)[0] if wrapped else self._none, wrapped=wrapped)
            self._made[kind] = replace(made, wide=wide)
        if key not in self._made:
            self._made[key] = replace(self._made[kind], name=f"layer {index}")
        return self._made[key]

    def _kind(self, index: int, word: str) -> tuple[str, str, bool, bool]:
        """Return what layers have in common whose units are equal: the block, its mode, and whether it is wrapped and
        wide.
        """
        period = self._mode(word)[1]
        # A mode for a share of the layers wraps every n-th layer, the last of each run of n.
        wrapped = period > 0 and index % period == period - 1
        block = "moe" if self.model.layer_kinds[index].sparse else "dense"
        return block, word, wrapped, self.context.runtime.is_wide(index, self.model.layers)

    def _mode(self, word: str) -> tuple[NDArray[np.str_], int]:
        """Return the modes of all plans for a word, and their period."""
        if word not in self._modes:
            of = np.full(self._rows, word) if word else self.context.table.recompute
            periods = {wrapping_period(self.context.spec, name) for name in words(of)} - {0}
            self._modes[word] = of, min(periods, default=0)
        return self._modes[word]

    def _new_layer(self, block: str, of: NDArray[np.str_], *, wrapped: bool) -> Unit:
        again = np.zeros(self._rows, dtype=bool)
        for name in words(of):
            if wrapped and self.context.spec.recompute[name].recomputes:
                again = again | (of == name)
        return self._unit(block, of, again)

    def _end(self, block: str, *, cast: bool = True) -> Unit:
        unit = self._unit(block, self._none, np.zeros(self._rows, dtype=bool))
        return unit if cast else replace(unit, kept_cast=np.zeros(self._rows))

    def _elements(self, block: str, parameters: Parameters) -> Elements:
        both = (np.asarray(some, dtype=np.float64) for some in parameters.of_block(block))
        return Elements(*(np.broadcast_to(some, (self._rows,)) for some in both))

    def _unit(self, block: str, of: NDArray[np.str_], again: NDArray[np.bool_]) -> Unit:
        whole = self._elements(block, self.parameters)
        stored, trained = (
            whole if (own := self.parameters.of(kind)) is self.parameters else self._elements(block, own)
            for kind in KEPT_AND_TRAINED
        )
        used = whole.all
        return Unit(
            name=block,
            block=block,
            words=of,
            wrapped=bool(again.any()),
            shared=whole.shared,
            experts=whole.experts,
            stored=stored,
            trained=trained,
            kept_cast=np.where(again, 0.0, used),
            recast=np.where(again, used, 0.0),
            orthogonal=orthogonalised(self.model, block, self.context),
            tensors=self._tensors(block) if trained.some else 0,
        )

    def _tensors(self, block: str) -> int:
        """Return the number of trained tensors in a block: matrices, and the vectors of norms unless everything is
        frozen.
        """
        operators, adapter = operators_for(self.model, self.context.runtime), self.context.runtime.adapter
        if block == "embedding":
            return 1
        if block == "head":
            return int(not self.model.tied_embeddings) + int(self.model.final_norm)
        weights = [one for one in operators.blocks[block] if one.weight]
        trained = sum(one.adapter if adapter and adapter.freezes_all else one.weight_gradient for one in weights)
        return trained + (0 if adapter and adapter.freezes_all else _vectors(self.model))


def _vectors(model: Model) -> int:
    """Return the number of a layer's norms, and of the biases of its queries, keys and values."""
    latent = 0 if model.latent is None else 1 + bool(model.latent.q_lora_rank)
    return model.norms_per_layer + latent + 2 * model.qk_norm + 3 * model.qkv_bias


KEPT_AND_TRAINED: tuple[State, State] = ("parameters", "gradients")


def held_kinds(units: Sequence[Unit]) -> tuple[int, int]:
    """Return the number of (dense, MoE) layers in some units."""
    dense, moe = (sum(unit.repeats for unit in units if unit.block == kind) for kind in LAYERS)
    return dense, moe
