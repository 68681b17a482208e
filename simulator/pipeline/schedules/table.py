"""A schedule as a table: for every rank the order of its actions, and the rank of every stage.

An action is a forward F, a full backward B, or a backward split into input gradient I and weight gradient W, of one
micro batch on one stage; an overlapped pair runs a forward and a backward together. Actions are written as
torch.distributed.pipelining writes them ("2F0": forward of micro batch 0 on stage 2), and the names are torch's class
names without `Schedule`, so that torch's runtime can load a table unchanged. Tables hold compute only; messages follow
from where the stages are (`simulator.pipeline.schedule_program`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    OVERLAP = "OVERLAP_F_B"


class Action(NamedTuple):
    """One step of a rank. An overlapped pair has `parts` (its F, its B), stage -1 and micro batch -1."""

    stage: int
    kind: Kind
    micro_batch: int
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def leaves(self) -> tuple[Action, ...]:
        """The actions themselves: this one, or the two of a pair."""
        return self.parts or (self,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One table row per pipeline rank. `v_shaped`: stages go down the ranks and back up, instead of round the ranks."""

    name: str
    ranks: int
    stages_per_rank: int
    micro_batches: int
    table: tuple[tuple[Action, ...], ...] = field(hash=False)  # too long to hash at each look-up
    v_shaped: bool = False

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds `stage`."""
        return stage_rank(stage, self.ranks, v_shaped=self.v_shaped)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, in order."""
        return stages_on(rank, self.ranks, self.stages_per_rank, v_shaped=self.v_shaped)

    def csv(self) -> str:
        """Return the table as torch's pipeline runtime loads it (`_load_csv(..., format="compute_only")`)."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.table)


def stages_on(rank: int, ranks: int, each: int, *, v_shaped: bool) -> tuple[int, ...]:
    """Return the stages of a rank, of which every rank has `each`; see `stage_rank`."""
    return tuple(turn * ranks + (ranks - 1 - rank if v_shaped and turn % 2 else rank) for turn in range(each))


def stage_rank(stage: int, ranks: int, *, v_shaped: bool) -> int:
    """Return the rank of a stage: round the ranks repeatedly, or with `v_shaped` down the ranks and back up."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if v_shaped and turn % 2 else place
