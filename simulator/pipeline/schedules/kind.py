"""The interface of a schedule: its order of actions, its micro batches in flight, and its properties."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.pipeline.schedules.table import Action, Kind
from topology.errors import BadPlan

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The row to be written: the stages of a rank among `ranks`, for `micro_batches`.

    `paired`: a forward pass and the backward pass after it run together, see `registry.build_schedule`.
    """

    rank: int
    ranks: int
    stages: list[int]
    micro_batches: int
    paired: bool = False

    @property
    def after(self) -> int:
        """Number of ranks after this one."""
        return self.ranks - 1 - self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRanks:
    """Ranks of many plans' pipelines, as columns that broadcast: (plans, 1), and `rank` (plans, ranks)."""

    pp: Floats
    virtual_stages: Floats
    micro_batches: Floats
    rank: Floats

    def take(self, plans: NDArray[np.intp]) -> PipelineRanks:
        """Return the ranks of some of the plans."""
        return PipelineRanks(
            pp=self.pp[plans],
            virtual_stages=self.virtual_stages[plans],
            micro_batches=self.micro_batches[plans],
            rank=self.rank[plans],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """A schedule by its name. A rank holds `least_stages` to `most_stages` stages (0: no limit).

    `lay_out` writes the row of a rank. `in_flight` is a lower bound of the most micro batches in flight on a rank when
    a backward pass begins, in units of passes through all of the rank's stages; `beside_gradients` is the same while
    every stage of the rank has parameter gradients and none has had its last (0 where this never happens).
    """

    name: str
    lay_out: Callable[[Row, Place], None]
    in_flight: Callable[[PipelineRanks], Floats]
    beside_gradients: Callable[[PipelineRanks], Floats]
    least_stages: int = 1
    most_stages: int = 1
    v_shaped: bool = False  # stages go down the ranks and back up, instead of round the ranks
    splits_backward: bool = False  # computes input and weight gradients separately; compiled blocks cannot
    lags: bool = False  # a rank delays as many weight gradients as there are ranks before it
    rounds: bool = False  # micro batches pass a rank's stages in equal rounds, of about as many as ranks
    forwards_first: bool = False  # all forward passes come before the first backward pass
    pairs: bool = False  # runs forward and backward passes of two micro batches at the same time by itself
    every_stage: bool = False  # has at least one micro batch for each stage
    in_torch: bool = True  # torch.distributed.pipelining has it under this name
    every_stage_in_torch: bool = False  # its class there requires this, although the schedule does not
    also_called: tuple[str, ...] = ()  # other names in cases and flags

    def has_stages(self, stages_per_rank: int) -> bool:
        """Return whether a rank may have this number of stages."""
        return self.least_stages <= stages_per_rank <= (self.most_stages or stages_per_rank)


def per_round(ranks: int, micro_batches: int) -> int:
    """Return how many micro batches pass one local stage before the next: about as many as ranks."""
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise BadPlan(
            f"{micro_batches} micro batches do not divide into {rounds} equal rounds on {ranks} ranks",
            why="interleaved schedules go round the stages in equal rounds",
            remedy=f"use a multiple of {rounds}",
        )
    return micro_batches // rounds


class Row:
    """One rank's row while it is written. The micro batches of a stage come in order, so a call names only the
    stage.
    """

    def __init__(self, *, backward_first: bool) -> None:
        self.backward_first = backward_first
        self.actions: list[Action] = []
        self._forwards: dict[int, int] = {}
        self._backwards: dict[int, int] = {}
        self.delayed_weights: deque[tuple[int, int]] = deque()  # (stage, micro batch) of delayed weight gradients

    def _forward(self, stage: int) -> Action:
        turn = self._forwards.get(stage, 0)
        self._forwards[stage] = turn + 1
        return Action(stage, Kind.FORWARD, turn)

    def _backward(self, stage: int, kind: Kind = Kind.BACKWARD) -> Action:
        turn = self._backwards.get(stage, 0)
        self._backwards[stage] = turn + 1
        return Action(stage, kind, turn)

    def forward(self, stage: int) -> None:
        self.actions.append(self._forward(stage))

    def backward(self, stage: int) -> None:
        self.actions.append(self._backward(stage))

    def input_grad(self, stage: int) -> None:
        """The first half of a backward pass; the second half, the weight gradient, is delayed."""
        half = self._backward(stage, Kind.INPUT_GRAD)
        self.actions.append(half)
        self.delayed_weights.append((stage, half.micro_batch))

    def weight_grad(self, stage: int | None = None) -> None:
        """Run the oldest delayed weight gradient (of `stage`, if given), if there is one."""
        delayed = self.delayed_weights
        entry = next((entry for entry in delayed if entry[0] == stage), None) if stage is not None else None
        if entry is not None:
            delayed.remove(entry)
        elif stage is None and delayed:
            entry = delayed.popleft()
        if entry is not None:
            self.actions.append(Action(entry[0], Kind.WEIGHT_GRAD, entry[1]))

    def pair(self, forward: int, backward: int) -> None:
        parts = self._forward(forward), self._backward(backward)
        self.actions.append(Action(-1, Kind.OVERLAP, -1, parts[::-1] if self.backward_first else parts))


def interleaving(name: str, ahead: int, *, lags: bool = False, rounds: bool = False, **facts: Any) -> ScheduleKind:
    """Return a schedule whose ranks run forward passes up their stages in rounds, and backward passes down them, the
    two alternating.

    A rank begins its backward passes after the rounds of all its stages but the last, and `ahead` forward passes for
    each following rank. With `lags`, backward passes are split and a weight gradient is delayed by as many backward
    passes as there are ranks before: every rank then has as many micro batches in flight as the first rank of 1F1B.
    """

    def lay_out(row: Row, place: Place) -> None:
        in_round = per_round(place.ranks, place.micro_batches) if rounds else place.micro_batches
        warm_up = (len(place.stages) - 1) * in_round + ahead * place.after + place.paired
        interleave(row, place, in_round, warm_up=warm_up, weights_lag=place.rank if lags else None)

    def held(of: PipelineRanks, passes: Floats) -> Floats:
        warm_up = (of.virtual_stages - 1) * _in_round(of) + ahead * (of.pp - 1 - of.rank)
        return np.minimum(warm_up + 1 + of.rank * lags, passes) / of.virtual_stages

    def beside_gradients(of: PipelineRanks) -> Floats:
        passes, in_round = of.virtual_stages * of.micro_batches, _in_round(of)
        first_back = (of.virtual_stages - 1) * in_round + 1  # backwards until the rank's first stage has gradients
        several_rounds = (of.virtual_stages == 1) | (of.micro_batches > in_round)
        return np.where((of.rank * lags + first_back < passes) & several_rounds, held(of, passes - first_back), 0.0)

    return ScheduleKind(
        name=name,
        lay_out=lay_out,
        in_flight=lambda of: held(of, of.virtual_stages * of.micro_batches),
        beside_gradients=beside_gradients,
        splits_backward=lags,
        lags=lags,
        rounds=rounds,
        **facts,
    )


def _in_round(of: PipelineRanks) -> Floats:
    return of.micro_batches / np.maximum(1.0, np.floor(of.micro_batches / of.pp))


def interleave(row: Row, place: Place, in_round: int, *, warm_up: int, weights_lag: int | None = None) -> None:
    """Write forward passes in rounds up the local stages, backward passes in rounds down them, with `warm_up` forward
    passes ahead.

    With `weights_lag`, backward passes are split, and each weight gradient is delayed by that many backward passes.
    """
    stages, local, total = place.stages, len(place.stages), len(place.stages) * place.micro_batches
    warm_up = min(warm_up, total)
    forwards = [stages[k // in_round % local] for k in range(total)]
    backwards = [stages[local - 1 - k // in_round % local] for k in range(total)]
    for stage in forwards[:warm_up]:
        row.forward(stage)
    for turn, stage in enumerate(backwards):
        ahead = warm_up + turn < total
        if ahead and place.paired:
            row.pair(forwards[warm_up + turn], stage)
            continue
        if ahead:
            row.forward(forwards[warm_up + turn])
        if weights_lag is None:
            row.backward(stage)
        else:
            row.input_grad(stage)
            if turn >= weights_lag:
                row.weight_grad()
    while row.delayed_weights:
        row.weight_grad()
